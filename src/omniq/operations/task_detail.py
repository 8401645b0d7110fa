"""One task with everything that is known about it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import msgspec

from omniq.errors import SerializationError, TaskNotFound
from omniq.models import Attempt, DeadLetter, Progress, Task, TaskResult, TaskStatus
from omniq.storage.base import BaseStorage
from omniq.tasks.steps import decode_value, read_checkpoint


class Moment(msgspec.Struct, frozen=True):
    """Something that happened to the task, or will."""

    at: datetime
    what: str
    detail: str = ""


class Step(msgspec.Struct, frozen=True):
    """Something durable that the task has done: a step and its result, or how far a cursor is."""

    name: str
    result: Any


class TaskDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A task, what it came to, and how it got there. `attempts` are the runs that failed."""

    task: Task
    result: TaskResult | None
    attempts: tuple[Attempt, ...]
    dead: DeadLetter | None
    progress: Progress | None
    steps: tuple[Step, ...]
    timeline: tuple[Moment, ...]


async def task_detail(storage: BaseStorage, task_id: str) -> TaskDetail:
    """All that is known of the task, also of a dead letter whose own record has expired.

    Raises `TaskNotFound` when nothing is.
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
        steps=tuple(_steps(storage, await _checkpoint(storage, letter, task_id))),
        timeline=tuple(_timeline(task, result, attempts)),
    )


async def _result(storage: BaseStorage, task_id: str) -> TaskResult | None:
    try:
        return await storage.get_result(task_id)
    except SerializationError as error:
        # An unreadable result must not hide the task it belongs to.
        return TaskResult(
            task_id=task_id, status=TaskStatus.FAILED, reason=f"the result cannot be read: {error}"
        )


async def _checkpoint(
    storage: BaseStorage, letter: DeadLetter | None, task_id: str
) -> bytes | None:
    return await storage.load_checkpoint(task_id) if letter is None else letter.checkpoint


def _steps(storage: BaseStorage, checkpoint: bytes | None) -> list[Step]:
    """What the checkpoint says is done; nothing when another version of omniq wrote it."""
    try:
        kept = read_checkpoint(checkpoint)
        steps = [
            Step(name, decode_value(storage.serializer, data)) for name, data in kept.steps.items()
        ]
    except SerializationError:
        return []
    return steps + [Step(name, f"{mark.count} done") for name, mark in kept.marks.items()]


def _timeline(task: Task, result: TaskResult | None, attempts: Iterable[Attempt]) -> list[Moment]:
    moments = [Moment(task.created_at, "enqueued")]
    for attempt in attempts:
        if attempt.started_at is not None:
            moments.append(Moment(attempt.started_at, "started", f"run {attempt.number}"))
        error = attempt.error
        detail = "" if error is None else f"{error.error_type}: {error.message}"
        moments.append(Moment(attempt.finished_at, attempt.outcome, detail))
    moments += _newest_run(task, result, {attempt.started_at for attempt in attempts})
    if not task.status.is_final and task.owner is None and task.eta is not None:
        moments.append(Moment(task.eta, "due"))
    return sorted(moments, key=lambda moment: moment.at)


def _newest_run(task: Task, result: TaskResult | None, known: set[datetime | None]) -> list[Moment]:
    """The run that no failure tells of: the one that goes on, or that ended well."""
    started = task.started_at
    if result is not None and result.started_at is not None and result.status.is_final:
        started = result.started_at
    moments = []
    if started is not None and started not in known:
        moments.append(Moment(started, "started", f"run {task.token}"))
    if result is not None and result.finished_at is not None:
        if result.status in (TaskStatus.SUCCESS, TaskStatus.CANCELLED):
            moments.append(Moment(result.finished_at, str(result.status), result.reason or ""))
        elif result.status is TaskStatus.FAILED:
            moments.append(Moment(result.finished_at, "dead", result.reason or ""))
    return moments
