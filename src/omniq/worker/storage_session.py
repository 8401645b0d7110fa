"""Opens the storage of a pool when it is needed, and closes it only if the pool opened it."""

from __future__ import annotations

import asyncio

from omniq.events import Dispatcher, WorkerStarted
from omniq.signing import protection
from omniq.storage.base import BaseStorage
from omniq.worker.maintenance import tasks_left


class StorageSession:
    """The use that a pool makes of its storage. A caller may have opened it before."""

    def __init__(self, storage: BaseStorage, dispatcher: Dispatcher) -> None:
        self._storage = storage
        self._events = dispatcher
        self._lock = asyncio.Lock()
        self.is_owner = False
        """Whether the pool has opened the storage, and has to close it."""

    async def open(self) -> None:
        """Open the storage, unless it is open."""
        async with self._lock:
            if not self._storage.is_open:
                await self._storage.open()
                self.is_owner = True

    async def close(self) -> None:
        """Close the storage, if the pool has opened it. Tasks that are lost by that are reported."""
        if not self.is_owner:
            return
        self.is_owner = False
        # The next use may belong to another event loop.
        self._lock = asyncio.Lock()
        if self._storage.is_open:
            if (left := await tasks_left(self._storage)) is not None:
                self._events.emit(left)
            await self._storage.close()


def worker_started(storage: BaseStorage, concurrency: int, runs: str) -> WorkerStarted:
    """The event of a worker that starts to claim tasks of the storage."""
    records = protection(storage.serializer)
    return WorkerStarted(owner=storage.owner, concurrency=concurrency, records=records, runs=runs)
