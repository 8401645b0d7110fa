"""What operators see of flows: a list of them, the nodes of one with their counts, and the open events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Any

import msgspec

from omniq.errors import TaskNotFound
from omniq.models import Task, TaskStatus
from omniq.storage.base import BaseStorage
from omniq.tasks.flow_records import EVENT_PATH, GROUP_PATH, name_of
from omniq.text.to_json import JsonRecord

_PAGE = 1_000
_MAX_LISTED = 10_000


class FlowInfo(JsonRecord, msgspec.Struct, frozen=True, kw_only=True):
    """A flow: how many of its nodes there are, live and failed."""

    id: str
    name: str
    status: TaskStatus
    nodes: int
    live: int
    failed: int
    started_at: datetime


class NodeInfo(JsonRecord, msgspec.Struct, frozen=True, kw_only=True):
    """A node of a flow. `counts` has the members of a map by status; `layer` is its place in the graph."""

    id: str
    name: str
    status: TaskStatus
    func_path: str
    after: tuple[str, ...]
    layer: int
    counts: dict[str, int]
    needs: int = 0


class EventInfo(JsonRecord, msgspec.Struct, frozen=True, kw_only=True):
    """An event that was not sent yet: the task that waits for it, and the question to a person."""

    id: str
    task_id: str | None
    name: str
    type: str | None
    prompt: str
    expires: datetime | None


async def list_flows(storage: BaseStorage, limit: int = 100) -> list[FlowInfo]:
    """The newest flows, newest first."""
    found: list[FlowInfo] = []
    cursor: str | None = None
    while len(found) < limit:
        scan = await storage.scan_tasks(func_path=GROUP_PATH, limit=_PAGE, cursor=cursor)
        found += [_flow(task) for task in scan.tasks if _is_root(task)]
        cursor = scan.cursor
        if cursor is None:
            break
    return found[:limit]


def _is_root(task: Task) -> bool:
    return task.workflow is None or task.workflow.parent is None


def _flow(task: Task) -> FlowInfo:
    workflow = task.workflow
    return FlowInfo(
        id=task.id,
        name=task.task_type or "",
        status=task.status,
        nodes=0 if workflow is None else workflow.size,
        live=0 if workflow is None else workflow.members,
        failed=0 if workflow is None else workflow.failed,
        started_at=task.created_at,
    )


async def show_flow(storage: BaseStorage, flow_id: str) -> tuple[FlowInfo, list[NodeInfo]]:
    """A flow and its nodes, in layers. Raises `TaskNotFound`."""
    root = await storage.get_task(flow_id)
    if root is None or root.workflow is None or root.workflow.kind != "group":
        raise TaskNotFound(flow_id)
    tasks = [task async for task in _below(storage, flow_id)]
    return _flow(root), _nodes(flow_id, tasks)


async def flow_that_has(storage: BaseStorage, task: Task) -> str | None:
    """The id of the flow that the task belongs to; None if it belongs to none."""
    record: Task | None = task
    while record is not None and record.workflow is not None and record.workflow.parent is not None:
        record = await storage.get_task(record.workflow.parent)
    return record.id if record is not None and _is_group(record) else None


async def _below(storage: BaseStorage, flow_id: str) -> AsyncIterator[Task]:
    after = ""
    while page := await storage.list_below(flow_id, limit=_PAGE, after=after):
        for task in page:
            yield task
        after = page[-1].id


def _nodes(flow_id: str, tasks: Sequence[Task]) -> list[NodeInfo]:
    members: dict[str, list[Task]] = {}
    nodes: list[Task] = []
    for task in tasks:
        workflow = task.workflow
        if workflow is None or workflow.kind == "event":
            continue
        if workflow.parent == flow_id:
            nodes.append(task)
        else:
            members.setdefault(workflow.parent or "", []).append(task)
    sources = {
        node.id: _sources(node, members.get(node.id, ()) if _is_group(node) else ())
        for node in nodes
    }
    layers = _layers(sources)
    infos = [
        NodeInfo(
            id=node.id,
            name=name_of(node.id),
            status=node.status,
            func_path=_func_path(node, members.get(node.id, ())),
            after=tuple(name_of(each) for each in sources[node.id]),
            layer=layers[node.id],
            counts=_counts(members.get(node.id, ())),
            needs=0 if node.workflow is None else node.workflow.needs,
        )
        for node in nodes
    ]
    return sorted(infos, key=lambda info: (info.layer, info.name))


def _is_group(task: Task) -> bool:
    return task.workflow is not None and task.workflow.kind == "group"


def _func_path(node: Task, members: Sequence[Task]) -> str:
    return members[0].func_path if _is_group(node) and members else node.func_path


def _sources(node: Task, members: Sequence[Task]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for task in (node, *members):
        if task.workflow is not None:
            found |= dict.fromkeys((*task.workflow.after, *task.workflow.after_any))
    return tuple(each for each in found if not name_of(each).startswith("_"))


def _counts(members: Sequence[Task]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for task in members:
        if not name_of(task.id).startswith("_"):
            counts[str(task.status)] = counts.get(str(task.status), 0) + 1
    return counts


def _layers(sources: dict[str, tuple[str, ...]]) -> dict[str, int]:
    """The length of the longest path to each node."""
    layers: dict[str, int] = {}

    def layer(node: str) -> int:
        stack = [node]
        while stack:
            top = stack[-1]
            unknown = [
                each for each in sources.get(top, ()) if each in sources and each not in layers
            ]
            if unknown:
                stack += unknown
                continue
            above = [layers[each] + 1 for each in sources.get(top, ()) if each in layers]
            layers[top] = max(above, default=0)
            stack.pop()
        return layers[node]

    for node in sources:
        layer(node)
    return layers


async def list_open_events(
    storage: BaseStorage, limit: int = 100, *, below: str = ""
) -> list[EventInfo]:
    """The events that were not sent yet, in order of enqueue; with `below`, those of that flow."""
    tasks = _below(storage, below) if below else _pending_events(storage)
    found: list[EventInfo] = []
    async for task in tasks:
        if _is_open_event(task):
            found.append(_event(task))
        if len(found) >= min(limit, _MAX_LISTED):
            break
    return found


async def _pending_events(storage: BaseStorage) -> AsyncIterator[Task]:
    after, size = "", _PAGE
    while size == _PAGE:
        page = await storage.list_tasks(
            func_path=EVENT_PATH, status=TaskStatus.PENDING, limit=_PAGE, after=after
        )
        for task in page:
            yield task
        after, size = page[-1].id if page else "", len(page)


def _is_open_event(task: Task) -> bool:
    is_event = task.workflow is not None and task.workflow.kind == "event"
    # The name of an event that omniq itself adds begins with an underscore.
    return is_event and not task.status.is_final and not name_of(task.id).startswith("_")


def _event(task: Task) -> EventInfo:
    workflow = task.workflow
    parent = None if workflow is None else workflow.parent
    return EventInfo(
        id=task.id,
        task_id=parent,
        name=task.id if parent is None else name_of(task.id),
        type=None if workflow is None else workflow.value,
        prompt="" if workflow is None else workflow.prompt,
        expires=task.expires,
    )


def flow_json(flow: FlowInfo, nodes: Sequence[NodeInfo]) -> dict[str, Any]:
    """The flow with its nodes and edges, for programs."""
    return {
        "flow": flow.as_dict(),
        "nodes": [node.as_dict() for node in nodes],
        "edges": [[source, node.name] for node in nodes for source in node.after],
    }
