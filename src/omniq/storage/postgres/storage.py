"""Tasks in a PostgreSQL database that any number of machines share.

A worker's turn is one call of a function in the database (`sql/postgres/functions/4_turn.sql`).
Whatever needs a rule of its own goes through a slower transaction (`_postgres.ledger`), with the
rules of `_rows` and `_gates`. Leases go by the server's clock, unless the storage was given one.
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
from omniq.storage.enqueue_batcher import Enqueues
from omniq.storage.postgres import claim as claiming
from omniq.storage.postgres import enqueue as enqueueing
from omniq.storage.postgres import migrations, queries, recovery, user_transaction
from omniq.storage.postgres import record_and_claim as turning
from omniq.storage.postgres.connection import Connection, Indeterminate, Link, Target
from omniq.storage.postgres.record import Ledger
from omniq.storage.postgres.record_and_claim import KnownRows, Plan
from omniq.storage.postgres.server_check import Finding, report
from omniq.storage.postgres.side_data import Kept
from omniq.storage.postgres.statements import Names
from omniq.storage.postgres.task_transaction import Lending
from omniq.storage.postgres.vacuum import Tidying
from omniq.storage.postgres.wakeups import Wakeups
from omniq.storage.row_rules import Row
from omniq.storage.types import Capabilities, Claim, Entry, GivenBack, Renewal

_T = TypeVar("_T")

_PUSHED_PAUSE = 2.0
"""Seconds between two looks for a result whose end is pushed."""


class PostgresStorage(Kept):
    """A store in one schema of the database at `url`.

    `poll_only` is for a pooler that gives every transaction a different session (PgBouncer): nothing is
    prepared and nobody listens. `pool_size` bounds the connections for `transaction`; besides
    them there are at most five: two for turns, and one to read, to count and tidy, to listen.
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
        self._names = Names(schema)
        self._known_rows = KnownRows()
        self._server: migrations.Server | None = None
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

    def twin(self) -> PostgresStorage:
        twin = PostgresStorage(
            self._target.url,
            schema=self._target.schema,
            poll_only=self._target.poll_only,
            pool_size=self._pool_size,
            serializer=self._serializer,
            clock=self._clock,
            settings=self._settings,
            max_pending=self._max_pending,
        )
        twin._identity = self._identity
        twin._hints = self._hints
        twin._is_twin = True
        return twin

    # Opening and closing

    async def _open(self) -> None:
        self._pid = os.getpid()
        self._writer = Link(self._target, "writer")
        # For whoever finds the first one busy: a worker has two turns under way.
        self._second_writer = Link(self._target, "second writer")
        self._slow_claims = asyncio.Lock()
        self._reader = Link(self._target, "reader")
        # Counting takes longer than all else that is read, and must not hold that up.
        self._counter = Link(self._target, "counter")
        self._tidying = Tidying(self._counter, self._names, self._clock)
        self._lending = Lending(self._target, self._pool_size, self._begin, self._change)
        self._enqueues = Enqueues(partial(self._insert, is_repeatable=True))
        self._gather_questions()
        self._wakeups = Wakeups(self._target, self._hints, self._clock, self._given_now)
        try:
            await self._writer.open()
            self._server = await self._look()
            migrations.check(self._target, self._server.version)
        except BaseException:
            await self._writer.close()
            raise

    async def _look(self) -> migrations.Server:
        try:
            return await self._writer.run(self._look_on, is_repeatable=True)
        except StorageError as error:
            if not migrations.is_missing(error):
                raise
        await migrations.upgrade(self._target)
        return await self._writer.run(self._look_on, is_repeatable=True)

    async def _look_on(self, db: Connection) -> migrations.Server:
        return await migrations.look(db, self._names)

    async def close(self) -> None:
        if self._is_open and self._pid != os.getpid():
            # After a fork everything here is the parent's. It is left alone, and so is what it holds.
            self._is_open = False
            self._held.clear()
            self._claim_ids.clear()
            return
        await super().close()

    async def _close(self) -> None:
        self._known_rows = KnownRows()
        await self._wakeups.close()
        await self._lending.close()
        await self._tidying.close()
        # At once: each waits a little for a server that does not answer.
        links = (self._reader, self._counter, self._second_writer, self._writer)
        await asyncio.gather(*(link.close() for link in links))

    def _check_open(self) -> None:
        super()._check_open()
        if self._pid != os.getpid():
            raise StorageError(
                f"{self._target}: opened by process {self._pid}, and used in process "
                f"{os.getpid()} after a fork; open a storage of its own in each process"
            )

    # Its schema; the storage need not be open

    def schema_sql(self) -> str:
        """All SQL that sets up an empty database."""
        return migrations.sql(self._target.schema)

    async def check_schema(self) -> int:
        """The version of the schema; `StorageRefused` when it is not the one that is needed."""
        version = await migrations.read_version(self._target)
        migrations.check(self._target, version)
        return version

    async def upgrade_schema(self) -> tuple[int, int]:
        """Bring the schema to the newest version: the version before, and the one after."""
        return await migrations.upgrade(self._target), migrations.NEWEST

    async def server_report(self) -> list[Finding]:
        """What the server's settings promise: names, values, and "ok", "warn: …" or "bad: …"."""
        return await self._read(lambda db: report(db, self._clock.micros()))

    # Clocks: NULL is the server's own

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
        is_taken = self._writer.is_busy and not self._second_writer.is_busy
        link = self._second_writer if is_taken else self._writer
        return await link.run(work, is_repeatable=is_repeatable)

    async def _change(
        self,
        work: Callable[[Ledger], Awaitable[_T]],
        *,
        claims_as: str | None = None,
        has_gates: bool = False,
        is_repeatable: bool = False,
    ) -> _T:
        """Do it in a transaction; `LeaseLost` when `claims_as` names an owner without a lease."""

        async def change(db: Connection) -> _T:
            async with db.transaction():
                return await work(await self._begin(db, claims_as, has_gates=has_gates))

        return await self._write(change, is_repeatable=is_repeatable)

    async def _begin(self, db: Connection, claims_as: str | None, *, has_gates: bool) -> Ledger:
        now, has_lease = await db.fetchrow(
            self._names("SELECT * FROM {schema}.begin_changes($1, $2, $3, $4)"),
            claims_as,
            has_gates,
            self._given_now(),
            self._target.poll_only,
        )
        if claims_as is not None and not has_lease:
            raise LeaseLost(claims_as)
        return Ledger(db, self._names, now, self._encode_finish)

    # Enqueue

    async def _enqueue(self, rows: list[Row]) -> list[str]:
        if _keep_a_record(rows):
            self._check_open()
            return await self._enqueues.add(rows)
        return await self._insert(rows, is_repeatable=False)

    async def _enqueue_all(self, rows: Iterator[Row]) -> list[str]:
        made = list(islice(rows, enqueueing.PART))
        if len(made) < enqueueing.PART:
            return await self._enqueue(made) if made else []
        batch = enqueueing.Batch(made, rows)
        try:
            return await self._write(
                lambda db: enqueueing.enqueue_in_parts(
                    db,
                    self._names,
                    batch,
                    self._given_now(),
                    self._max_pending,
                    self._clock,
                    is_pooled=self._target.poll_only,
                )
            )
        except Indeterminate:
            if not _keep_a_record(batch.all()):
                raise
            return await self._enqueue(batch.all())

    async def _insert(self, rows: list[Row], *, is_repeatable: bool) -> list[str]:
        return await self._write(
            lambda db: enqueueing.enqueue(
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
        request = enqueueing.request_text(
            self._server.store, rows, self._given_now(), self._max_pending
        )
        answer = await user_transaction.call(
            connection, self._names("{schema}.enqueue_text"), request
        )
        return enqueueing.ids_of(answer, self._max_pending) or [row.id for row in rows]

    # Record and claim

    async def _turn(
        self, owner: str, entries: list[Entry], claim: Claim | None
    ) -> tuple[list[bool], list[Row]]:
        is_repeat = claim is not None and claim.claim_id != ""
        if claim is not None and not is_repeat:
            self._claims_made += 1
            # Unique for this owner is enough; a twin is the same owner.
            name = f"~{'t' if self._is_twin else ''}{self._claims_made}"
            claim = msgspec.structs.replace(claim, claim_id=name)
        try:
            return await self._turn_once(owner, entries, claim, is_repeat=is_repeat)
        except Indeterminate:
            # What was recorded is known by its token, what was claimed by the claim's id.
            return await self._turn_once(owner, entries, claim, is_repeat=True, is_resent=True)

    async def _turn_once(
        self,
        owner: str,
        entries: list[Entry],
        claim: Claim | None,
        *,
        is_repeat: bool,
        is_resent: bool = False,
    ) -> tuple[list[bool], list[Row]]:
        known = self._known_rows.of(owner)
        made = turning.plan(entries, known, self._clock.micros(), self._encode_finish)
        recorded = [True] * len(entries)
        if made is None:
            recorded = await self._record_slowly(owner, entries, claim, is_resent)
            made = Plan()
        rows: list[Row] = []
        if claim is not None or made.ended or made.changed:
            missed, rows = await self._take(owner, made, claim, is_repeat=is_repeat)
            if missed:
                late = [entry for entry in entries if entry.outcome.task_id in missed]
                answers = iter(await self._record_slowly(owner, late, claim, is_resent))
                recorded = [
                    next(answers) if entry.outcome.task_id in missed else True for entry in entries
                ]
                if claim is not None:
                    _, rows = await self._take(owner, Plan(), claim, is_repeat=is_repeat)
        self._known_rows.update(owner, entries, rows)
        return recorded, rows

    async def _take(
        self, owner: str, made: Plan, claim: Claim | None, *, is_repeat: bool
    ) -> tuple[frozenset[str], list[Row]]:
        """Record what is planned and claim; the ids of what did not match, and what was claimed."""
        while True:
            if claim is not None:
                self._wakeups.claim_begins(claim.queues)
            given = turning.parameters(owner, self._given_now(), made, claim, is_repeat=is_repeat)
            pooled = self._target.poll_only
            sql = self._names(turning.TURN_POOLED if pooled else turning.TURN)
            records = await self._write(lambda db: db.fetch(sql, *given))  # noqa: B023
            answer = turning.answer_of(records, owner)
            if answer.state == turning.LOST:
                raise LeaseLost(owner)
            if claim is None or answer.state == turning.MISSED:
                return answer.missed, []
            if answer.state == turning.PARTIAL:
                made = Plan()
                continue
            rows = answer.rows
            if answer.state == turning.SLOW:
                rows = await self._claim_slowly(owner, claim)
            self._tidying.claimed(len(rows))
            self._wakeups.claimed(
                is_full=len(rows) >= claim.limit, at=answer.at, next_due=answer.next_due
            )
            return frozenset(), rows

    async def _record_slowly(
        self, owner: str, entries: list[Entry], claim: Claim | None, is_resent: bool
    ) -> list[bool]:
        known = self._known_rows.of(owner)
        rows = [known.get(entry.outcome.task_id) for entry in entries]
        return await self._change(
            lambda ledger: ledger.record(owner, entries, is_resent=is_resent),
            claims_as=None if claim is None else owner,
            has_gates=any(row is None or row.gates for row in rows),
        )

    async def _claim_slowly(self, owner: str, claim: Claim) -> list[Row]:
        async def work(ledger: Ledger) -> claiming.Claimed:
            ledger.claim_id = claim.claim_id
            return await claiming.claim(ledger, owner, claim)

        # One at a time: two would each see no suspect in the owner's hands, and take one.
        async with self._slow_claims:
            while True:
                claimed = await self._change(work, claims_as=owner, has_gates=True)
                if claimed.expired:
                    self._hints.results(claimed.expired)
                if not claimed.is_partial:
                    return claimed.rows

    @asynccontextmanager
    async def _transaction(
        self, owner: str, task_id: str, success: Callable[[], Entry], *, blocking: bool
    ) -> AsyncIterator[Any]:
        async with self._lending.transaction(owner, success, blocking=blocking) as connection:
            yield connection
        self._known_rows.forget(owner, task_id)

    # Leases

    async def _renew(self, info: WorkerInfo, lease: int) -> Renewal:
        is_first = self._identity.trusted_until == 0
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
        return queries.renewal_of(zip(ids, tokens, cancelled, strict=True), paused=bool(paused))

    async def _retire(self, owner: str) -> None:
        await self._change(
            lambda ledger: recovery.release_all(ledger, owner), has_gates=True, is_repeatable=True
        )

    async def _give_back(self, max_crashes: int) -> list[GivenBack]:
        sql = self._names("SELECT {schema}.without_lease($1)")
        owners = await self._read(lambda db: db.fetchval(sql, self._given_lease_now()))
        given_back: list[GivenBack] = []
        for owner in owners:
            given_back += await self._change(
                lambda ledger, owner=owner: recovery.take_back(  # type: ignore[misc]
                    ledger, owner, self._given_lease_now(), max_crashes
                ),
                has_gates=True,
            )
        return given_back

    # Cancel

    async def _cancel(self, task_id: str, reason: str) -> bool:
        async def cancel(ledger: Ledger) -> bool:
            await ledger.load([task_id])
            row = ledger.live(task_id)
            if row is None:
                return False
            if row.owner is not None:
                row.cancel_requested = True
                ledger.change(row)
                await ledger.db.execute(
                    self._names("SELECT pg_notify('{channel}', $1)"), f"c{task_id}"
                )
            else:
                ledger.finish(row, row_rules.finish_cancelled(row, ledger.now, reason))
            await ledger.flush()
            return True

        return await self._change(cancel)

    # Waiting

    async def _wait_for_work(self, timeout: float) -> None:
        await self._wakeups.wait_for_work(timeout)

    async def wait_for_result(
        self, task_id: str, timeout: float | None = None
    ) -> TaskResult | None:
        self._check_open()
        async with self._wakeups.awaiting(task_id) as is_pushed:
            self._longest_pause = _PUSHED_PAUSE if is_pushed else BaseStorage._longest_pause
            return await super().wait_for_result(task_id, timeout)


def _keep_a_record(rows: list[Row]) -> bool:
    """Whether a repeat would know what the first call enqueued by what is on record of it.

    A task that keeps no record may have run and gone meanwhile.
    """
    return all(row.result_ttl > 0 for row in rows)
