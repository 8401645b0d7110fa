"""Opens the storage of a pool when it is needed, and closes it only if the pool opened it.

It also reports what the pool says of itself when it starts and when it has ended.
"""

from __future__ import annotations

import asyncio

import msgspec

from omniq._version import __version__
from omniq.events import Dispatcher, WorkerStarted, WorkerStopped
from omniq.signing import protection
from omniq.storage.base import BaseStorage
from omniq.worker.maintenance import tasks_left
from omniq.worker.middleware import name_of
from omniq.worker.pool_config import PoolConfig


class StartReport(msgspec.Struct, frozen=True):
    """What `omniq worker` knows of its worker, and other pools do not, for the event of its start."""

    storage: str = ""
    functions: str = ""
    schedules: str = ""
    stop: str = ""
    is_short: bool = False
    """Whether another process of the worker has said all this."""


class StorageSession:
    """The use that a pool makes of its storage. A caller may have opened it before."""

    def __init__(self, storage: BaseStorage, dispatcher: Dispatcher) -> None:
        self._storage = storage
        self._events = dispatcher
        self._lock = asyncio.Lock()
        self.is_owner = False
        """Whether the pool has opened the storage, and has to close it."""
        self.start_report = StartReport()
        """What is not known here, for the event of the start."""

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

    def report_start(self, config: PoolConfig, runs: str) -> None:
        """Emit the event of a worker that starts to claim tasks of the storage."""
        storage, report = self._storage, self.start_report
        if report.is_short:
            self._events.emit(
                WorkerStarted(owner=storage.owner, concurrency=config.concurrency, records="")
            )
            return
        self._events.emit(
            WorkerStarted(
                owner=storage.owner,
                concurrency=config.concurrency,
                version=__version__,
                storage=report.storage or storage.capabilities.name,
                records=protection(storage.serializer),
                queues="all" if config.queues is None else ", ".join(config.queues),
                max_pending=storage.max_pending,
                runs=runs,
                functions=report.functions,
                schedules=report.schedules,
                lifespan="" if config.lifespan is None else name_of(config.lifespan),
                middleware=", ".join(map(name_of, config.middleware)),
                stop=report.stop,
            )
        )

    def report_stop(self, owner: str, released: int, *, timed_out: bool) -> None:
        """Emit the event of a worker that has ended."""
        self._events.emit(WorkerStopped(owner=owner, released=released, timed_out=timed_out))
