"""Storage: tasks in a PostgreSQL database that any number of machines share.

Recording outcomes and claiming tasks has two paths. The fast path is one SQL function in one round
trip (`record_and_claim`). It handles ordinary tasks. The rule path is a transaction in which Python
applies the rules of `row_rules` and `gate_rules` (`record`, `claim`). It handles what the fast path
hands over: gates, suspects, expired tasks, dead letters, and rows that have changed.

Leases use the server's clock, unless the storage was given a clock.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import msgspec

from omniq.clock import SYSTEM_CLOCK, Clock
from omniq.errors import LeaseLost, StorageError
from omniq.models import (
    TaskResult,
    WorkerInfo,
)
from omniq.serialization import Serializer, encode_internal
from omniq.settings import Settings
from omniq.storage import row_rules
from omniq.storage.base import BaseStorage
from omniq.storage.enqueue_batcher import EnqueueBatcher
from omniq.storage.postgres import (
    enqueue,
    migrations,
    queries,
    record_and_claim,
    recovery,
    user_transaction,
)
from omniq.storage.postgres.claim import Claimed, claim_by_rules
from omniq.storage.postgres.connection import Connection, ReplyLost, ServerConnection, Target
from omniq.storage.postgres.record import Recorder
from omniq.storage.postgres.record_and_claim import KnownRows, RecordPlan
from omniq.storage.postgres.server_check import Finding, report
from omniq.storage.postgres.side_data import PostgresSideData
from omniq.storage.postgres.statements import SchemaNames
from omniq.storage.postgres.task_transaction import TaskTransactions
from omniq.storage.postgres.vacuum import Vacuum
from omniq.storage.postgres.wakeups import Wakeups
from omniq.storage.row_rules import Row
from omniq.storage.types import Capabilities, Claim, Entry, GivenBack, Renewal

_T = TypeVar("_T")

_NOTIFIED_PAUSE = 2.0
"""The longest pause between two polls for a result of whose end the server notifies this storage."""


class PostgresStorage(PostgresSideData):
    """A store in one schema of the database at `url`.

    `poll_only` is for a pooler that gives every transaction a different session (PgBouncer): no
    statement is prepared and no connection listens. `pool_size` bounds the connections for
    `transaction`; besides them there are at most five: two to write, and one each to read, to count
    and vacuum, and to listen.
    """

    def __init__(
        self,
        url: str,
        *,
        schema: str = "omniq",
        poll_only: bool = False,
        pool_size: int = 10,
        serializer: Serializer | None = None,
        clock: Clock = SYSTEM_CLOCK,
        settings: Settings | None = None,
        max_pending: int | None = None,
    ) -> None:
        super().__init__(
            serializer=serializer, clock=clock, settings=settings, max_pending=max_pending
        )
        self._target = Target(url, schema, clock, poll_only=poll_only)
        self._pool_size = pool_size
        self._names = SchemaNames(schema)
        self._known_rows = KnownRows()
        self._server: migrations.ServerInfo | None = None
        self._pid = 0
        self._claims_made = 0

    @property
    def capabilities(self) -> Capabilities:
        is_safe = self._server is not None and self._server.survives_power_cut
        return Capabilities(
            name="postgresql",
            durability="power" if is_safe else "os",
            reach="fleet",
            transactions=True,
        )

    def sibling(self) -> PostgresStorage:
        sibling = PostgresStorage(
            self._target.url,
            schema=self._target.schema,
            poll_only=self._target.poll_only,
            pool_size=self._pool_size,
            serializer=self._serializer,
            clock=self._clock,
            settings=self._settings,
            max_pending=self._max_pending,
        )
        sibling._identity = self._identity
        sibling._local_wakeups = self._local_wakeups
        sibling._is_sibling = True
        return sibling

    # Opening and closing

    async def _open(self) -> None:
        self._pid = os.getpid()
        self._writer = ServerConnection(self._target, "writer")
        # Used while the first writer is busy: a worker makes up to two calls at the same time.
        self._second_writer = ServerConnection(self._target, "second writer")
        self._rule_claim_lock = asyncio.Lock()
        self._reader = ServerConnection(self._target, "reader")
        # Separate from the reader, because a count takes longer than other reads.
        self._counter = ServerConnection(self._target, "counter")
        self._vacuum = Vacuum(self._counter, self._names, self._clock)
        self._task_transactions = TaskTransactions(
            self._target, self._pool_size, self._begin, self._change
        )
        self._enqueue_batcher = EnqueueBatcher(partial(self._insert, is_repeatable=True))
        self._create_read_batchers()
        self._wakeups = Wakeups(self._target, self._local_wakeups, self._clock, self._given_now)
        try:
            await self._writer.open()
            self._server = await self._read_or_install()
            migrations.check_version(self._target, self._server.version)
        except BaseException:
            await self._writer.close()
            raise

    async def _read_or_install(self) -> migrations.ServerInfo:
        """Read the server's facts; installs the schema first when it is missing."""
        try:
            return await self._writer.run(self._read_server, is_repeatable=True)
        except StorageError as error:
            if not migrations.is_missing(error):
                raise
        await migrations.upgrade(self._target)
        return await self._writer.run(self._read_server, is_repeatable=True)

    async def _read_server(self, db: Connection) -> migrations.ServerInfo:
        return await migrations.read_server(db, self._names)

    async def close(self) -> None:
        if self._is_open and self._pid != os.getpid():
            # After a fork the connections and claims are the parent's: neither is touched.
            self._is_open = False
            self._held.clear()
            self._claim_ids.clear()
            return
        await super().close()

    async def _close(self) -> None:
        self._known_rows = KnownRows()
        await self._wakeups.close()
        await self._task_transactions.close()
        await self._vacuum.close()
        # Concurrently, because each waits for a server that may not answer.
        connections = (self._reader, self._counter, self._second_writer, self._writer)
        await asyncio.gather(*(connection.close() for connection in connections))

    def _check_open(self) -> None:
        super()._check_open()
        if self._pid != os.getpid():
            raise StorageError(
                f"{self._target}: opened by process {self._pid}, and used in process "
                f"{os.getpid()} after a fork; open a separate storage in each process"
            )

    # The schema; the storage need not be open

    def schema_sql(self) -> str:
        """Return the SQL that sets up an empty database."""
        return migrations.install_sql(self._target.schema)

    async def check_schema(self) -> int:
        """Return the schema's version; raises `StorageRefused` when another version is needed."""
        version = await migrations.read_version(self._target)
        migrations.check_version(self._target, version)
        return version

    async def upgrade_schema(self) -> tuple[int, int]:
        """Upgrade the schema to the newest version; returns the versions before and after."""
        return await migrations.upgrade(self._target), migrations.NEWEST

    async def server_report(self) -> list[Finding]:
        """Check the server's settings: name, value, and "ok", "warn: …" or "bad: …" of each."""
        return await self._read(lambda db: report(db, self._clock.micros()))

    # Clocks: NULL means the server's clock

    def _given_now(self) -> int | None:
        return None if self._clock is SYSTEM_CLOCK else self._clock.micros()

    def _given_lease_now(self) -> int | None:
        return None if self._clock is SYSTEM_CLOCK else self._clock.boot_micros()

    # Transactions

    async def _read(self, work: Callable[[Connection], Awaitable[_T]]) -> _T:
        self._check_open()
        return await self._reader.run(work, is_repeatable=True)

    async def _count(self, work: Callable[[Connection], Awaitable[_T]]) -> _T:
        self._check_open()
        return await self._counter.run(work, is_repeatable=True)

    async def _write(
        self, work: Callable[[Connection], Awaitable[_T]], *, is_repeatable: bool = False
    ) -> _T:
        self._check_open()
        uses_second = self._writer.is_busy and not self._second_writer.is_busy
        connection = self._second_writer if uses_second else self._writer
        return await connection.run(work, is_repeatable=is_repeatable)

    async def _change(
        self,
        work: Callable[[Recorder], Awaitable[_T]],
        *,
        claims_as: str | None = None,
        has_gates: bool = False,
        is_repeatable: bool = False,
    ) -> _T:
        """Run `work` in a transaction; `LeaseLost` when `claims_as` names an owner without a lease."""

        async def change(db: Connection) -> _T:
            async with db.transaction():
                return await work(await self._begin(db, claims_as, has_gates=has_gates))

        return await self._write(change, is_repeatable=is_repeatable)

    async def _begin(self, db: Connection, claims_as: str | None, *, has_gates: bool) -> Recorder:
        now, has_lease = await db.fetchrow(
            self._names("SELECT * FROM {schema}.begin_changes($1, $2, $3, $4)"),
            claims_as,
            has_gates,
            self._given_now(),
            self._target.poll_only,
        )
        if claims_as is not None and not has_lease:
            raise LeaseLost(claims_as)
        return Recorder(db, self._names, now, self._encode_finish)

    # Enqueue

    async def _enqueue(self, rows: list[Row]) -> list[str]:
        if _have_records(rows):
            self._check_open()
            return await self._enqueue_batcher.add(rows)
        return await self._insert(rows, is_repeatable=False)

    async def _enqueue_all(self, rows: Iterator[Row]) -> list[str]:
        first = list(islice(rows, enqueue.PART_SIZE))
        if len(first) < enqueue.PART_SIZE:
            return await self._enqueue(first) if first else []
        batch = enqueue.LargeBatch(first, rows)
        try:
            return await self._write(
                lambda db: enqueue.enqueue_in_parts(
                    db,
                    self._names,
                    batch,
                    self._given_now(),
                    self._max_pending,
                    self._clock,
                    is_pooled=self._target.poll_only,
                )
            )
        except ReplyLost:
            if not _have_records(batch.all()):
                raise
            return await self._enqueue(batch.all())

    async def _insert(self, rows: list[Row], *, is_repeatable: bool) -> list[str]:
        return await self._write(
            lambda db: enqueue.enqueue(
                db,
                self._names,
                rows,
                self._given_now(),
                self._max_pending,
                is_pooled=self._target.poll_only,
            ),
            is_repeatable=is_repeatable,
        )

    async def _enqueue_within(self, connection: object, rows: list[Row]) -> list[str]:
        assert self._server is not None
        request = enqueue.request_text(
            self._server.store, rows, self._given_now(), self._max_pending
        )
        reply = await user_transaction.call_function(
            connection, self._names("{schema}.enqueue_text"), request
        )
        return enqueue.ids_from_reply(reply, self._max_pending) or [row.id for row in rows]

    # Record and claim

    async def _record_and_claim(
        self, owner: str, entries: list[Entry], claim: Claim | None
    ) -> tuple[list[bool], list[Row]]:
        is_repeat = claim is not None and claim.claim_id != ""
        if claim is not None and not is_repeat:
            self._claims_made += 1
            # Unique for this owner is enough; a sibling is the same owner.
            name = f"~{'t' if self._is_sibling else ''}{self._claims_made}"
            claim = msgspec.structs.replace(claim, claim_id=name)
        try:
            return await self._record_and_claim_once(owner, entries, claim, is_repeat=is_repeat)
        except ReplyLost:
            # The token shows whether an outcome was recorded, the claim's id what was claimed.
            return await self._record_and_claim_once(
                owner, entries, claim, is_repeat=True, is_resent=True
            )

    async def _record_and_claim_once(
        self,
        owner: str,
        entries: list[Entry],
        claim: Claim | None,
        *,
        is_repeat: bool,
        is_resent: bool = False,
    ) -> tuple[list[bool], list[Row]]:
        known = self._known_rows.of(owner)
        plan = record_and_claim.plan_outcomes(
            entries, known, self._clock.micros(), self._encode_finish
        )
        recorded = [True] * len(entries)
        if plan is None:
            recorded = await self._record_by_rules(owner, entries, claim, is_resent)
            plan = RecordPlan()
        rows: list[Row] = []
        if claim is not None or plan.ended or plan.changed:
            missed, rows = await self._call_fast_path(owner, plan, claim, is_repeat=is_repeat)
            if missed:
                left = [entry for entry in entries if entry.outcome.task_id in missed]
                answers = iter(await self._record_by_rules(owner, left, claim, is_resent))
                recorded = [
                    next(answers) if entry.outcome.task_id in missed else True for entry in entries
                ]
                if claim is not None:
                    _, rows = await self._call_fast_path(
                        owner, RecordPlan(), claim, is_repeat=is_repeat
                    )
        self._known_rows.update(owner, entries, rows)
        return recorded, rows

    async def _call_fast_path(
        self, owner: str, plan: RecordPlan, claim: Claim | None, *, is_repeat: bool
    ) -> tuple[frozenset[str], list[Row]]:
        """Record the plan and claim; returns the ids that did not match, and the claimed rows."""
        pooled = self._target.poll_only
        sql = self._names(
            record_and_claim.RECORD_AND_CLAIM_POOLED
            if pooled
            else record_and_claim.RECORD_AND_CLAIM
        )
        while True:
            if claim is not None:
                self._wakeups.claim_started(claim.queues)
            given = record_and_claim.parameters(
                owner, self._given_now(), plan, claim, is_repeat=is_repeat
            )
            records = await self._write(lambda db: db.fetch(sql, *given))  # noqa: B023
            reply = record_and_claim.read_reply(records, owner)
            if reply.state == record_and_claim.LEASE_LOST:
                raise LeaseLost(owner)
            if claim is None or reply.state == record_and_claim.OUTCOMES_NOT_MATCHED:
                return reply.missed, []
            if reply.state == record_and_claim.MORE_DUE:
                plan = RecordPlan()
                continue
            rows = reply.rows
            if reply.state == record_and_claim.CLAIM_NEEDS_RULES:
                rows = await self._claim_by_rules(owner, claim)
            self._vacuum.count_claims(len(rows))
            self._wakeups.claim_returned(
                is_full=len(rows) >= claim.limit, at=reply.at, next_due=reply.next_due
            )
            return frozenset(), rows

    async def _record_by_rules(
        self, owner: str, entries: list[Entry], claim: Claim | None, is_resent: bool
    ) -> list[bool]:
        known = self._known_rows.of(owner)
        rows = [known.get(entry.outcome.task_id) for entry in entries]
        return await self._change(
            lambda recorder: recorder.record(owner, entries, is_resent=is_resent),
            claims_as=None if claim is None else owner,
            has_gates=any(row is None or row.gates for row in rows),
        )

    async def _claim_by_rules(self, owner: str, claim: Claim) -> list[Row]:
        async def work(recorder: Recorder) -> Claimed:
            recorder.claim_id = claim.claim_id
            return await claim_by_rules(recorder, owner, claim)

        # One at a time: two would both see that the owner holds no suspect, and each take one.
        async with self._rule_claim_lock:
            while True:
                claimed = await self._change(work, claims_as=owner, has_gates=True)
                if claimed.expired:
                    self._local_wakeups.notify_results(claimed.expired)
                if not claimed.is_partial:
                    return claimed.rows

    @asynccontextmanager
    async def _transaction(
        self, owner: str, task_id: str, success: Callable[[], Entry], *, blocking: bool
    ) -> AsyncIterator[Any]:
        async with self._task_transactions.transaction(
            owner, success, blocking=blocking
        ) as connection:
            yield connection
        self._known_rows.remove(owner, task_id)

    # Leases

    async def _renew(self, info: WorkerInfo, lease: int) -> Renewal:
        is_first = self._identity.lease_until == 0
        sql = self._names(
            "SELECT renewal.*, (SELECT paused FROM {schema}.leases WHERE owner = $1) "
            "FROM {schema}.renew($1, $2, $3, $4, $5, $6) AS renewal"
        )
        given = (info.id, lease, encode_internal(info), is_first)
        is_renewed, ids, tokens, cancelled, paused = await self._write(
            lambda db: db.fetchrow(sql, *given, self._given_now(), self._given_lease_now()),
            is_repeatable=True,
        )
        if not is_renewed:
            raise LeaseLost(info.id)
        return queries.build_renewal(zip(ids, tokens, cancelled, strict=True), paused=bool(paused))

    async def _retire(self, owner: str) -> None:
        await self._change(
            lambda recorder: recovery.release_all(recorder, owner),
            has_gates=True,
            is_repeatable=True,
        )

    async def _give_back(self, max_crashes: int) -> list[GivenBack]:
        sql = self._names("SELECT {schema}.without_lease($1)")
        owners = await self._read(lambda db: db.fetchval(sql, self._given_lease_now()))
        given_back: list[GivenBack] = []
        for owner in owners:
            given_back += await self._change(
                lambda recorder, owner=owner: recovery.take_back(  # type: ignore[misc]
                    recorder, owner, self._given_lease_now(), max_crashes
                ),
                has_gates=True,
            )
        return given_back

    # Cancel

    async def _cancel(self, task_id: str, reason: str) -> bool:
        async def cancel(recorder: Recorder) -> bool:
            await recorder.load([task_id])
            row = recorder.live(task_id)
            if row is None:
                return False
            if row.owner is not None:
                row.cancel_requested = True
                recorder.change(row)
                await recorder.db.execute(
                    self._names("SELECT pg_notify('{channel}', $1)"), f"c{task_id}"
                )
            else:
                recorder.finish(row, row_rules.finish_cancelled(row, recorder.now, reason))
            await recorder.flush()
            return True

        return await self._change(cancel)

    # Waiting

    async def _wait_for_work(self, timeout: float) -> None:
        await self._wakeups.wait_for_work(timeout)

    async def wait_for_result(
        self, task_id: str, timeout: float | None = None
    ) -> TaskResult | None:
        self._check_open()
        async with self._wakeups.awaiting_result(task_id) as is_notified:
            self._longest_pause = _NOTIFIED_PAUSE if is_notified else BaseStorage._longest_pause
            return await super().wait_for_result(task_id, timeout)


def _have_records(rows: list[Row]) -> bool:
    """Whether a repeated enqueue can recognize by their records what the first call enqueued.

    A task without a record (`result_ttl` 0) may have run and been deleted meanwhile.
    """
    return all(row.result_ttl > 0 for row in rows)
