"""What a schedule comes to at an instant: which nominal times are due, and the task of each. Pure."""

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
"""When a schedule's own task was created: its `expires` counts from then, and so from each time."""

NOMINAL = "scheduled_for"
"""Where in its metadata a task finds the nominal time that it stands for."""

_GRACE = timedelta(minutes=1)
"""A time that is fired so late was not missed: with `missed="skip"` it still runs."""

_INSTANT = timedelta(microseconds=1)
_WINDOWS = tuple(timedelta(seconds=seconds) for seconds in (60, 3_600, 86_400, 3_000_000))
_LONG_ID = 100


class Firing(NamedTuple):
    """What is due: the nominal time that gets a task, or none, and the schedule from then on."""

    nominal: datetime | None
    advanced: Schedule


def due(schedule: Schedule, now: datetime) -> Firing | None:
    """The next step of a schedule at that instant; None while nothing of it is due.

    One step makes at most one task. With `missed="all"` several steps follow each other, the oldest
    time first; when more times were missed than `max_missed`, the newest are kept.
    """
    next_at = schedule.next_at
    if schedule.paused or next_at is None or next_at > now:
        return None
    limit = schedule.max_missed if schedule.missed == "all" else 1
    # A zone whose rules were changed may not know the time it was told to fire.
    times = _newest(schedule, next_at, now, limit) or [next_at]
    nominal = times[0]
    if schedule.missed == "skip" and now - nominal > _GRACE:
        return Firing(None, replace(schedule, next_at=first_after(schedule, now)))
    following = times[1] if len(times) > 1 else first_after(schedule, now)
    return Firing(nominal, replace(schedule, last_at=nominal, next_at=following))


def first_after(schedule: Schedule, after: datetime) -> datetime | None:
    """The first nominal time after that instant, between `start` and `end`; None without one."""
    if schedule.start is not None:
        after = max(after, schedule.start - _INSTANT)
    found = next(nominal_times(schedule, after), None)
    if found is None or (schedule.end is not None and found > schedule.end):
        return None
    return found


def nominal_times(schedule: Schedule, after: datetime) -> Iterator[datetime]:
    """All nominal times after that instant, in order; also those before `start` and after `end`."""
    if schedule.cron is not None:
        return cron_times(schedule.cron, after, schedule.tz)
    if schedule.interval is not None:
        origin, step = _grid(schedule, schedule.interval)
        first = (to_micros(after) - origin) // step + 1
        return (from_micros(origin + step * turn) for turn in count(first))
    return iter([schedule.at] if schedule.at is not None and schedule.at > after else [])


def task_at(schedule: Schedule, nominal: datetime, now: datetime) -> Task:
    """The task of a nominal time. Its id says which, so that no time can have two."""
    metadata = {**schedule.task.metadata, NOMINAL: nominal.isoformat()}
    delay = timedelta(seconds=schedule.jitter * _share(schedule.id, nominal))
    task = task_now(schedule, now)
    eta = max(nominal + delay, now)
    lasts = None if task.expires is None else task.expires - now
    return replace(
        task,
        id=task_id_at(schedule.id, nominal),
        eta=eta,
        expires=None if lasts is None else eta + lasts,
        unique=task.unique or (key_of(schedule.id) if schedule.overlap == "skip" else None),
        metadata=metadata,
    )


def task_now(schedule: Schedule, now: datetime) -> Task:
    """A task of the schedule that stands for no nominal time, under the id of its template."""
    task = schedule.task
    limits = task.limits
    if schedule.overlap in ("queue", "cancel_old"):
        # The next one starts when the one before has ended, or has heard that it is not wanted.
        limits = (*limits, Limit(key=key_of(schedule.id), max_running=1))
    lasts = None if task.expires is None else task.expires - task.created_at
    return replace(
        task,
        created_at=now,
        expires=None if lasts is None else now + lasts,
        limits=limits,
        schedule_id=schedule.id,
    )


def task_id_at(schedule_id: str, nominal: datetime) -> str:
    """The id of the task of a nominal time.

    >>> task_id_at("nightly", datetime(2026, 1, 1, 3, tzinfo=UTC))
    'nightly.20260101T030000Z'
    """
    if len(schedule_id) > _LONG_ID:
        digest = hashlib.sha256(schedule_id.encode()).hexdigest()[:16]
        schedule_id = f"{schedule_id[: _LONG_ID - 17]}-{digest}"
    second = "%Y%m%dT%H%M%S.%fZ" if nominal.microsecond else "%Y%m%dT%H%M%SZ"
    return f"{schedule_id}.{nominal.astimezone(UTC).strftime(second)}"


def key_of(schedule_id: str) -> str:
    """The key under which the tasks of a schedule keep out of each other's way."""
    return f"schedule:{schedule_id}"


def _newest(schedule: Schedule, since: datetime, until: datetime, limit: int) -> list[datetime]:
    """The newest nominal times in [since, until], in order, at most `limit` of them.

    Looked for from the end, in windows that grow: after a month of silence an expression that
    names every second is not walked through from its beginning.
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
    """Where the times of an interval begin, and how far they are apart, in microseconds."""
    origin = schedule.start or schedule.next_at or TEMPLATE_EPOCH
    return to_micros(origin), seconds_to_micros(interval)


def _share(schedule_id: str, nominal: datetime) -> float:
    """A number in [0, 1) that everybody draws alike for the same nominal time."""
    digest = hashlib.sha256(f"{schedule_id}@{to_micros(nominal)}".encode()).digest()
    return int.from_bytes(digest[:6]) / 2**48
