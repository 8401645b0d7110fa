"""Counts the tasks that wait, for the statistics of a pool."""

from __future__ import annotations

import asyncio

from omniq.storage.base import BaseStorage
from omniq.worker.stats_recorder import StatsRecorder

_SHORTEST_PAUSE, _SHARE = 0.01, 50
"""Counting takes at most one part in `_SHARE` of the time."""

_IDLE_PAUSE = 10.0
"""Seconds between two counts while nothing waits and claims return nothing."""


class WaitingCounter:
    """Counts after claims, in a small part of the storage's time."""

    def __init__(self, storage: BaseStorage, stats: StatsRecorder) -> None:
        self._storage = storage
        self._stats = stats
        self._clock = storage.clock
        self._is_old = asyncio.Event()
        self._idle_until = 0.0

    def claimed(self, count: int) -> None:
        """Count again after a claim that has returned `count` tasks."""
        if count or self._stats.queued or self._clock.monotonic() >= self._idle_until:
            self._is_old.set()

    async def run(self) -> None:
        """Count whenever the last count is old, until it is cancelled."""
        while True:
            await self._is_old.wait()
            self._is_old.clear()
            began = self._clock.monotonic()
            self._stats.counted(await self._storage.count_waiting())
            took = self._clock.monotonic() - began
            self._idle_until = began + _IDLE_PAUSE
            await self._clock.sleep(max(_SHORTEST_PAUSE, took * _SHARE))
