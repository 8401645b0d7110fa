"""The records of workflows that never run, and the results of other tasks in the arguments of a task.

An argument of a node may be the result of another node. It is stored as None, and the task has a ref for it: a path
into the arguments, and the id of the other record.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from omniq.errors import InvalidTask
from omniq.models import Ref, Task, TaskWorkflow

GROUP_PATH, EVENT_PATH = "omniq.flows.group", "omniq.flows.event"
"""The function paths of records that never run."""

EVENT_NONCE = "event"
"""The nonce of all events: every caller that adds the record of an event adds the same record."""

_NAME = re.compile(r"[A-Za-z0-9-][A-Za-z0-9_-]{0,63}")
_LONGEST_ID = 128


def child_id(parent: str, name: str, what: str = "node") -> str:
    """The id of the record with that name below another. Raises `InvalidTask` for a bad name."""
    if type(name) is not str or not _NAME.fullmatch(name):
        raise InvalidTask(
            f"{what} {name!r}: use 1 to 64 of the characters A-Z a-z 0-9 _ - in a name, and no _ at its "
            "beginning"
        )
    return checked_id(f"{parent}.{name}")


def checked_id(task_id: str) -> str:
    """Return the id. Raises `InvalidTask` if it is too long."""
    if len(task_id) > _LONGEST_ID:
        raise InvalidTask(
            f"task id {task_id}: {len(task_id)} characters, more than {_LONGEST_ID}; use shorter names, or "
            "fewer levels of tasks"
        )
    return task_id


def member_id(group: str, number: int) -> str:
    """The id of a member of a group; ids sort by number.

    >>> member_id("f.part", 12)
    'f.part.000012'
    """
    return checked_id(f"{group}.{number:06d}")


def name_of(task_id: str) -> str:
    """The name of a record below another: the last part of its id."""
    return task_id.rpartition(".")[2]


def group_task(group_id: str, parent: str | None = None, **fields: Any) -> Task:
    """The record of a group."""
    part = {name: fields.pop(name) for name in ("is_open", "stops") if name in fields}
    workflow = TaskWorkflow(kind="group", parent=parent, **part)
    return Task(id=group_id, func_path=GROUP_PATH, workflow=workflow, **fields)


def event_task(event_id: str, parent: Task | None = None, **fields: Any) -> Task:
    """The record of an event; one that belongs to a task is in the queue of that task."""
    workflow = TaskWorkflow(
        kind="event",
        parent=None if parent is None else parent.id,
        value=fields.pop("value", None),
        prompt=fields.pop("prompt", ""),
    )
    queue = fields.pop("queue", "default") if parent is None else parent.queue
    return Task(id=event_id, func_path=EVENT_PATH, queue=queue, workflow=workflow, **fields)


def with_values(task: Task, refs: Iterable[Ref], values: Mapping[str, Any]) -> Task:
    """The task with the results of other records filled into its arguments."""
    args: Any = list(task.args)
    kwargs: Any = dict(task.kwargs)
    for ref in refs:
        first, *path = ref.path
        target, last = (args if isinstance(first, int) else kwargs), first
        for step in path:
            if isinstance(target[last], tuple):
                target[last] = list(target[last])
            target, last = target[last], step
        target[last] = values[ref.id]
    return msgspec.structs.replace(task, args=tuple(args), kwargs=kwargs)


__all__ = [
    "EVENT_NONCE",
    "EVENT_PATH",
    "GROUP_PATH",
    "Ref",
    "checked_id",
    "child_id",
    "event_task",
    "group_task",
    "member_id",
    "name_of",
    "with_values",
]
