"""Why the tasks of a queue wait, counted by reason."""

from __future__ import annotations

from collections import Counter
from datetime import datetime

import msgspec

from omniq.errors import TaskNotFound
from omniq.models import Task, TaskStatus
from omniq.operations.explain import explain
from omniq.operations.health import due_time
from omniq.operations.newest import newest_tasks
from omniq.storage.base import BaseStorage

_CHECKED, _MAX_SCANS = 500, 10
_EXPLAINED = 12
"""Tasks that are explained, each for all that are alike: an explanation costs several reads."""


class WaitingReasons(msgspec.Struct, frozen=True):
    """How many of the checked tasks wait for each reason, the most frequent first."""

    counts: dict[str, int]
    checked: int


async def waiting_reasons(storage: BaseStorage, queue: str) -> WaitingReasons:
    """The reasons of the newest waiting tasks of the queue: up to 500 that are pending, and 500 that are retried."""
    now = storage.clock.now()
    alike: dict[object, list[Task]] = {}
    checked = 0
    for status in (TaskStatus.PENDING, TaskStatus.RETRYING):
        newest = await newest_tasks(
            storage, _CHECKED, status=status, queue=queue, max_scans=_MAX_SCANS
        )
        for task in newest:
            alike.setdefault(_kind(task, now), []).append(task)
            checked += 1
    counts: Counter[str] = Counter()
    by_size = sorted(alike.values(), key=len, reverse=True)
    for tasks in by_size[:_EXPLAINED]:
        counts[await _reason(storage, tasks[0])] += len(tasks)
    rest = sum(len(tasks) for tasks in by_size[_EXPLAINED:])
    if rest:
        counts["other reasons"] += rest
    return WaitingReasons(dict(counts.most_common()), checked)


def _kind(task: Task, now: datetime) -> object:
    """What decides why a task waits, besides the state of the fleet."""
    limits = tuple(limit.key for limit in task.limits)
    breakers = tuple(breaker.name for breaker in task.breakers)
    return (task.status, due_time(task) > now, task.func_path, limits, breakers)


async def _reason(storage: BaseStorage, task: Task) -> str:
    try:
        explanation = await explain(storage, task.id)
    except TaskNotFound:
        return "has just been taken"
    if explanation.state != "waiting" or not explanation.reasons:
        return "has just been taken"
    return explanation.reasons[0].text
