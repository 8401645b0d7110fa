"""Counts and workers of a storage, read from any thread and cached for two seconds."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Self

from omniq.concurrency.portal import Portal
from omniq.errors import StorageError
from omniq.models import QueueStats, WorkerInfo
from omniq.operations.health import live_workers
from omniq.operations.run_history import RANGES, History, run_history
from omniq.storage import BaseStorage

_MAX_AGE = 2.0
_TIMEOUT = 5.0
_HISTORY_MAX_AGE = 30.0


class StorageMetrics:
    """Reads counts, workers and the history of a storage over a separate connection."""

    def __init__(self, storage: BaseStorage) -> None:
        self._clock = storage.clock
        self._storage = storage.sibling()
        self._portal = Portal()
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._history: History | None = None
        self._history_at = float("-inf")
        self._newest: tuple[QueueStats, list[WorkerInfo]] | None = None

    def read(self) -> tuple[QueueStats, list[WorkerInfo]]:
        """The counts and the live workers, at most two seconds old.

        Raises `StorageError` if the storage does not respond.
        """
        with self._lock:
            now = self._clock.monotonic()
            if self._newest is None or now - self._read_at > _MAX_AGE:
                self._newest = self._portal.run(self._read_now())
                self._read_at = now
            return self._newest

    def history(self) -> History:
        """How runs of the whole fleet ended in the last 15 minutes, at most half a minute old."""
        with self._lock:
            now = self._clock.monotonic()
            if self._history is None or now - self._history_at > _HISTORY_MAX_AGE:
                self._history = self._portal.run(self._read_history())
                self._history_at = now
            return self._history

    async def _read_history(self) -> History:
        try:
            async with asyncio.timeout(_TIMEOUT):
                if not self._storage.is_open:
                    await self._storage.open()
                return await run_history(self._storage, RANGES["15m"], parts=True)
        except TimeoutError as error:
            raise StorageError(f"the storage did not respond within {_TIMEOUT:g} s") from error

    async def _read_now(self) -> tuple[QueueStats, list[WorkerInfo]]:
        try:
            async with asyncio.timeout(_TIMEOUT):
                if not self._storage.is_open:
                    await self._storage.open()
                return await self._storage.stats(), await live_workers(self._storage)
        except TimeoutError as error:
            raise StorageError(f"the storage did not respond within {_TIMEOUT:g} s") from error

    def close(self) -> None:
        """Close the connection."""
        self._portal.run(self._storage.close())
        self._portal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
