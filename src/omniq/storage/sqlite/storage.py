"""Storage: tasks in one SQLite file that any number of processes on one machine share.

All writes go through one thread, which runs all waiting jobs in one transaction (`writer_thread`).
Reads have a separate thread and connection, so that reads and writes do not wait for each other.
Leases are in a second file (`leases`).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from omniq.clock import SYSTEM_CLOCK, Clock
from omniq.errors import LeaseLost, StaleClaim, StorageError
from omniq.failpoints import hit
from omniq.gate_rules import GateState
from omniq.models import (
    DeadLetter,
    Progress,
    QueueStats,
    Schedule,
    WorkerInfo,
)
from omniq.serialization import Serializer
from omniq.settings import Settings
from omniq.storage import row_rules
from omniq.storage.base import BaseStorage
from omniq.storage.inspection import DeadQuery, Scan, ScanQuery, TaskQuery
from omniq.storage.row_rules import FinishedRow, Row
from omniq.storage.sqlite import checkpoints, finished, leases, queries, recovery, tables
from omniq.storage.sqlite import enqueue as enqueueing
from omniq.storage.sqlite.claim import Claimed, claim_by_rules
from omniq.storage.sqlite.connection import Connection, Database
from omniq.storage.sqlite.record import KnownRows, Recorder, held_seq, read_gates
from omniq.storage.sqlite.scan import scan
from omniq.storage.sqlite.task_transaction import TaskTransactions
from omniq.storage.sqlite.user_transaction import enqueue_within
from omniq.storage.sqlite.wakeups import Wakeups
from omniq.storage.sqlite.writer_thread import ConnectionThread, WriterThread
from omniq.storage.types import Capabilities, Claim, Entry, GivenBack, Renewal

_T = TypeVar("_T")

_WAL_LIMIT = 4 * 1024 * 1024
_LEASES_WAL_LIMIT = 256 * 1024
_PURGE_BATCH = 500
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.025
"""Seconds between two polls for commits of other processes."""


class SQLiteStorage(BaseStorage):
    """A store in the file at `path`, with its leases in `<path>-leases`."""

    def __init__(
        self,
        path: Path | str,
        *,
        serializer: Serializer | None = None,
        clock: Clock = SYSTEM_CLOCK,
        settings: Settings | None = None,
        max_pending: int | None = None,
    ) -> None:
        super().__init__(
            serializer=serializer, clock=clock, settings=settings, max_pending=max_pending
        )
        self._path = Path(path)
        self._pid = 0
        self._version_at_claim = -1
        self._queues_claimed: tuple[str, ...] | None = None
        self._known_rows = KnownRows()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="sqlite",
            durability=self._settings.durability,
            reach="machine",
            transactions=True,
        )

    def sibling(self) -> SQLiteStorage:
        sibling = SQLiteStorage(
            self._path,
            serializer=self._serializer,
            clock=self._clock,
            settings=self._settings,
            max_pending=self._max_pending,
        )
        sibling._identity = self._identity
        sibling._local_wakeups = self._local_wakeups
        sibling._is_sibling = True
        return sibling

    async def _open(self) -> None:
        path = self._path.absolute()
        self._pid = os.getpid()
        self._database = Database(
            path,
            schema="schema",
            synchronous="FULL" if self._settings.durability == "power" else "NORMAL",
            wal_limit=_WAL_LIMIT,
            random=self._clock.random,
        )
        # A power cut ends every lease, so this database need not survive one.
        self._lease_database = Database(
            path.with_name(f"{path.name}-leases"),
            schema="leases",
            synchronous="NORMAL",
            wal_limit=_LEASES_WAL_LIMIT,
            random=self._clock.random,
        )
        self._writer = WriterThread("writer", self._database)
        self._leases = WriterThread("leases", self._lease_database)
        self._reader = ConnectionThread("reader", self._database, self._connect_reader)
        # Separate from the reader, because a count takes longer than other reads.
        self._counter = ConnectionThread("counter", self._database, self._connect_reader)
        self._task_transactions = TaskTransactions(self._database)
        try:
            self._database.create()
            self._lease_database.create()
            if not self._is_sibling:
                await self._writer.connect()
            await self._leases.connect()
            self._wakeups = Wakeups(self._database.connect(writes=False, any_thread=True))
        except BaseException:
            await self._writer.close()
            await self._leases.close()
            raise

    def _connect_reader(self) -> Connection:
        connection = self._database.connect(writes=False)
        connection.execute("ATTACH DATABASE ? AS leases", (str(self._lease_database.path),))
        return connection

    async def close(self) -> None:
        if self._is_open and self._pid != os.getpid():
            # After a fork the connections and claims are the parent's: neither is touched.
            self._is_open = False
            self._held.clear()
            self._claim_ids.clear()
            return
        if self._is_open:
            # Before any other write, because an open transaction blocks all writers.
            await self._task_transactions.close()
        await super().close()

    async def _close(self) -> None:
        self._known_rows = KnownRows()
        self._wakeups.close()
        await self._reader.close()
        await self._counter.close()
        await self._leases.close()
        await self._writer.close()

    def _check_open(self) -> None:
        super()._check_open()
        if self._pid != os.getpid():
            raise StorageError(
                f"SQLite database {self._path}: opened by process {self._pid}, and used in process "
                f"{os.getpid()} after a fork; open a separate storage in each process"
            )

    async def _write(self, work: Callable[[Connection], _T]) -> _T:
        self._check_open()
        return await self._writer.run(work)

    async def _read(self, work: Callable[[Connection], _T]) -> _T:
        self._check_open()
        return await self._reader.run(work)

    def _recorder(self, db: Connection) -> Recorder:
        return Recorder(db, self._clock.micros(), self._encode_finish)

    # Enqueue

    async def _enqueue(self, rows: list[Row]) -> list[str]:
        return await self._write(
            lambda db: enqueueing.enqueue(db, rows, self._clock.micros(), self._max_pending)
        )

    async def _enqueue_within(self, connection: object, rows: list[Row]) -> list[str]:
        return await enqueue_within(
            self._database,
            connection,
            lambda db: enqueueing.enqueue(db, rows, self._clock.micros(), self._max_pending),
        )

    # Record and claim

    async def _record_and_claim(
        self, owner: str, entries: list[Entry], claim: Claim | None
    ) -> tuple[list[bool], list[Row]]:
        if claim is not None:
            # Read before the claim, so that `_wait_for_work` notices what others add from now on.
            self._version_at_claim = self._wakeups.version()
            self._queues_claimed = claim.queues
        known = self._known_rows.of(owner, entries)
        recorded, claimed = await self._write(
            lambda db: self._record_and_claim_in(db, owner, entries, claim, known)
        )
        while claimed.is_partial:
            _, claimed = await self._write(
                lambda db: self._record_and_claim_in(db, owner, [], claim, {})
            )
        self._known_rows.update(owner, entries, claimed.rows)
        if claimed.expired:
            self._local_wakeups.notify_results(claimed.expired)
        return recorded, claimed.rows

    def _record_and_claim_in(
        self,
        db: Connection,
        owner: str,
        entries: list[Entry],
        request: Claim | None,
        known: dict[str, Row],
    ) -> tuple[list[bool], Claimed]:
        recorder = self._recorder(db)
        if request is not None and recovery.is_fenced(db, owner):
            raise LeaseLost(owner)
        recorded: list[bool] = []
        if entries:
            recorded = recorder.record(owner, entries, known)
            recorder.flush()
        return recorded, Claimed() if request is None else claim_by_rules(recorder, owner, request)

    @asynccontextmanager
    async def _transaction(
        self, owner: str, task_id: str, success: Callable[[], Entry], *, blocking: bool
    ) -> AsyncIterator[Connection]:
        entries: list[Entry] = []

        def record(db: Connection) -> None:
            token = entries[0].outcome.token
            if held_seq(db, owner, task_id, token) is None:
                raise StaleClaim(task_id, token)
            self._record_and_claim_in(db, owner, entries, None, {})

        def finish() -> Callable[[Connection], None]:
            entries.append(success())
            return record

        lease = self._identity.lease or self._settings.lease
        async with self._task_transactions.transaction(lease / 3, finish) as connection:
            yield connection
        self._known_rows.update(owner, entries, [])

    # Leases

    async def _renew(self, info: WorkerInfo, lease: int) -> Renewal:
        is_first = self._identity.lease_until == 0
        await self._leases.run(
            lambda db: leases.renew(db, info, lease, self._clock, is_first=is_first)
        )
        return await self._read(lambda db: queries.read_renewal(db, info.id))

    async def _retire(self, owner: str) -> None:
        await self._write(lambda db: recovery.release_all(self._recorder(db), owner))
        await self._leases.run(lambda db: leases.retire(db, owner, self._clock))

    async def _give_back(self, max_crashes: int) -> list[GivenBack]:
        holders, is_needed = await self._read(lambda db: recovery.check_leases(db, self._clock))
        if not is_needed:
            return []
        dead, fenced = await self._leases.run(
            lambda db: leases.fence_expired(db, holders, self._clock)
        )
        hit("sqlite.after_fence")
        owners = list(dict.fromkeys([*dead, *fenced]))
        if not owners:
            return []
        return await self._write(
            lambda db: recovery.take_back(self._recorder(db), owners, max_crashes)
        )

    # Cancel

    async def _cancel(self, task_id: str, reason: str) -> bool:
        return await self._write(lambda db: self._cancel_in(db, task_id, reason))

    def _cancel_in(self, db: Connection, task_id: str, reason: str) -> bool:
        recorder = self._recorder(db)
        recorder.load([task_id])
        row = recorder.live(task_id)
        if row is None:
            return False
        if row.owner is not None:
            row.cancel_requested = True
            recorder.change(row)
        else:
            recorder.finish(row, row_rules.finish_cancelled(row, recorder.now, reason))
        recorder.flush()
        return True

    # Waiting

    async def _wait_for_work(self, timeout: float) -> None:
        deadline = self._clock.monotonic() + timeout
        seen, pause = self._version_at_claim, _FIRST_PAUSE
        next_due = self._wakeups.next_due()
        with self._local_wakeups.listen_for_work() as notified:
            while True:
                version = self._wakeups.version()
                if version != seen:
                    seen = version
                    if self._wakeups.has_work(self._queues_claimed):
                        return
                    next_due = self._wakeups.next_due()
                remaining = deadline - self._clock.monotonic()
                if next_due is not None:
                    remaining = min(remaining, (next_due - self._clock.micros()) / 1_000_000)
                if remaining <= 0 or await self._clock.wait(notified, min(pause, remaining)):
                    return
                pause = min(pause * 1.3, _LONGEST_PAUSE)

    # Retention

    async def _purge_results(self, before: int) -> int:
        return await self._purge_finished("finished_at < ?", before)

    async def _purge_expired(self) -> int:
        return await self._purge_finished("expires_at <= ?", self._clock.micros())

    async def _purge_finished(self, condition: str, instant: int) -> int:
        old = await self._read(lambda db: finished.find(db, "omniq_finished", condition, instant))
        return await self._in_parts(
            old, lambda db, seqs: finished.purge(db, seqs, condition, instant)
        )

    async def _in_parts(self, seqs: list[int], work: Callable[[Connection, list[int]], int]) -> int:
        """Run `work` in short transactions, so that other writers can run in between."""
        done = 0
        for start in range(0, len(seqs), _PURGE_BATCH):
            part = seqs[start : start + _PURGE_BATCH]
            done += await self._write(lambda db, part=part: work(db, part))  # type: ignore[misc]
        return done

    # Dead letters

    async def _retry_dead(self, task_id: str, body: bytes | None, from_start: bool) -> bool:
        return await self._write(
            lambda db: enqueueing.retry_dead(
                db,
                task_id,
                self._clock.micros(),
                body=body,
                from_start=from_start,
                max_pending=self._max_pending,
            )
        )

    async def _delete_task(self, task_id: str) -> bool:
        condition = "seq = (SELECT seq FROM omniq_tasks WHERE id = ?)"

        def delete(db: Connection) -> bool:
            seqs = finished.find(db, "omniq_finished", condition, task_id)
            return finished.purge(db, seqs, "expires_at > ?", self._clock.micros()) == 1

        return await self._write(delete)

    async def delete_dead(self, task_id: str) -> bool:
        def delete(db: Connection) -> bool:
            return finished.delete_dead(db, finished.find(db, "omniq_dead", "id = ?", task_id)) == 1

        return await self._write(delete)

    async def _purge_dead(self, before: int) -> int:
        old = await self._read(
            lambda db: finished.find(db, "omniq_dead", "last_failure < ?", before)
        )
        return await self._in_parts(old, partial(finished.delete_dead, before=before))

    async def _list_dead(self, query: DeadQuery) -> list[DeadLetter]:
        return await self._read(lambda db: queries.list_dead(db, query))

    async def get_dead(self, task_id: str) -> DeadLetter | None:
        return await self._read(lambda db: queries.read_dead(db, task_id))

    # Checkpoints and progress

    async def _save_checkpoint(
        self, owner: str, task_id: str, token: int, checkpoint: bytes
    ) -> bool:
        return await self._write(
            lambda db: checkpoints.save_checkpoint(
                db, owner, task_id, token, checkpoint, self._clock.micros()
            )
        )

    async def load_checkpoint(self, task_id: str) -> bytes | None:
        return await self._read(lambda db: queries.read_checkpoint(db, task_id))

    async def _purge_checkpoints(self, before: int) -> int:
        return await self._write(lambda db: checkpoints.purge_checkpoints(db, before))

    async def _report_progress(self, owner: str, reports: Sequence[Progress]) -> None:
        await self._write(lambda db: checkpoints.report_progress(db, owner, reports))

    async def get_progress(self, task_id: str) -> Progress | None:
        return await self._read(lambda db: queries.read_progress(db, task_id))

    # Schedules

    async def _put_schedule(self, schedule: Schedule) -> None:
        def put(db: Connection) -> None:
            known = queries.read_version(db, schedule.id)
            version = schedule.version if known is None else known + 1
            queries.write_schedule(db, self._serializer, schedule, version)

        await self._write(put)

    async def get_schedule(self, schedule_id: str) -> Schedule | None:
        return await self._read(
            lambda db: next(queries.read_schedules(db, self._serializer, schedule_id), None)
        )

    async def list_schedules(self) -> list[Schedule]:
        return await self._read(lambda db: list(queries.read_schedules(db, self._serializer)))

    async def delete_schedule(self, schedule_id: str) -> bool:
        sql = "DELETE FROM omniq_schedules WHERE id = ?"
        return await self._write(lambda db: db.execute(sql, (schedule_id,)).rowcount == 1)

    async def _fire_schedule(self, schedule: Schedule, advanced: Schedule, row: Row | None) -> bool:
        def fire(db: Connection) -> bool:
            version = queries.read_version(db, schedule.id)
            if version is None or version != schedule.version:
                return False
            if row is not None:
                enqueueing.enqueue_unless_duplicate(
                    db, row, self._clock.micros(), self._max_pending
                )
            queries.write_schedule(db, self._serializer, advanced, version + 1)
            return True

        return await self._write(fire)

    # Queues and gates

    async def _set_paused(self, queue: str, paused: bool) -> None:
        sql = (
            "INSERT OR IGNORE INTO omniq_paused VALUES (?)"
            if paused
            else "DELETE FROM omniq_paused WHERE queue = ?"
        )
        await self._write(lambda db: db.execute(sql, (queue,)).rowcount)

    async def _set_worker_paused(self, owner: str, paused: bool) -> bool:
        return await self._leases.run(
            lambda db: leases.set_paused(db, owner, self._clock, paused=paused)
        )

    async def paused_queues(self) -> frozenset[str]:
        sql = "SELECT json_group_array(queue) FROM omniq_paused"
        return frozenset(await self._read(lambda db: tables.read_array(db, sql)))

    async def gates(self) -> dict[str, GateState]:
        return await self._read(read_gates)

    # Reading

    async def _find(self, task_id: str) -> Row | FinishedRow | None:
        return await self._read(lambda db: tables.read_record(db, task_id, self._clock.micros()))

    async def _find_dead_row(self, task_id: str) -> Row | None:
        return await self._read(lambda db: queries.read_dead_row(db, task_id, self._clock.micros()))

    async def _find_newest_result(self, task_id: str) -> bytes | None:
        return await self._read(lambda db: queries.read_newest(db, task_id))

    async def _list(self, query: TaskQuery) -> list[Row]:
        return await self._read(lambda db: queries.list_rows(db, query, self._clock.micros()))

    async def _scan(self, query: ScanQuery) -> Scan:
        return await self._read(lambda db: scan(db, query, self._clock.micros()))

    async def stats(self) -> QueueStats:
        self._check_open()
        return await self._counter.run(lambda db: queries.read_stats(db, self._clock.micros()))

    async def count_waiting(self) -> int:
        return await self._read(queries.count_waiting)

    async def workers(self) -> list[WorkerInfo]:
        return await self._read(lambda db: queries.read_workers(db, self._clock))

    async def held_by(self, owner: str) -> dict[str, int]:
        return (await self._read(lambda db: queries.read_renewal(db, owner))).held
