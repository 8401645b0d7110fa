"""The NATS backend: the log backend on a stream, with wake-ups and the server's time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from omniq.clock import Clock
from omniq.errors import QueueFull, StorageClosed
from omniq.storage.backend import Changes
from omniq.storage.log.backend import Connection, LogBackend
from omniq.storage.nats.address import Address
from omniq.storage.nats.connection import StreamFull
from omniq.storage.nats.stream_log import CAPABILITIES, StreamLog
from omniq.storage.types import Capabilities
from omniq.storage.wakeups import LocalWakeups

_T = TypeVar("_T")

_NOTIFIED_PAUSE = 1.0
"""Seconds between two polls for a result whose end is notified, at most."""


class Streams(Connection):
    """The commit thread on the streams of a store, for all backends of a storage object."""

    def __init__(
        self, address: Address, clock: Clock, wakeups: LocalWakeups, snapshot_bytes: int
    ) -> None:
        super().__init__(self._connect_log, clock, snapshot_bytes)
        self._address = address
        self._wakeups = wakeups
        self.clock = clock
        self.log: StreamLog | None = None

    def _connect_log(self) -> StreamLog:
        self.log = StreamLog(self._address, self.clock, self._wakeups)
        return self.log


class NatsBackend(LogBackend):
    """A store in the streams of a NATS server."""

    def __init__(self, streams: Streams, wakeups: LocalWakeups) -> None:
        super().__init__(streams, CAPABILITIES, streams.clock, wakeups)
        self.store_clock = streams.clock
        self._streams = streams

    @property
    def capabilities(self) -> Capabilities:
        log = self._streams.log
        return CAPABILITIES if log is None else log.capabilities

    def sibling(self) -> NatsBackend:
        return NatsBackend(self._streams, self._wakeups)

    async def write(self, changes: Changes) -> None:
        try:
            await super().write(changes)
        except StreamFull as error:
            if not changes.inserted:
                raise
            counts = await self.counts(only_waiting=True)
            raise QueueFull(counts.waiting) from error

    async def read_clock(self) -> None:
        await self._on_log(StreamLog.read_clock)

    async def server_report(self) -> list[tuple[str, str, str]]:
        """The settings of the server for `omniq doctor`."""
        return await self._on_log(StreamLog.report)

    async def _on_log(self, work: Callable[[StreamLog], Coroutine[Any, Any, _T]]) -> _T:
        log = self._streams.log
        if self._thread is None or log is None:
            raise StorageClosed("the storage is not open")
        return await self._thread.run(work(log))

    @asynccontextmanager
    async def watch_result(self, task_id: str) -> AsyncIterator[float]:
        yield _NOTIFIED_PAUSE
