"""Backend: the port of the engine to PostgreSQL.

A section reads without a transaction, and its write is one call (`section`). Recording plain outcomes and
claiming plain tasks is one call together (`record_and_claim`). Leases use the server's clock, unless the
storage was given a clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

import msgspec

from omniq.clock import Clock
from omniq.errors import StorageError
from omniq.models import WorkerInfo
from omniq.serialization import encode_internal, internal_decoder
from omniq.storage.backend import (
    POLLING_PAUSE,
    Backend,
    Changes,
    Counts,
    FinishedQuery,
    Lease,
    Work,
)
from omniq.storage.inspection import DeadQuery, ScanQuery, TaskQuery
from omniq.storage.postgres import encoding, migrations, queries, scan, user_transaction
from omniq.storage.postgres.connection import (
    Connection,
    ServerConnection,
    Target,
    is_missing,
    raise_if_refused,
)
from omniq.storage.postgres.enqueue import enqueue
from omniq.storage.postgres.read_section import ReadSection, RecordReader
from omniq.storage.postgres.record_and_claim import PostgresFastPath
from omniq.storage.postgres.section import PostgresSection
from omniq.storage.postgres.statements import Statements
from omniq.storage.postgres.task_transaction import TaskTransactions
from omniq.storage.postgres.vacuum import Vacuum
from omniq.storage.postgres.wakeups import Wakeups
from omniq.storage.store_clock import clock_of_store, given_boot_time, given_time, observe
from omniq.storage.types import Capabilities, Holder, LeaseReply, Renewal
from omniq.storage.wakeups import LocalWakeups

_T = TypeVar("_T")

_NOTIFIED_PAUSE = 2.0
"""Seconds between two polls for a result of whose end the server notifies this storage, at most."""

_decode_info = internal_decoder(WorkerInfo)


class PostgresBackend(Backend):
    """Connections to one schema of a database."""

    fast_path: PostgresFastPath
    gate_kinds = encoding.GATE_KINDS

    def __init__(
        self, target: Target, pool_size: int, clock: Clock, local_wakeups: LocalWakeups
    ) -> None:
        self.target = target
        self.clock = self.store_clock = clock_of_store(clock)
        self._pool_size = pool_size
        self._local_clock = clock
        self._local_wakeups = local_wakeups
        self._server: migrations.ServerInfo | None = None

    @property
    def capabilities(self) -> Capabilities:
        is_safe = self._server is not None and self._server.survives_power_cut
        return Capabilities(
            name="postgresql",
            durability="power" if is_safe else "os",
            reach="fleet",
            transactions=True,
        )

    def sibling(self) -> PostgresBackend:
        return PostgresBackend(self.target, self._pool_size, self._local_clock, self._local_wakeups)

    # Opening and closing

    async def open(self) -> None:
        target, clock, schema = self.target, self._local_clock, self.target.schema
        self.writer = ServerConnection(target, "writer")
        # Used while the first writer is busy: a worker makes up to two calls at the same time.
        self.second_writer = ServerConnection(target, "second writer")
        self._claim_lock = asyncio.Lock()
        self._reader = ServerConnection(target, "reader")
        # Separate from the reader, because a count takes longer than other reads.
        self._counter = ServerConnection(target, "counter")
        self.statements = Statements(
            schema,
            lambda *sql: self.free_writer().fetch(*sql),
            lambda *sql: self.free_writer().fetch_once(*sql),
        )
        self.reader = Statements(schema, self._reader.fetch, self._reader.fetch_once)
        self.vacuum = Vacuum(self._counter, schema, clock)
        self.task_transactions = TaskTransactions(target, self._pool_size, self._section_on)
        self.wakeups = Wakeups(target, self._local_wakeups, self.clock)
        self.fast_path = PostgresFastPath(
            self.statements,
            self.clock,
            self.wakeups,
            self.vacuum,
            self.identity,
            prefix=f"{clock.new_id()[-6:]}~",
        )
        self._record_reader = RecordReader(self.reader, self.clock)
        try:
            await self.writer.open()
            sent_at = self.clock.boot_micros()
            self._server = server = await self._read_or_install()
            migrations.check_version(target, server.version, server.oldest)
            target.has_answered = True
        except BaseException:
            await self.writer.close()
            raise
        observe(self.clock, server.now, sent_at=sent_at)

    async def _read_or_install(self) -> migrations.ServerInfo:
        """Read the server's facts; installs the schema first when it is missing."""
        try:
            return await migrations.read_server(self.statements)
        except StorageError as error:
            if not is_missing(error):
                raise
        await migrations.upgrade(self.target)
        return await migrations.read_server(self.statements)

    async def close(self) -> None:
        await self.wakeups.close()
        await self.task_transactions.close()
        await self.vacuum.close()
        # Concurrently, because each waits for a server that may not answer.
        connections = (self._reader, self._counter, self.second_writer, self.writer)
        await asyncio.gather(*(connection.close() for connection in connections))

    def free_writer(self) -> ServerConnection:
        """The second writer while only the first is busy; else the first."""
        uses_second = self.writer.is_busy and not self.second_writer.is_busy
        return self.second_writer if uses_second else self.writer

    # Sections

    async def write(self, changes: Changes) -> None:
        await enqueue(self.statements, self.clock.micros(), changes)

    async def transact(
        self, work: Work[_T], *, claims_as: str | None = None, writes: bool = True
    ) -> _T:
        if not writes:
            return await work(ReadSection(self._record_reader))
        if claims_as is None:
            return await work(PostgresSection(self.statements, self.clock))
        section = PostgresSection(
            self.statements,
            self.clock,
            holder=self.identity.holder(claims_as),
            claim_id=self.fast_path.new_claim_id(),
        )
        # One at a time: two would both see that the owner holds no suspect, and each take one.
        async with self._claim_lock:
            result = await work(section)
        if section.claim is not None:
            self.fast_path.claim_ended(section.claim, section.claimed, section.next_due)
        return result

    def _section_on(self, db: Connection) -> PostgresSection:
        async def fetch(*sql: Any) -> Any:
            try:
                return await db.fetch(*sql)
            except Exception as error:
                raise_if_refused(error)
                raise

        return PostgresSection(Statements(self.target.schema, fetch, fetch), self.clock)

    async def transact_within(self, connection: object, work: Work[_T]) -> _T:
        assert self._server is not None
        run = await user_transaction.runner(connection)
        schema, store = self.target.schema, self._server.store
        return await work(user_transaction.UserSection(run, schema, store, self.clock))

    def transaction(
        self, finish: Callable[[], Work[None]], *, seconds: float, blocking: bool
    ) -> AbstractAsyncContextManager[Any]:
        return self.task_transactions.transaction(finish, blocking=blocking)

    # Reading

    async def page(self, query: Any) -> Any:
        reader, now = self.reader, given_time(self.clock)
        match query:
            case TaskQuery():
                return await queries.list_rows(reader, query, now)
            case ScanQuery():
                return await scan.scan(reader, query, now)
            case DeadQuery():
                return await queries.list_dead(reader, query)
            case FinishedQuery():
                return await queries.list_finished(reader, query)

    async def counts(self, *, only_waiting: bool = False) -> Counts:
        if only_waiting:
            waiting = await queries.count_waiting(self.reader)
            return Counts(now=self.clock.micros(), waiting=waiting)
        counter = Statements(self.target.schema, self._counter.fetch, self._counter.fetch_once)
        return await queries.read_counts(counter, given_time(self.clock))

    # Leases

    async def leases(self) -> list[Lease]:
        found = await self.reader.call("all_leases", given_boot_time(self.clock))
        return [
            Lease(owner, _info(info, paused), until > now, until, length, now)
            for owner, info, paused, until, length, now in found
        ]

    async def renew(self, info: WorkerInfo, length: int, holder: Holder) -> LeaseReply:
        sent_at = self.clock.boot_micros()
        (renewed,) = await self.statements.call(
            "renew",
            info.id,
            length,
            encode_internal(info),
            holder.epoch,
            holder.beat,
            given_time(self.clock),
            given_boot_time(self.clock),
        )
        is_renewed, is_paused, at, ids, tokens, cancelled, epoch, beat, store = renewed
        observe(self.clock, at, sent_at=sent_at)
        if not is_renewed:
            return LeaseReply(epoch, beat, store)
        renewal = Renewal(
            dict(zip(ids, tokens, strict=True)),
            frozenset(task_id for task_id, flag in zip(ids, cancelled, strict=True) if flag),
            is_paused,
        )
        return LeaseReply(epoch, beat, store, renewal)

    async def fence(self, owner: str, *, retires: bool = False) -> bool:
        times = given_time(self.clock), given_boot_time(self.clock)
        ((is_fenced,),) = await self.statements.call("fence", owner, *times, retires)
        return bool(is_fenced)

    async def fence_overdue(self, lease: Lease) -> bool:
        sql = "UPDATE {schema}.leases SET until = 0 WHERE owner = $1 AND until = $2 AND NOT fenced"
        await self.statements.fetch(sql, lease.owner, lease.until)
        return await self.fence(lease.owner)

    async def pause_worker(self, owner: str, *, paused: bool) -> bool:
        sql = (
            "UPDATE {schema}.leases SET paused = $2 WHERE owner = $1 AND NOT fenced "
            "AND until > (SELECT {schema}.micros($3)) RETURNING owner"
        )
        return bool(await self.statements.fetch(sql, owner, paused, given_boot_time(self.clock)))

    # Waiting

    async def wait_for_work(self, timeout: float) -> None:
        await self.wakeups.wait_for_work(timeout)

    async def read_clock(self) -> None:
        sent_at = self.clock.boot_micros()
        ((now,),) = await self.reader.call("micros", None)
        observe(self.clock, now, sent_at=sent_at)

    @asynccontextmanager
    async def watch_result(self, task_id: str) -> AsyncIterator[float]:
        async with self.wakeups.awaiting_result(task_id) as is_notified:
            yield _NOTIFIED_PAUSE if is_notified else POLLING_PAUSE


def _info(data: bytes | None, paused: bool) -> WorkerInfo | None:
    return None if data is None else msgspec.structs.replace(_decode_info(data), paused=paused)
