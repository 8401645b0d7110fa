"""The SQLite backend: sections in the writer thread, reads in others, leases in a second file.

All writes go through one connection, whose thread runs all waiting sections in one transaction
(`writer_thread`). A blocking caller runs its section itself while that thread is idle.
Reads have a separate thread and connection, so that reads and writes do not wait for each other.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from omniq.clock import Clock
from omniq.concurrency.callers_lock import CallersLock
from omniq.concurrency.event_loop import has_event_loop
from omniq.failpoints import hit
from omniq.models import WorkerInfo
from omniq.settings import Settings
from omniq.storage.backend import (
    Backend,
    Counts,
    Lease,
    Wanted,
    Work,
    complete,
    largest_value,
)
from omniq.storage.incarnation import check_reader, decode_record
from omniq.storage.permissions import store_rules
from omniq.storage.sqlite import damaged_rows, leases, queries, store_record
from omniq.storage.sqlite.connection import (
    Connection,
    Database,
    SharedConnection,
    StatementRunner,
)
from omniq.storage.sqlite.section import SQLiteSection
from omniq.storage.sqlite.task_transaction import TaskTransactions
from omniq.storage.sqlite.user_transaction import run_within
from omniq.storage.sqlite.wakeups import Wakeups
from omniq.storage.sqlite.writer_thread import ConnectionThread, WriterThread
from omniq.storage.types import Capabilities, Holder, LeaseReply
from omniq.storage.wakeups import LocalWakeups

_T = TypeVar("_T")

_WAL_LIMIT = 4 * 1024 * 1024
_LEASES_WAL_LIMIT = 256 * 1024
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.025
"""Seconds between two polls for commits of other processes."""

_NOT_YET: Any = object()
"""The reply of a claim that has made as many tasks ready as one transaction may, and nothing else."""


class SQLiteBackend(Backend):
    """A store in the file at `path`, with its leases in `<path>-leases`."""

    def __init__(
        self,
        path: Path,
        clock: Clock,
        settings: Settings,
        wakeups: LocalWakeups,
    ) -> None:
        # Without symbolic links, so that all names of a database have one lease file.
        self._path = Path(os.path.realpath(path))
        self._given_path = path.absolute()
        self._clock = clock
        self._settings = settings
        self._local_wakeups = wakeups
        self._version_at_claim = -1
        self._wanted: Wanted | None = None
        self._may_have_more = False
        self.callers_lock: CallersLock = CallersLock()

    @property
    def is_idle(self) -> bool:
        return self._writer.is_idle

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="sqlite",
            durability=self._settings.durability,
            reach="machine",
            transactions=True,
        )

    def sibling(self) -> SQLiteBackend:
        return SQLiteBackend(self._path, self._clock, self._settings, self._local_wakeups)

    # Opening and closing

    async def open(self) -> None:
        path, rules = self._path, store_rules(self._settings)
        # A link on the way to the file must not be one that another user can change.
        rules.check_folder(self._given_path.parent)
        synchronous = "FULL" if self._settings.durability == "power" else "NORMAL"
        largest = largest_value(self._settings.max_payload)
        database = partial(Database, random=self._clock.random, rules=rules, largest=largest)
        self._database = database(path, "schema", synchronous, _WAL_LIMIT)
        # A power cut ends every lease, so this database need not survive one.
        lease_path = path.with_name(f"{path.name}-leases")
        self._lease_database = database(lease_path, "leases", "NORMAL", _LEASES_WAL_LIMIT)
        self._writer = WriterThread("writer", self._database)
        self._leases = WriterThread("leases", self._lease_database)
        self._reader = ConnectionThread("reader", self._database, self._create)
        # Separate from the reader, because a count takes longer than other reads.
        self._counter = ConnectionThread("counter", self._database, self._connect_reader)
        self._task_transactions = TaskTransactions(self._database)
        try:
            await self._register()
            self._wakeups = Wakeups(self._database)
        except BaseException:
            for thread in (self._reader, self._writer, self._leases):
                await thread.close()
            raise

    async def _register(self) -> None:
        """Have the store know its lease file."""
        known = await self._reader.run(store_record.read_record)
        check_reader(known)
        lease_file = await self._reader.run(store_record.read_lease_file_id)
        if known is None or known.leases != lease_file:
            path, new_id = str(self._database.path), self._clock.new_id()
            await self._writer.run(lambda db: store_record.put_record(db, path, lease_file, new_id))

    def _create(self) -> SharedConnection:
        """Create the databases unless they exist, and connect the reader, which every call to open needs."""
        self._database.create()
        self._lease_database.create()
        return self._connect_reader()

    def _connect_reader(self) -> SharedConnection:
        connection = self._database.connect(SharedConnection, writes=False, any_thread=True)
        connection.execute("ATTACH DATABASE ? AS leases", (str(self._lease_database.path),))
        return connection

    async def close(self) -> None:
        self._wakeups.close()
        for thread in (self._reader, self._counter, self._leases, self._writer):
            await thread.close()

    async def end_transactions(self) -> None:
        """Roll back the open transaction of a task, because it blocks all writers."""
        await self._task_transactions.close()

    # Sections

    async def transact(
        self, work: Work[_T], *, claims_as: str | None = None, writes: bool = True
    ) -> _T:
        thread = self._writer if writes else self._reader
        if has_event_loop():
            # One that a wrapper or a signal handler has started in the thread of a caller.
            self.callers_lock.refuse_nested()
        if claims_as is not None:
            # Read before the claim, so that `wait_for_work` notices what others add from now on.
            self._version_at_claim = self._wakeups.version()
        reply: _T = _NOT_YET
        while reply is _NOT_YET:
            reply = await self._run_on(thread, lambda db: self._run(db, work, claims_as))
        return reply

    async def _run_on(self, thread: ConnectionThread, work: Callable[[Connection], _T]) -> _T:
        """Run `work`; once more if damaged rows, which are then set aside, made it fail."""
        try:
            return await thread.run(work)
        except Exception as error:
            if not damaged_rows.may_be_damage(error):
                raise
        # Also if there was none: another call may have set it aside meanwhile.
        await self._writer.run(damaged_rows.set_aside)
        return await thread.run(work)

    def _run(
        self,
        db: StatementRunner,
        work: Callable[[SQLiteSection], Awaitable[_T]],
        claims_as: str | None = None,
    ) -> _T:
        section = SQLiteSection(db, self._clock.micros())
        if claims_as is not None and not section.begin_claim(self.identity.holder(claims_as)):
            # A claim now could take a task before one of higher priority that is not ready yet.
            return _NOT_YET  # type: ignore[no-any-return]
        result = complete(work(section))
        if section.wanted is not None:
            self._wanted, self._may_have_more = section.wanted, section.may_have_more
        return result

    # Transactions of callers and tasks

    async def transact_within(self, connection: object, work: Work[_T]) -> _T:
        return await run_within(self._database, connection, lambda db: self._run(db, work))

    def transaction(
        self, finish: Callable[[], Work[None]], *, seconds: float, blocking: bool
    ) -> AbstractAsyncContextManager[Connection]:
        return self._task_transactions.transaction(
            seconds, lambda: partial(self._run, work=finish())
        )

    # Reading

    async def page(self, query: Any) -> Any:
        return await self._run_on(
            self._reader, lambda db: queries.read_page(db, query, self._clock.micros())
        )

    async def counts(self, *, only_waiting: bool = False) -> Counts:
        if only_waiting:
            return await self._reader.run(
                lambda db: queries.count_waiting(db, self._clock.micros())
            )
        return await self._run_on(
            self._counter, lambda db: queries.count_all(db, self._clock.micros())
        )

    # Leases

    async def leases(self) -> list[Lease]:
        return await self._reader.run(lambda db: leases.read_leases(db, self._clock))

    async def renew(self, info: WorkerInfo, length: int, holder: Holder) -> LeaseReply:
        epoch = holder.epoch
        if not holder.beat:
            epoch = await self._reader.run(store_record.read_epoch)
        # The lease comes first, so that a slow store does not end it.
        is_renewed = epoch >= holder.epoch and await self._leases.run(
            lambda db: leases.renew(db, info, length, self._clock, holder, epoch)
        )

        def read(db: Connection) -> LeaseReply:
            data = store_record.check_lease_file(db, str(self._database.path))
            record = decode_record(data)
            epoch_now = 0 if record is None else record.epoch
            renewal, beat = leases.read_renewal(db, info.id)
            is_valid = is_renewed and epoch_now == epoch
            return LeaseReply(epoch_now, beat, data, renewal if is_valid else None)

        return await self._reader.run(read)

    async def fence(self, owner: str, *, retires: bool = False) -> bool:
        epoch = await self._reader.run(store_record.read_epoch)
        is_fenced = await self._leases.run(
            lambda db: leases.fence(db, owner, self._clock, epoch, retires=retires)
        )
        if is_fenced:
            hit("sqlite.after_fence")
            await self._writer.run(
                lambda db: leases.fence_in_store(db, owner, self._clock.micros())
            )
        return is_fenced

    async def pause_worker(self, owner: str, *, paused: bool) -> bool:
        epoch = await self._reader.run(store_record.read_epoch)
        return await self._leases.run(
            lambda db: leases.pause(db, owner, self._clock, epoch, paused=paused)
        )

    # Waiting

    async def wait_for_work(self, timeout: float) -> None:
        if self._may_have_more:
            # The last claim got all that it had asked for: what the store says now would say no more than that.
            self._may_have_more = False
            return
        deadline = self._clock.monotonic() + timeout
        seen, pause = self._version_at_claim, _FIRST_PAUSE
        next_due = self._wakeups.next_due()
        with self._local_wakeups.listen_for_work() as notified:
            while True:
                version = self._wakeups.version()
                if version != seen:
                    seen = version
                    if self._wakeups.has_work(self._wanted):
                        return
                    next_due = self._wakeups.next_due()
                remaining = deadline - self._clock.monotonic()
                if next_due is not None:
                    remaining = min(remaining, (next_due - self._clock.micros()) / 1_000_000)
                if remaining <= 0 or await self._clock.wait(notified, min(pause, remaining)):
                    return
                pause = min(pause * 1.3, _LONGEST_PAUSE)
