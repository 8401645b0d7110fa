"""Everything that is known about one task."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import msgspec

from omniq.errors import SerializationError, TaskNotFound
from omniq.models import Attempt, DeadLetter, Progress, Task, TaskResult, TaskStatus
from omniq.storage.base import BaseStorage
from omniq.storage.types import PendingHook
from omniq.tasks.steps import decode_value, read_checkpoint, task_key


class TimelineEntry(msgspec.Struct, frozen=True):
    """Something that happened to the task, or is due to happen."""

    at: datetime
    what: str
    detail: str = ""


class Step(msgspec.Struct, frozen=True):
    """A durable step that is done with its result, or the position of a cursor."""

    name: str
    result: Any


UNVERIFIED = "not verified: it cannot be read, or its signature is wrong; it never runs"
"""What is shown of a task that is not `is_verified`, in place of its arguments."""


UNVERIFIED_LETTER = "not verified: it was stored without the key, or was changed"
"""What is shown of a dead letter that is not `is_verified`."""


class TaskDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A task with its result and its history. `attempts` are those that failed.

    `pending_hook` is the call of `on_dead` that its dead letter still waits for.
    """

    task: Task
    result: TaskResult | None
    attempts: tuple[Attempt, ...]
    dead: DeadLetter | None
    progress: Progress | None
    steps: tuple[Step, ...]
    timeline: tuple[TimelineEntry, ...]
    pending_hook: PendingHook | None = None


async def task_detail(storage: BaseStorage, task_id: str) -> TaskDetail:
    """Everything that is known about the task, also if only its dead letter is still stored.

    Raises `TaskNotFound` when neither the task nor a dead letter is stored.
    """
    task = await storage.get_task(task_id)
    letter = await storage.get_dead(task_id)
    if task is None and letter is not None:
        task = await storage.get_dead_task(task_id)
    if task is None:
        raise TaskNotFound(task_id)
    attempts = tuple(await storage.history(task_id))
    result = await _result(storage, task_id)
    return TaskDetail(
        task=task,
        result=result,
        attempts=attempts,
        dead=letter,
        progress=await storage.get_progress(task_id),
        steps=tuple(_steps(storage, task, await _checkpoint(storage, letter, task_id))),
        timeline=tuple(_timeline(task, result, attempts)),
        pending_hook=None if letter is None else await storage.pending_hook(task_id),
    )


async def _result(storage: BaseStorage, task_id: str) -> TaskResult | None:
    try:
        return await storage.get_result(task_id)
    except SerializationError as error:
        # An unreadable result must not hide its task.
        return TaskResult(
            task_id=task_id, status=TaskStatus.FAILED, reason=f"the result cannot be read: {error}"
        )


async def _checkpoint(
    storage: BaseStorage, letter: DeadLetter | None, task_id: str
) -> bytes | None:
    return await storage.load_checkpoint(task_id) if letter is None else letter.checkpoint


def _steps(storage: BaseStorage, task: Task, checkpoint: bytes | None) -> list[Step]:
    """The steps recorded in the checkpoint; empty when it cannot be read or verified."""
    try:
        recorded = read_checkpoint(storage.serializer, task_key(task), checkpoint)
        steps = [
            Step(name, decode_value(storage.serializer, data))
            for name, data in recorded.steps.items()
        ]
    except SerializationError:
        return []
    return steps + [Step(name, f"{mark.count} done") for name, mark in recorded.marks.items()]


def _timeline(
    task: Task, result: TaskResult | None, attempts: Iterable[Attempt]
) -> list[TimelineEntry]:
    entries = [TimelineEntry(task.created_at, "enqueued")]
    for attempt in attempts:
        if attempt.started_at is not None:
            entries.append(
                TimelineEntry(attempt.started_at, "started", f"attempt {attempt.number}")
            )
        error = attempt.error
        detail = "" if error is None else f"{error.error_type}: {error.message}"
        entries.append(TimelineEntry(attempt.finished_at, attempt.outcome, detail))
    entries += _last_attempt(task, result, {attempt.started_at for attempt in attempts})
    if not task.status.is_final and task.owner is None and task.eta is not None:
        entries.append(TimelineEntry(task.eta, "due"))
    return sorted(entries, key=lambda entry: entry.at)


def _last_attempt(
    task: Task, result: TaskResult | None, known: set[datetime | None]
) -> list[TimelineEntry]:
    """The attempt that is not in the history of failures: it runs, succeeded or was cancelled."""
    started, detail = task.started_at, f"attempt {task.attempts + task.crashes + 1}"
    if result is not None and result.started_at is not None and result.status.is_final:
        started, detail = result.started_at, f"attempt {result.attempts}"
    elif task.owner is None and not task.status.is_final:
        # Its next run is the same attempt.
        detail += ", given back"
    entries = []
    if started is not None and started not in known:
        entries.append(TimelineEntry(started, "started", detail))
    if result is not None and result.finished_at is not None:
        if result.status in (TaskStatus.SUCCESS, TaskStatus.CANCELLED):
            entries.append(
                TimelineEntry(result.finished_at, str(result.status), result.reason or "")
            )
        elif result.status is TaskStatus.FAILED and task.status.is_final:
            entries.append(TimelineEntry(result.finished_at, "dead", result.reason or ""))
    return entries
