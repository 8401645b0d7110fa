"""Records the contents of a store after a run, through a separate reader."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

from chaos.history import Journal
from omniq.models import Schedule, Task, TaskResult
from omniq.scheduling.due_times import task_id_at
from omniq.storage.base import BaseStorage

_PAGE = 500


async def read_store(storage: BaseStorage, journal: Journal) -> None:
    """Record every task, the counts, and all nominal times of the schedules."""
    for schedule in await storage.list_schedules():
        journal.note("schedule", schedule.id, value=_times(schedule))
    stats = await storage.stats()
    async for task in all_tasks(storage):
        _note_final(journal, task, await storage.get_result(task.id))
    journal.note("counted", value={s.value: count for s, count in stats.by_status.items()})


async def audit(storage: BaseStorage, journal: Journal, noted: set[str]) -> set[str]:
    """Record the tasks that ended since the last call, and the number of rows.

    Returns the ids of all recorded tasks that are still stored. A record that is purged during the
    call was recorded by an earlier call, or is missed.
    """
    stats = await storage.stats()
    journal.note("rows", value=sum(stats.by_status.values()) + stats.dead)
    still = set()
    async for task in all_tasks(storage):
        if not task.status.is_final:
            continue
        if task.id not in noted:
            result = await storage.get_result(task.id)
            if result is None:
                continue
            _note_final(journal, task, result)
        still.add(task.id)
    return still


async def all_tasks(storage: BaseStorage) -> AsyncIterator[Task]:
    """Every task, in id order."""
    after = ""
    while page := await storage.list_tasks(after=after, limit=_PAGE):
        for task in page:
            yield task
        after = page[-1].id


def _note_final(journal: Journal, task: Task, result: TaskResult | None) -> None:
    value = {
        "status": task.status.value,
        "attempts": task.attempts,
        "crashes": task.crashes,
        "result": None if result is None else result.result,
        "reason": None if result is None else result.reason,
    }
    journal.note("final", task.id, task.token, value=value)


def _times(schedule: Schedule) -> list[tuple[float, str]]:
    """Return its nominal times and the ids of their tasks, computed from its definition."""
    assert schedule.start is not None
    assert schedule.end is not None
    assert schedule.interval is not None
    times = []
    nominal = schedule.start
    while nominal <= schedule.end:
        times.append((nominal.timestamp(), task_id_at(schedule.id, nominal)))
        nominal += timedelta(seconds=schedule.interval)
    return times
