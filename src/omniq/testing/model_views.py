"""What the read verbs of a storage must return, according to the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from omniq.models import Attempt, DeadLetter, QueueStats, TaskResult, TaskStatus
from omniq.testing.model import Model
from omniq.testing.model_tasks import Record


def model_view(model: Model, names: Sequence[str], ids: Sequence[str]) -> dict[str, Any]:
    """The expected result of `StoreUnderTest.view`."""
    visible = model.tasks.visible_tasks()
    expected: dict[str, Any] = {
        "stats": _stats(model, list(visible.values())),
        "workers": model.workers(),
        "held_by": {name: model.held_by(name) for name in names},
        "paused": frozenset(model.paused),
        "list_tasks": {task_id: record.view() for task_id, record in visible.items()},
    }
    for task_id in ids:
        record = visible.get(task_id)
        expected[task_id] = {
            "task": None if record is None else expected["list_tasks"][task_id],
            "result": None if record is None else _result(record),
            "history": _history(model, record, task_id),
            "dead": _dead_letter(model, task_id),
            "checkpoint": model.tasks.checkpoints.get(task_id),
            "progress": model.tasks.progress.get(task_id),
            "output": model.output(task_id),
            "hook": list(hook) if (hook := model.tasks.hooks.get(task_id)) else None,
        }
    return expected


def _result(record: Record) -> TaskResult | None:
    if record.result is not None or record.status is not TaskStatus.RETRYING:
        return record.result
    newest = record.attempts_made[-1]
    return TaskResult(
        task_id=record.task.id,
        status=TaskStatus.RETRYING,
        error=newest.error,
        attempts=record.runs,
        started_at=newest.started_at,
        finished_at=newest.finished_at,
    )


def _history(model: Model, record: Record | None, task_id: str) -> list[Attempt]:
    if record is None and task_id in model.tasks.dead:
        _, record = model.tasks.dead[task_id]
    return [] if record is None else list(record.attempts_made)


def _dead_letter(model: Model, task_id: str) -> DeadLetter | None:
    if task_id not in model.tasks.dead:
        return None
    dead_letter, _ = model.tasks.dead[task_id]
    return msgspec.structs.replace(dead_letter, checkpoint=model.tasks.checkpoints.get(task_id))


def _stats(model: Model, records: list[Record]) -> QueueStats:
    now = model.clock.micros()
    live = [record for record in records if not record.status.is_final]
    waiting = [record.due for record in live if record.owner is None]
    queues = [record.task.queue for record in live]
    statuses = [record.status for record in records]
    oldest: dict[str, float] = {}
    for record in live:
        if record.owner is None and record.due <= now:
            age = (now - record.due) / 1_000_000
            oldest[record.task.queue] = max(age, oldest.get(record.task.queue, 0.0))
    return QueueStats(
        by_status={status: statuses.count(status) for status in TaskStatus},
        by_queue={queue: queues.count(queue) for queue in queues},
        oldest_due_age=(now - min([now, *waiting])) / 1_000_000,
        dead=len(model.tasks.dead),
        oldest_by_queue=oldest,
    )
