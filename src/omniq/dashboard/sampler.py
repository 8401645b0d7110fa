"""One look at the storage every other second, shared by everybody who watches.

However many dashboards are open, the storage is asked as often as for one. A look does not wait for
a large storage to be counted: it shows the counts of before, and from when they are. Looks that take
long are taken more rarely, and no page waits for them. Nobody there, nobody asks: the looks become
rare, and end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

import msgspec

from omniq.errors import OmniqError, StorageClosed
from omniq.events import ChoreFailed
from omniq.log import write
from omniq.models import Schedule, TaskStatus
from omniq.operations.overview import Monitor, Overview
from omniq.storage.base import BaseStorage

PERIOD = 2.0
_IDLE_PERIOD = 10.0
_WATCHED_SECONDS = 30.0
_KEPT_SECONDS = 900.0
_MOST_POINTS = 450
_MOST_QUEUES = 20
_PATIENCE = 0.1
_COUNT_PATIENCE = 0.03
_SHARE = 10
"""How many times longer than a look the pause after it is at least."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """What the charts show of one look."""

    at: float
    finished: float
    failed: float
    waiting: int
    by_queue: dict[str, int]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All that was seen at one look. `version` grows when some count has changed."""

    overview: Overview
    schedules: tuple[Schedule, ...]
    version: int


class Sampler:
    """Looks at a storage for everybody who watches it."""

    def __init__(self, storage: BaseStorage, *, period: float = PERIOD) -> None:
        self._storage = storage
        self._clock = storage.clock
        self._monitor = Monitor(storage)
        self._period = period
        self._pace = period
        self._changes = 0
        self._look: Snapshot | None = None
        self._look_task: asyncio.Task[None] | None = None
        self._failure: OmniqError | None = None
        self._looked_at = float("-inf")
        self._asked_at = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self._next: asyncio.Future[None] | None = None
        self._is_closed = False
        self.watchers = 0
        self.points: deque[Point] = deque(maxlen=_MOST_POINTS)

    async def current(self) -> Snapshot:
        """How it goes, as of a moment ago; of a slow storage, as it was seen last."""
        self._asked_at = self._clock.monotonic()
        self._begin()
        if self._look is None:
            await asyncio.shield(self._looking())
        elif self._clock.monotonic() - self._looked_at >= self._pace:
            await asyncio.wait((self._looking(),), timeout=_PATIENCE)
        if self._look is None:
            raise self._failure or StorageClosed("the dashboard has been closed")
        return self._look

    @property
    def latest(self) -> Snapshot | None:
        """The last look there was, however old; asks nobody."""
        return self._look

    @property
    def error(self) -> str:
        """Why the last look failed; empty when it did not."""
        return "" if self._failure is None else str(self._failure)

    async def watch(self) -> AsyncGenerator[Snapshot | None, None]:
        """Each look as it is taken, from the present one on; None when one has failed."""
        self.watchers += 1
        try:
            yield await self.current()
            while not self._is_closed:
                self._begin()
                await asyncio.shield(self._awaited())
                yield None if self._failure else self._look
        finally:
            self.watchers -= 1

    def expire(self) -> None:
        """Let the next who asks look anew: something was changed."""
        self._looked_at = float("-inf")
        self._monitor.invalidate()
        # A look that is under way may have been too early to see it.
        self._changes += 1

    async def close(self) -> None:
        """Snapshot no more; everybody who watches is told that it is over."""
        self._is_closed = True
        self._announce()
        ending = [task for task in (self._task, self._look_task) if task is not None]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self._monitor.close()

    def _begin(self) -> None:
        # Here and not when the application starts: one that is mounted is not told about that.
        if not self._is_closed and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while (idle := self._clock.monotonic() - self._asked_at) < _KEPT_SECONDS or self.watchers:
            is_watched = self.watchers or idle < _WATCHED_SECONDS
            await self._clock.sleep(self._pace if is_watched else max(self._pace, _IDLE_PERIOD))
            await asyncio.wait((self._looking(),))
            self._announce()

    def _looking(self) -> asyncio.Task[None]:
        """The look that is under way, or a new one: never two at once."""
        if self._look_task is None or self._look_task.done():
            self._look_task = asyncio.get_running_loop().create_task(self._take_look())
        return self._look_task

    async def _take_look(self) -> None:
        began, changes = self._clock.monotonic(), self._changes
        try:
            self._look = await self._refresh()
        except OmniqError as error:
            # The dashboard outlives a restart of the server, and says what is wrong.
            if self._failure is None:
                write(ChoreFailed.of("dashboard", error))
            self._failure = error
            return
        now = self._clock.monotonic()
        self._failure = None
        self._pace = max(self._period, _SHARE * (now - began))
        self._looked_at = now if changes == self._changes else float("-inf")
        if self._look.overview.counted_at is not None:
            self.points.append(_point(now, self._look.overview))

    async def _refresh(self) -> Snapshot:
        overview = await self._monitor.overview(_COUNT_PATIENCE)
        before = self._look
        is_same = before is not None and _counts(before.overview) == _counts(overview)
        return Snapshot(
            overview=overview,
            schedules=tuple(await self._storage.list_schedules()),
            version=before.version + (not is_same) if before else 1,
        )

    def _awaited(self) -> asyncio.Future[None]:
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        return self._next

    def _announce(self) -> None:
        waiting, self._next = self._next, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


def _counts(overview: Overview) -> tuple[object, ...]:
    return overview.counted_at is None, overview.by_status, overview.dead


def _point(at: float, overview: Overview) -> Point:
    rates = overview.rates
    by_status = overview.by_status
    return Point(
        at=at,
        finished=rates.finished if rates else 0.0,
        failed=rates.failed if rates else 0.0,
        waiting=by_status[TaskStatus.PENDING] + by_status[TaskStatus.RETRYING],
        by_queue={line.name: line.waiting for line in overview.queues[:_MOST_QUEUES]},
    )
