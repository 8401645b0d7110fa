"""Writes down what a store says after a run, through a reader that had no part in it."""

from __future__ import annotations

from datetime import timedelta

from chaos.history import Journal
from omniq.firing import task_id_at
from omniq.models import Schedule
from omniq.storage.base import BaseStorage

_PAGE = 500


async def read_store(storage: BaseStorage, journal: Journal) -> None:
    """Everything that is on record, what it counts to, and all times of the schedules."""
    for schedule in await storage.list_schedules():
        journal.note("schedule", schedule.id, value=_times(schedule))
    stats = await storage.stats()
    after = ""
    while page := await storage.list_tasks(after=after, limit=_PAGE):
        for task in page:
            result = await storage.get_result(task.id)
            value = {
                "status": task.status.value,
                "attempts": task.attempts,
                "crashes": task.crashes,
                "result": None if result is None else result.result,
                "reason": None if result is None else result.reason,
            }
            journal.note("final", task.id, task.token, value=value)
        after = page[-1].id
    journal.note("counted", value={s.value: count for s, count in stats.by_status.items()})


def _times(schedule: Schedule) -> list[tuple[float, str]]:
    """Its nominal times and the ids of their tasks, as anybody can work them out."""
    assert schedule.start is not None
    assert schedule.end is not None
    assert schedule.interval is not None
    times = []
    nominal = schedule.start
    while nominal <= schedule.end:
        times.append((nominal.timestamp(), task_id_at(schedule.id, nominal)))
        nominal += timedelta(seconds=schedule.interval)
    return times
