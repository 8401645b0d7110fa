"""How much there is, counted in the background: nobody has to wait for a large storage.

A count that takes long is made more rarely, so that counting never keeps a storage busy.
"""

from __future__ import annotations

import asyncio
from datetime import datetime

import msgspec

from omniq.models import QueueStats, TaskStatus
from omniq.storage.base import BaseStorage

_SHARE = 10
"""How many times longer than a count the pause after it is at least."""

UNCOUNTED = QueueStats(
    by_status=dict.fromkeys(TaskStatus, 0), by_queue={}, oldest_due_age=0.0, dead=0
)


class Count(msgspec.Struct, frozen=True):
    """What was counted, and when; `measured_at` is by the monotonic clock."""

    stats: QueueStats
    at: datetime
    measured_at: float


class Counting:
    """Counts a storage for whoever asks, never twice at once."""

    def __init__(self, storage: BaseStorage) -> None:
        self._storage = storage
        self._clock = storage.clock
        self._task: asyncio.Task[Count] | None = None
        self._next_at = float("-inf")
        self._changes = 0
        self.latest: Count | None = None

    def begin(self, *, at_once: bool) -> asyncio.Task[Count] | None:
        """Count in the background. None: the last count is too young for another, unless `at_once`."""
        if self._task is None and (at_once or self._clock.monotonic() >= self._next_at):
            self._task = asyncio.get_running_loop().create_task(self._count())
            self._task.add_done_callback(self._ended)
        return self._task

    async def settled(
        self, counting: asyncio.Task[Count] | None, patience: float | None
    ) -> Count | None:
        """What that comes to within `patience` seconds; else the last count, None for none yet."""
        if counting is not None:
            await asyncio.wait((counting,), timeout=patience)
            if counting.done():
                return counting.result()
        return self.latest

    def expire(self) -> None:
        """Count anew for the next who asks: something was changed."""
        self._next_at = float("-inf")
        # A count that is under way may have been too early to see it.
        self._changes += 1

    async def close(self) -> None:
        """Count no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _count(self) -> Count:
        began, changes = self._clock.monotonic(), self._changes
        stats = await self._storage.stats()
        now = self._clock.monotonic()
        self.latest = Count(stats, self._clock.now(), now)
        is_current = changes == self._changes
        self._next_at = now + _SHARE * (now - began) if is_current else float("-inf")
        return self.latest

    def _ended(self, task: asyncio.Task[Count]) -> None:
        self._task = None
        # Told to those who wait. When nobody does, whatever else is asked fails just so.
        if not task.cancelled():
            task.exception()
