"""Task counts, made in the background: no reader waits until a large storage is counted.

After a slow count the next one waits longer, so that counting never keeps a storage busy.
"""

from __future__ import annotations

import asyncio
from datetime import datetime

import msgspec

from omniq.models import QueueStats, TaskStatus
from omniq.storage.base import BaseStorage

_PAUSE_FACTOR = 10
"""The pause after a count is at least this many times as long as the count took."""

_MAX_PAUSE = 30.0

UNCOUNTED = QueueStats(
    by_status=dict.fromkeys(TaskStatus, 0), by_queue={}, oldest_due_age=0.0, dead=0
)


class Count(msgspec.Struct, frozen=True):
    """The counts and when they were made; `measured_at` is by the monotonic clock."""

    stats: QueueStats
    at: datetime
    measured_at: float


class BackgroundCount:
    """Counts a storage in the background, one count at a time, for any number of readers."""

    def __init__(self, storage: BaseStorage) -> None:
        self._storage = storage
        self._clock = storage.clock
        self._task: asyncio.Task[Count] | None = None
        self._next_at = float("-inf")
        self._changes = 0
        self.latest: Count | None = None

    def start(self, *, force: bool) -> asyncio.Task[Count] | None:
        """The count that is running, or a new one. None: it is too early, and `force` is not set."""
        if self._task is None and (force or self._clock.monotonic() >= self._next_at):
            self._task = asyncio.get_running_loop().create_task(self._count())
            self._task.add_done_callback(self._done)
        return self._task

    async def wait(self, task: asyncio.Task[Count] | None, timeout: float | None) -> Count | None:
        """The result of `task` if it is done within `timeout` seconds.

        Otherwise the last count; None if there is none yet.
        """
        if task is not None:
            await asyncio.wait((task,), timeout=timeout)
            if task.done():
                return task.result()
        return self.latest

    def invalidate(self) -> None:
        """Allow a new count immediately: something was changed."""
        self._next_at = float("-inf")
        # A running count may have read the storage before the change.
        self._changes += 1

    async def close(self) -> None:
        """Cancel the running count."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _count(self) -> Count:
        began, changes = self._clock.monotonic(), self._changes
        stats = await self._storage.stats()
        now = self._clock.monotonic()
        self.latest = Count(stats, self._clock.now(), now)
        is_current = changes == self._changes
        pause = min(_PAUSE_FACTOR * (now - began), _MAX_PAUSE)
        self._next_at = now + pause if is_current else float("-inf")
        return self.latest

    def _done(self, task: asyncio.Task[Count]) -> None:
        self._task = None
        # A reader that waits gets the error. Without one, reading it here avoids asyncio's warning;
        # the next read of the storage fails in the same way.
        if not task.cancelled():
            task.exception()
