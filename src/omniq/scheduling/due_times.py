"""Which nominal times of a schedule are due at an instant, and the task of each. Pure functions."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import count, takewhile
from typing import NamedTuple

from msgspec.structs import replace

from omniq.clock import from_micros, seconds_to_micros, to_micros
from omniq.cron import cron_times
from omniq.models import Limit, Schedule, Task

TEMPLATE_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
"""The creation time of a schedule's template task. Its `expires` is relative to this time."""

NOMINAL = "scheduled_for"
"""The metadata key under which a task finds its nominal time."""

_GRACE = timedelta(minutes=1)
"""A time that fires at most this late is not missed: with `missed="skip"` it still runs."""

_INSTANT = timedelta(microseconds=1)
_WINDOWS = tuple(timedelta(seconds=seconds) for seconds in (60, 3_600, 86_400, 3_000_000))
_LONG_ID = 100


class Firing(NamedTuple):
    """One step of a schedule: the nominal time that gets a task, if any, and the new schedule.

    `passed` is that nominal time, or the newest of those that are skipped.
    """

    nominal: datetime | None
    advanced: Schedule
    passed: datetime


def due(schedule: Schedule, now: datetime, missed: deque[datetime] | None = None) -> Firing | None:
    """Return the next step of a schedule at that instant; None while nothing is due.

    One step enqueues at most one task. With `missed="all"` several steps follow each other, the
    oldest time first; if more than `max_missed` times were missed, only the newest get a task.
    `missed` is passed from step to step of one schedule: the due times that are left, because a
    search for each of very many would take very long.
    """
    next_at = schedule.next_at
    if schedule.paused or next_at is None or next_at > now:
        return None
    times = deque[datetime]() if missed is None else missed
    # Also for the last one: more may have become due since the search.
    if len(times) < 2 or times[0] != next_at:
        limit = schedule.max_missed if schedule.missed == "all" else 1
        times.clear()
        # After a change of the time zone's rules, `next_at` may be no nominal time any more.
        times.extend(_newest(schedule, next_at, now, limit) or [next_at])
    nominal = times.popleft()
    if schedule.missed == "skip" and now - nominal > _GRACE:
        return Firing(None, replace(schedule, next_at=first_after(schedule, now)), nominal)
    following = times[0] if times else first_after(schedule, now)
    return Firing(nominal, replace(schedule, last_at=nominal, next_at=following), nominal)


def first_after(schedule: Schedule, after: datetime) -> datetime | None:
    """Return the first nominal time after that instant, between `start` and `end`, or None."""
    if schedule.start is not None:
        after = max(after, schedule.start - _INSTANT)
    found = next(nominal_times(schedule, after), None)
    if found is None or (schedule.end is not None and found > schedule.end):
        return None
    return found


def nominal_times(schedule: Schedule, after: datetime) -> Iterator[datetime]:
    """Yield all nominal times after that instant, also those before `start` and after `end`."""
    if schedule.cron is not None:
        return cron_times(schedule.cron, after, schedule.tz)
    if schedule.interval is not None:
        origin, step = _grid(schedule, schedule.interval)
        first = (to_micros(after) - origin) // step + 1
        return (from_micros(origin + step * number) for number in count(first))
    return iter([schedule.at] if schedule.at is not None and schedule.at > after else [])


def task_at(schedule: Schedule, nominal: datetime, now: datetime) -> Task:
    """Return the task of a nominal time. The time is part of its id, so no time has two tasks."""
    metadata = {**schedule.task.metadata, NOMINAL: nominal.isoformat()}
    delay = timedelta(seconds=schedule.jitter * _jitter_fraction(schedule.id, nominal))
    task = task_now(schedule, now)
    eta = max(nominal + delay, now)
    lifetime = None if task.expires is None else task.expires - now
    return replace(
        task,
        id=task_id_at(schedule.id, nominal),
        eta=eta,
        expires=None if lifetime is None else eta + lifetime,
        unique=task.unique or (key_of(schedule.id) if schedule.overlap == "skip" else None),
        metadata=metadata,
    )


def task_now(schedule: Schedule, now: datetime) -> Task:
    """Return a task of the schedule without a nominal time, under the id of the template."""
    task = schedule.task
    limits = task.limits
    if schedule.overlap in ("queue", "cancel_old"):
        # The next task starts when the previous one has ended, or has stopped after its cancellation.
        limits = (*limits, Limit(key=key_of(schedule.id), max_running=1))
    lifetime = None if task.expires is None else task.expires - task.created_at
    return replace(
        task,
        created_at=now,
        expires=None if lifetime is None else now + lifetime,
        limits=limits,
        schedule_id=schedule.id,
    )


def task_id_at(schedule_id: str, nominal: datetime) -> str:
    """Return the id of the task of a nominal time.

    >>> task_id_at("nightly", datetime(2026, 1, 1, 3, tzinfo=UTC))
    'nightly.20260101T030000Z'
    """
    if len(schedule_id) > _LONG_ID:
        digest = hashlib.sha256(schedule_id.encode()).hexdigest()[:16]
        schedule_id = f"{schedule_id[: _LONG_ID - 17]}-{digest}"
    second = "%Y%m%dT%H%M%S.%fZ" if nominal.microsecond else "%Y%m%dT%H%M%SZ"
    return f"{schedule_id}.{nominal.astimezone(UTC).strftime(second)}"


def key_of(schedule_id: str) -> str:
    """Return the unique key and limit key of a schedule's tasks, which prevents overlaps."""
    return f"schedule:{schedule_id}"


def _newest(schedule: Schedule, since: datetime, until: datetime, limit: int) -> list[datetime]:
    """Return the newest nominal times in [since, until], in order, at most `limit` of them.

    It searches from the end, in growing windows: after a month without a worker, an expression that
    matches every second is not enumerated from its start.
    """
    until = until if schedule.end is None else min(until, schedule.end)
    if schedule.interval is not None:
        _, step = _grid(schedule, schedule.interval)
        since = max(since, until - _INSTANT * step * limit)
    for low in (*(max(since, until - window) for window in _WINDOWS), since):
        passed = takewhile(lambda at: at <= until, nominal_times(schedule, low - _INSTANT))
        times = deque(passed, maxlen=limit)
        if len(times) == limit or low == since:
            return list(times)
    return []


def _grid(schedule: Schedule, interval: float) -> tuple[int, int]:
    """Return the first time of an interval and the distance of the times, in microseconds."""
    origin = schedule.start or schedule.next_at or TEMPLATE_EPOCH
    return to_micros(origin), seconds_to_micros(interval)


def _jitter_fraction(schedule_id: str, nominal: datetime) -> float:
    """Return a number in [0, 1) that is the same in every process for the same nominal time."""
    digest = hashlib.sha256(f"{schedule_id}@{to_micros(nominal)}".encode()).digest()
    return int.from_bytes(digest[:6]) / 2**48
