"""Starts flows and sends events, for async and blocking queues."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from omniq.errors import InvalidTask, TaskNotFound
from omniq.failpoints import hit
from omniq.models import Task, check_id, check_key
from omniq.storage.base import BaseStorage
from omniq.tasks.children import check_value
from omniq.tasks.flow import MAX_NODES, Flow
from omniq.tasks.flow_records import child_id, event_task
from omniq.tasks.task_builder import TaskBuilder

_OPEN_FOR = timedelta(hours=1)
"""How long the producer of a large flow may add records to it."""

Store = Callable[[Sequence[Task]], Awaitable[list[str]]]


async def start_flow(
    storage: BaseStorage,
    builder: TaskBuilder,
    store: Store,
    flow: Flow,
    *,
    unique: str | None = None,
    flow_id: str | None = None,
    in_transaction: bool = False,
) -> str:
    """Store all records of the flow; returns its id, or that of the flow that holds the unique key."""
    if not isinstance(flow, Flow):
        raise InvalidTask(f"start: expected a Flow, and not {type(flow).__name__}")
    if unique is not None:
        check_key("unique", unique)
    if flow_id is not None:
        check_id(flow_id)
    root_id = flow_id or storage.clock.new_id()
    tasks = flow.build(root_id, builder, storage.clock.now(), unique)
    if len(tasks) <= MAX_NODES:
        return (await store(tasks))[0]
    if in_transaction:
        raise InvalidTask(
            f"a flow that is started in a transaction has at most {MAX_NODES:,} records, and not {len(tasks):,}"
        )
    return await _start_large(storage, store, tasks)


async def _start_large(storage: BaseStorage, store: Store, tasks: list[Task]) -> str:
    """Store a flow in parts. All nodes wait for an event, which is completed after the last part."""
    root, *others = tasks
    opened = event_task(
        f"{root.id}._open",
        root,
        expires=storage.clock.now() + _OPEN_FOR,
        created_at=root.created_at,
    )
    records = [_open(root), opened, *(_behind(task, opened.id) for task in others)]
    for start in range(0, len(records), MAX_NODES):
        hit("start_flow.before_part")
        (first, *_) = await store(records[start : start + MAX_NODES])
        if start == 0 and first != root.id:
            return first
    groups = [task.id for task in others if task.workflow and task.workflow.kind == "group"]
    for group_id in (*groups, root.id):
        await storage.close_group(group_id)
    hit("start_flow.before_open")
    await storage.complete(opened.id)
    return root.id


def _open(group: Task) -> Task:
    assert group.workflow is not None
    workflow = msgspec.structs.replace(group.workflow, is_open=True)
    return msgspec.structs.replace(group, workflow=workflow)


def _behind(task: Task, opened: str) -> Task:
    workflow = task.workflow
    assert workflow is not None
    if workflow.kind == "group":
        return _open(task)
    workflow = msgspec.structs.replace(workflow, after=(*workflow.after, opened))
    return msgspec.structs.replace(task, workflow=workflow)


async def send_event(storage: BaseStorage, name: str, value: Any, to: Any) -> bool:
    """Send an event to a task, or to all tasks that wait for it; False if it already has a value.

    Raises `TaskNotFound` if the task has no record.
    """
    if to is None:
        check_id(name)
        return await storage.send(event_task(name, created_at=storage.clock.now()), value)
    task_id = to if isinstance(to, str) else getattr(to, "id", None)
    if not isinstance(task_id, str):
        raise InvalidTask("send_event(to=…): expected a handle of a task or a flow, or an id")
    check_id(task_id)
    event_id = child_id(task_id, name, "event")
    parent = await storage.get_task(task_id)
    if parent is None:
        raise TaskNotFound(task_id)
    if parent.status.is_final:
        return False
    known = await storage.get_task(event_id)
    if known is not None and known.workflow is not None:
        check_value(name, known.workflow.value, value)
    return await storage.send(event_task(event_id, parent, created_at=storage.clock.now()), value)
