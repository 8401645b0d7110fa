"""The NATS backend: the log backend in the host, and calls to the host in all other processes."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec

from omniq.clock import Clock
from omniq.errors import QueueFull, StorageClosed
from omniq.models import WorkerInfo
from omniq.serialization import encode_internal
from omniq.storage.backend import Changes, Counts, FastReply, Lease, Work
from omniq.storage.log.backend import Connection, LogBackend
from omniq.storage.log.commit_thread import CommitThread
from omniq.storage.nats import calls
from omniq.storage.nats.address import Address
from omniq.storage.nats.api_errors import StreamFull
from omniq.storage.nats.host import Host
from omniq.storage.nats.replies import decode_reply, raise_error
from omniq.storage.nats.section import HostSection, RemoteSection, write_call
from omniq.storage.nats.stream_log import CAPABILITIES, StreamLog
from omniq.storage.row_rules import Row
from omniq.storage.tables import Tables, TablesSection
from omniq.storage.types import Capabilities, Claim, Holder, LeaseReply
from omniq.storage.wakeups import LocalWakeups

_T = TypeVar("_T")

_NOTIFIED_PAUSE = 1.0
"""The longest time between two polls for a result, in seconds; its end is also notified."""


class Streams(Connection):
    """The commit thread on the streams of a store, for all backends of a storage object."""

    def __init__(
        self, address: Address, clock: Clock, wakeups: LocalWakeups, snapshot_bytes: int
    ) -> None:
        super().__init__(self._connect_log, clock, snapshot_bytes)
        self._address = address
        self._wakeups = wakeups
        self._numbers = itertools.count()
        self._prefix = clock.new_id()
        self.clock = clock
        self.log: StreamLog | None = None
        self.host: Host | None = None

    def _connect_log(self) -> StreamLog:
        self.log = StreamLog(self._address, self.clock, self._wakeups)
        return self.log

    async def _begin(self, thread: CommitThread) -> None:
        async def run_call(call: calls.Call) -> tuple[Any, int | None]:
            return await thread.call(call.run, writes=call.writes), thread.next_due

        async def begin() -> None:
            assert self.log is not None
            await self.log.open()
            self.host = Host(self.log, self._address.host, run_call)
            await self.host.open()

        await thread.run(begin())
        if self.is_host:
            await super()._begin(thread)

    async def _end(self, thread: CommitThread) -> None:
        if self.host is not None:
            await thread.run(self.host.leave())
        await super()._end(thread)

    @property
    def is_host(self) -> bool:
        """Whether this process runs the calls itself."""
        return self.host is not None and self.host.is_here

    async def call(self, thread: CommitThread, call: calls.Call) -> tuple[Any, int | None]:
        """Have the host run a call; returns its value, and when a delayed task becomes visible."""
        call.id = f"{self._prefix}-{next(self._numbers)}"
        data = encode_internal(call)
        while not self.is_host:
            assert self.host is not None
            answer = await thread.run(self.host.call(data))
            if answer is not None:
                reply = decode_reply(answer)
                raise_error(reply)
                return calls.value_decoder(type(call))(bytes(reply.value)), reply.next_due
        return await thread.call(call.run, writes=call.writes), thread.next_due


class NatsBackend(LogBackend):
    """A store in the streams of a NATS server."""

    def __init__(self, streams: Streams, wakeups: LocalWakeups) -> None:
        super().__init__(streams, CAPABILITIES, streams.clock, wakeups)
        self.store_clock = streams.clock
        self._streams = streams
        self.fast_path = self

    @property
    def capabilities(self) -> Capabilities:
        log = self._streams.log
        return CAPABILITIES if log is None else log.capabilities

    def sibling(self) -> NatsBackend:
        return NatsBackend(self._streams, self._wakeups)

    async def _perform(self, call: calls.Call) -> Any:
        if self._thread is None:
            raise StorageClosed("the storage is not open")
        value, next_due = await self._streams.call(self._thread, call)
        self._note_next_due(next_due)
        return value

    # Sections

    def _section(self, tables: Tables, now: int) -> TablesSection:
        return HostSection(tables, now)

    async def transact(
        self, work: Work[_T], *, claims_as: str | None = None, writes: bool = True
    ) -> _T:
        if self._streams.is_host:
            return await super().transact(work, claims_as=claims_as, writes=writes)
        holder = None if claims_as is None else self.identity.holder(claims_as)
        return await work(RemoteSection(self._perform, self._clock.micros(), holder))

    async def write(self, changes: Changes) -> None:
        try:
            if self._streams.is_host:
                await super().write(changes)
            else:
                await self._perform(write_call(changes))
        except StreamFull as error:
            if not changes.inserted:
                raise
            counts = await self.counts(only_waiting=True)
            raise QueueFull(counts.waiting) from error

    def now(self) -> int:
        """The store's time in microseconds, as far as it is known here."""
        return self._clock.micros()

    async def record_and_claim(
        self, owner: str, changes: Changes, claim: Claim | None
    ) -> FastReply:
        """Record planned outcomes, and claim plain rows, in one call."""
        reply: FastReply = await self._perform(
            calls.RecordAndClaim(
                holder=self.identity.holder(owner),
                ended=[
                    msgspec.structs.replace(each.finished, row=_without_body(each.row))
                    for each in changes.ended
                ],
                updated=list(map(_without_body, changes.updated)),
                documents=list(map(calls.SentDocument.of, changes.documents)),
                claim=claim,
            )
        )
        return reply

    # Pages, counts, leases

    async def page(self, query: Any) -> Any:
        if self._streams.is_host:
            return await super().page(query)
        kind = type(query).__name__
        page = calls.Page(kind=kind, query=msgspec.Raw(encode_internal(query)))
        return calls.page_reply(kind)(bytes(await self._perform(page)))

    async def counts(self, *, only_waiting: bool = False) -> Counts:
        counts: Counts = await self._perform(calls.Count(only_waiting=only_waiting))
        return counts

    async def leases(self) -> list[Lease]:
        leases: list[Lease] = await self._perform(calls.Leases())
        return leases

    async def renew(self, info: WorkerInfo, length: int, holder: Holder) -> LeaseReply:
        reply: LeaseReply = await self._perform(
            calls.Renew(info=info, length=length, holder=holder)
        )
        return reply

    async def fence(self, owner: str, *, retires: bool = False) -> bool:
        return bool(await self._perform(calls.Fence(owner=owner, retires=retires)))

    async def pause_worker(self, owner: str, *, paused: bool) -> bool:
        return bool(await self._perform(calls.PauseWorker(owner=owner, paused=paused)))

    # Waiting, and the server

    @asynccontextmanager
    async def watch_result(self, task_id: str) -> AsyncIterator[float]:
        yield _NOTIFIED_PAUSE

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


def _without_body(row: Row) -> Row:
    """The row without its body, which the host has."""
    return msgspec.structs.replace(row, body=b"")
