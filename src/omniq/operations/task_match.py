"""Whether a task is what a search describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from omniq.models import Task, type_of
from omniq.operations.redaction import without_secrets
from omniq.operations.search_query import TaskSearch


class TaskPage(msgspec.Struct, frozen=True):
    """Some tasks, newest first. `cursor` starts the next page; None: this is the last page.

    `is_cut`: the search stopped early to bound its time, so the page may be short or empty although
    `cursor` leads to more tasks. `reached`: when the oldest task that it has read was enqueued, or failed;
    `read`: how many tasks it has read.
    """

    tasks: tuple[Task, ...]
    cursor: str | None
    is_cut: bool
    reached: datetime | None = None
    read: int = 0


def matches(task: Task, wanted: TaskSearch) -> bool:
    """Whether all conditions hold that need nothing but the task itself."""
    return (
        (wanted.status is None or task.status is wanted.status)
        and (wanted.queue is None or task.queue == wanted.queue)
        and (wanted.func_path is None or task.func_path == wanted.func_path)
        and wanted.function.lower() in task.func_path.lower()
        and task.id.startswith(wanted.prefix)
        and (wanted.task_type is None or type_of(task) == wanted.task_type)
        and (wanted.since is None or task.created_at >= wanted.since)
        and (wanted.until is None or task.created_at < wanted.until)
        and all(_text(task.metadata.get(name)) == text for name, text in wanted.metadata.items())
        and (not (wanted.args or wanted.words) or _matches_arguments(task, wanted))
    )


def _matches_arguments(task: Task, wanted: TaskSearch) -> bool:
    # Without secrets: a search would show which guess of one is right.
    shown = without_secrets(task)
    if not all(_text(_argument(shown, name)) == text for name, text in wanted.args.items()):
        return False
    if not wanted.words:
        return True
    text = f"{task.func_path} {task.id} {task.queue} {shown.args} {shown.kwargs} {shown.metadata}".lower()
    return all(word.lower() in text for word in wanted.words)


def _argument(task: Task, path: str) -> Any:
    """The argument by name or position; `order.id` is a part of one."""
    name, *rest = path.split(".")
    value: Any = task.kwargs.get(name)
    if name.isdecimal() and name not in task.kwargs:
        value = task.args[int(name)] if int(name) < len(task.args) else None
    elif value is None and name not in task.kwargs:
        return None
    for part in rest:
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, Sequence) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def _text(value: object) -> str | None:
    return None if value is None else str(value)
