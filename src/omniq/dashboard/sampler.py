"""Snapshots of the storage, taken once per interval and shared by all pages and streams.

The storage is read equally often for one viewer and for many. A snapshot does not wait for the counts of a
large storage: it has the last counts, and the time when they were made. Snapshots that take
long make the interval longer, up to a maximum, and no page waits for them. Without viewers, snapshots are taken less
often, and after 15 minutes they stop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

import msgspec

from omniq.concurrency.futures import finish
from omniq.errors import OmniqError, StorageClosed
from omniq.events import WorkerProblem
from omniq.log import write
from omniq.models import Schedule, TaskStatus
from omniq.operations.overview import Monitor, Overview
from omniq.storage.base import BaseStorage

INTERVAL = 2.0
_IDLE_INTERVAL = 10.0
_IDLE_AFTER = 30.0
_STOP_AFTER = 900.0
_MAX_POINTS = 450
_MAX_QUEUES = 500
_PAGE_TIMEOUT = 0.1
_COUNT_TIMEOUT = 0.03
_MIN_PAUSE_FACTOR = 10
"""The interval is at least this many times the duration of the last snapshot."""

_MAX_INTERVAL = 10.0
_STALE_AFTER = 3
"""The number of intervals without a new snapshot after which the data is shown as old."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """The values of one snapshot that the charts show."""

    at: float
    finished: float
    failed: float
    waiting: int
    by_queue: dict[str, int]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the storage at one time. `version` grows when a count has changed."""

    overview: Overview
    schedules: tuple[Schedule, ...]
    version: int


class Sampler:
    """Takes snapshots of a storage at an interval while there are viewers."""

    def __init__(self, storage: BaseStorage, *, interval: float = INTERVAL) -> None:
        self._storage = storage
        self.clock = storage.clock
        self._monitor = Monitor(storage)
        self._min_interval = interval
        self._interval = interval
        self._changes = 0
        self._latest: Snapshot | None = None
        self._refresh_task: asyncio.Task[None] | None = None
        self._failure: OmniqError | None = None
        self._refreshed_at = float("-inf")
        self._taken_at = float("-inf")
        self._requested_at = float("-inf")
        self._loop_task: asyncio.Task[None] | None = None
        self._next: asyncio.Future[None] | None = None
        self._is_closed = False
        self.watchers = 0
        self.points: deque[Point] = deque(maxlen=_MAX_POINTS)

    async def current(self) -> Snapshot:
        """A snapshot that is at most one interval old; the latest one if the storage is slow."""
        self._requested_at = self.clock.monotonic()
        self._start_loop()
        if self._latest is None:
            await asyncio.shield(self._refresh())
        elif self.clock.monotonic() - self._refreshed_at >= self._interval:
            await asyncio.wait((self._refresh(),), timeout=_PAGE_TIMEOUT)
        if self._latest is None:
            raise self._failure or StorageClosed("the dashboard has been closed")
        return self._latest

    @property
    def latest(self) -> Snapshot | None:
        """The latest snapshot, of any age; does not read the storage."""
        return self._latest

    @property
    def age(self) -> float:
        """Seconds since the latest snapshot was taken."""
        return max(0.0, self.clock.monotonic() - self._taken_at)

    @property
    def stale_after(self) -> float:
        """The age in seconds from which on a snapshot is stale."""
        return _STALE_AFTER * self._interval

    @property
    def error(self) -> str:
        """Why the last refresh failed; empty if it succeeded."""
        return "" if self._failure is None else str(self._failure)

    async def watch(self) -> AsyncGenerator[Snapshot | None, None]:
        """The current snapshot and each following one; None for a refresh that failed."""
        self.watchers += 1
        try:
            yield await self.current()
            while not self._is_closed:
                self._start_loop()
                await asyncio.shield(self._next_refresh())
                yield None if self._failure else self._latest
        finally:
            self.watchers -= 1

    def invalidate(self) -> None:
        """Take a new snapshot for the next caller: something was changed."""
        self._refreshed_at = float("-inf")
        self._monitor.invalidate()
        # A running refresh may have read the storage before the change.
        self._changes += 1

    async def close(self) -> None:
        """Stop taking snapshots, and end all streams."""
        self._is_closed = True
        self._notify_watchers()
        tasks = [task for task in (self._loop_task, self._refresh_task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._monitor.close()

    def _start_loop(self) -> None:
        # Here and not at application start: a mounted application gets no lifespan events.
        if not self._is_closed and (self._loop_task is None or self._loop_task.done()):
            self._loop_task = asyncio.get_running_loop().create_task(self._run_loop())

    async def _run_loop(self) -> None:
        while (idle := self.clock.monotonic() - self._requested_at) < _STOP_AFTER or self.watchers:
            is_watched = self.watchers or idle < _IDLE_AFTER
            await self.clock.sleep(
                self._interval if is_watched else max(self._interval, _IDLE_INTERVAL)
            )
            await asyncio.wait((self._refresh(),))
            self._notify_watchers()

    def _refresh(self) -> asyncio.Task[None]:
        """The running refresh, or a new one: never two at the same time."""
        if self._refresh_task is None or self._refresh_task.done():
            self._refresh_task = asyncio.get_running_loop().create_task(self._take_snapshot())
        return self._refresh_task

    async def _take_snapshot(self) -> None:
        began, changes = self.clock.monotonic(), self._changes
        try:
            self._latest = await self._read()
        except OmniqError as error:
            # The dashboard stays up while the storage is down, and shows the error.
            if self._failure is None:
                write(WorkerProblem.of("dashboard", error))
            self._failure = error
            # Retry soon, so that there is a new snapshot when the storage responds again.
            self._interval = self._min_interval
            return
        now = self.clock.monotonic()
        was_failing, self._failure = self._failure is not None, None
        self._taken_at = now
        pause = 0.0 if was_failing else _MIN_PAUSE_FACTOR * (now - began)
        self._interval = max(self._min_interval, min(pause, _MAX_INTERVAL))
        self._refreshed_at = now if changes == self._changes else float("-inf")
        if self._latest.overview.counted_at is not None:
            self.points.append(_point(now, self._latest.overview))

    async def _read(self) -> Snapshot:
        overview = await self._monitor.overview(_COUNT_TIMEOUT)
        before = self._latest
        is_same = before is not None and _counts(before.overview) == _counts(overview)
        return Snapshot(
            overview=overview,
            schedules=tuple(await self._storage.list_schedules()),
            version=before.version + (not is_same) if before else 1,
        )

    def _next_refresh(self) -> asyncio.Future[None]:
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        return self._next

    def _notify_watchers(self) -> None:
        waiting, self._next = self._next, None
        if waiting is not None:
            finish(waiting)


def _counts(overview: Overview) -> tuple[object, ...]:
    return overview.counted_at is None, overview.by_status, overview.dead


def _point(at: float, overview: Overview) -> Point:
    rates = overview.rates
    by_status = overview.by_status
    return Point(
        at=at,
        finished=rates.finished if rates else 0.0,
        failed=rates.failed + rates.retried if rates else 0.0,
        waiting=by_status[TaskStatus.PENDING] + by_status[TaskStatus.RETRYING],
        by_queue={line.name: line.waiting for line in overview.queues[:_MAX_QUEUES]},
    )
