"""Side data: results, dead letters, checkpoints, progress, schedules and pauses, and their readers.

The second half of the storage class; `storage` has the first: enqueue, claim and record.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from omniq.gate_rules import GateState
from omniq.models import DeadLetter, Progress, QueueStats, Schedule, WorkerInfo
from omniq.serialization import encode_internal
from omniq.storage.base import BaseStorage
from omniq.storage.inspection import DeadQuery, Scan, ScanQuery, TaskQuery
from omniq.storage.newest_by_id import scan_by_id
from omniq.storage.postgres import encoding, queries
from omniq.storage.postgres.connection import Connection
from omniq.storage.postgres.enqueue import enqueue_unless_duplicate, retry_dead
from omniq.storage.postgres.read_batcher import ReadBatcher
from omniq.storage.postgres.record import NOTIFY_WORK, Recorder
from omniq.storage.postgres.scan import read_backwards
from omniq.storage.postgres.statements import SchemaNames
from omniq.storage.row_rules import FinishedRow, Row

_T = TypeVar("_T")

_PURGE_BATCH = 5_000


class PostgresSideData(BaseStorage):
    """Everything but the queue itself: what tasks leave behind, and what operators and readers use."""

    _names: SchemaNames

    def _create_read_batchers(self) -> None:
        """Batch the reads of single tasks from now on, on this event loop."""
        names = self._names
        self._records: ReadBatcher[queries.Record] = ReadBatcher(
            lambda ids: self._read(
                lambda db: queries.find_records(db, names, ids, self._given_now())
            )
        )
        self._dead: ReadBatcher[DeadLetter] = ReadBatcher(
            lambda ids: self._read(lambda db: queries.read_dead(db, names, ids))
        )
        self._checkpoints: ReadBatcher[bytes] = ReadBatcher(
            lambda ids: self._read(lambda db: queries.read_checkpoints(db, names, ids))
        )
        self._progress: ReadBatcher[Progress] = ReadBatcher(
            lambda ids: self._read(lambda db: queries.read_progress(db, names, ids))
        )

    @abstractmethod
    async def _read(self, work: Callable[[Connection], Awaitable[_T]]) -> _T: ...

    @abstractmethod
    async def _count(self, work: Callable[[Connection], Awaitable[_T]]) -> _T: ...

    @abstractmethod
    async def _write(
        self, work: Callable[[Connection], Awaitable[_T]], *, is_repeatable: bool = False
    ) -> _T: ...

    @abstractmethod
    async def _change(
        self,
        work: Callable[[Recorder], Awaitable[_T]],
        *,
        claims_as: str | None = None,
        has_gates: bool = False,
        is_repeatable: bool = False,
    ) -> _T: ...

    @abstractmethod
    def _given_now(self) -> int | None: ...

    @abstractmethod
    def _given_lease_now(self) -> int | None: ...

    # Retention

    async def _purge_results(self, before: int) -> int:
        purged, after = 0, ""
        while True:
            sql = (
                "DELETE FROM {schema}.finished WHERE finished_at < $1 AND id = ANY (array("
                "SELECT id FROM {schema}.finished WHERE id > $2 AND finished_at < $1 "
                "ORDER BY id LIMIT $3)) RETURNING id"
            )
            deleted = await self._fetch(sql, before, after, _PURGE_BATCH)
            purged += len(deleted)
            if len(deleted) < _PURGE_BATCH:
                return purged
            after = max(deleted)

    async def _purge_expired(self) -> int:
        purged = 0
        while True:
            sql = (
                "DELETE FROM {schema}.finished WHERE id = ANY (array(SELECT id "
                "FROM {schema}.finished WHERE expires_at <= (SELECT {schema}.micros($1)) "
                "ORDER BY expires_at LIMIT $2)) RETURNING id"
            )
            deleted = await self._fetch(sql, self._given_now(), _PURGE_BATCH)
            purged += len(deleted)
            if len(deleted) < _PURGE_BATCH:
                return purged

    async def _delete_task(self, task_id: str) -> bool:
        sql = (
            "DELETE FROM {schema}.finished WHERE id = $1 "
            "AND expires_at > (SELECT {schema}.micros($2)) RETURNING id"
        )
        return await self._fetch(sql, task_id, self._given_now()) != []

    async def _fetch(self, sql: str, *parameters: Any) -> list[str]:
        found = await self._write(lambda db: db.fetch(self._names(sql), *parameters))
        return [task_id for (task_id,) in found]

    # Dead letters

    async def _retry_dead(self, task_id: str, body: bytes | None, from_start: bool) -> bool:
        return await self._change(
            lambda recorder: retry_dead(
                recorder, task_id, body=body, from_start=from_start, max_pending=self._max_pending
            )
        )

    async def delete_dead(self, task_id: str) -> bool:
        return await self._delete_dead_where("id = $1", task_id) == 1

    async def _purge_dead(self, before: int) -> int:
        return await self._delete_dead_where("last_failure < $1", before)

    async def _delete_dead_where(self, condition: str, parameter: int | str) -> int:
        """Delete dead letters and their checkpoints; returns the number of dead letters."""
        sql = self._names(
            f"WITH deleted AS (DELETE FROM {{schema}}.dead WHERE {condition} RETURNING id), "
            "without_checkpoints AS (DELETE FROM {schema}.checkpoints USING deleted "
            "WHERE checkpoints.id = deleted.id) SELECT count(*) FROM deleted"
        )
        return await self._write(lambda db: db.fetchval(sql, parameter))

    async def _list_dead(self, query: DeadQuery) -> list[DeadLetter]:
        return await self._read(lambda db: queries.list_dead(db, self._names, query))

    async def get_dead(self, task_id: str) -> DeadLetter | None:
        self._check_open()
        return await self._dead.get(task_id)

    # Checkpoints and progress

    async def _save_checkpoint(
        self, owner: str, task_id: str, token: int, checkpoint: bytes
    ) -> bool:
        sql = self._names(
            "WITH held AS (UPDATE {schema}.live SET attached = true "
            "WHERE id = $1 AND owner = $2 AND token = $3 RETURNING id) "
            "INSERT INTO {schema}.checkpoints SELECT id, {schema}.micros($4), $5 FROM held "
            "ON CONFLICT (id) DO UPDATE SET saved_at = excluded.saved_at, "
            "checkpoint = excluded.checkpoint RETURNING true"
        )
        saved = await self._write(
            lambda db: db.fetchval(sql, task_id, owner, token, self._given_now(), checkpoint),
            is_repeatable=True,
        )
        return saved is not None

    async def load_checkpoint(self, task_id: str) -> bytes | None:
        self._check_open()
        return await self._checkpoints.get(task_id)

    async def _purge_checkpoints(self, before: int) -> int:
        sql = (
            "DELETE FROM {schema}.checkpoints AS old WHERE saved_at < $1 "
            "AND NOT EXISTS (SELECT FROM {schema}.live WHERE live.id = old.id) "
            "AND NOT EXISTS (SELECT FROM {schema}.dead WHERE dead.id = old.id) RETURNING id"
        )
        return len(await self._fetch(sql, before))

    async def _report_progress(self, owner: str, reports: Sequence[Progress]) -> None:
        sql = self._names(
            "WITH held AS (UPDATE {schema}.live SET attached = true "
            "FROM unnest($2::text[], $3::bigint[], $4::bytea[]) AS given (id, token, report) "
            "WHERE live.id = given.id AND live.owner = $1 AND live.token = given.token "
            "RETURNING live.id, given.report) "
            "INSERT INTO {schema}.progress SELECT id, report FROM held "
            "ON CONFLICT (id) DO UPDATE SET report = excluded.report"
        )
        # Of several reports of one claim only the last one is stored.
        newest = {(each.task_id, each.token): each for each in reports}
        lines = [(*claim, encode_internal(each)) for claim, each in newest.items()]
        await self._write(
            lambda db: db.execute(sql, owner, *encoding.to_columns(lines, 3)), is_repeatable=True
        )

    async def get_progress(self, task_id: str) -> Progress | None:
        self._check_open()
        return await self._progress.get(task_id)

    # Schedules

    async def _put_schedule(self, schedule: Schedule) -> None:
        sql = self._names(
            "INSERT INTO {schema}.schedules AS known (id, schedule, task, version) "
            "VALUES ($1, $2, $3, $4) ON CONFLICT (id) DO UPDATE SET version = known.version + 1, "
            "schedule = excluded.schedule, task = excluded.task"
        )
        columns = queries.schedule_columns(self._serializer, schedule)
        await self._write(lambda db: db.execute(sql, *columns, schedule.version))

    async def get_schedule(self, schedule_id: str) -> Schedule | None:
        found = await self._read(
            lambda db: queries.read_schedules(db, self._names, self._serializer, schedule_id)
        )
        return found[0] if found else None

    async def list_schedules(self) -> list[Schedule]:
        return await self._read(
            lambda db: queries.read_schedules(db, self._names, self._serializer)
        )

    async def delete_schedule(self, schedule_id: str) -> bool:
        sql = "DELETE FROM {schema}.schedules WHERE id = $1 RETURNING id"
        return len(await self._fetch(sql, schedule_id)) == 1

    async def _fire_schedule(self, schedule: Schedule, advanced: Schedule, row: Row | None) -> bool:
        columns = queries.schedule_columns(self._serializer, advanced)

        async def fire(recorder: Recorder) -> bool:
            sql = (
                "UPDATE {schema}.schedules SET version = version + 1, schedule = $2, task = $3 "
                "WHERE id = $1 AND version = $4 RETURNING true"
            )
            if not await recorder.db.fetchval(self._names(sql), *columns, schedule.version):
                return False
            if row is not None:
                await enqueue_unless_duplicate(recorder, row, self._max_pending)
            return True

        return await self._change(fire)

    # Queues and gates

    async def _set_paused(self, queue: str, paused: bool) -> None:
        sql = (
            "INSERT INTO {schema}.paused VALUES ($1) ON CONFLICT (queue) DO NOTHING RETURNING queue"
            if paused
            else "DELETE FROM {schema}.paused WHERE queue = $1 RETURNING queue"
        )
        await self._fetch(sql, queue)
        if not paused:
            await self._write(lambda db: db.execute(self._names(NOTIFY_WORK)))

    async def paused_queues(self) -> frozenset[str]:
        sql = self._names("SELECT queue FROM {schema}.paused")
        return frozenset([queue for (queue,) in await self._read(lambda db: db.fetch(sql))])

    async def gates(self) -> dict[str, GateState]:
        return await self._read(lambda db: queries.read_gates(db, self._names))

    # Reading

    async def _find(self, task_id: str) -> Row | FinishedRow | None:
        self._check_open()
        return await self._records.get(task_id)

    async def _find_dead_row(self, task_id: str) -> Row | None:
        return await self._read(lambda db: queries.read_dead_row(db, self._names, task_id))

    async def _find_newest_result(self, task_id: str) -> bytes | None:
        sql = self._names("SELECT result FROM {schema}.newest WHERE id = $1")
        return await self._read(lambda db: db.fetchval(sql, task_id))

    async def _list(self, query: TaskQuery) -> list[Row]:
        return await self._read(
            lambda db: queries.list_rows(db, self._names, query, self._given_now())
        )

    async def _scan(self, query: ScanQuery) -> Scan:
        async def read_older(before: str, limit: int) -> tuple[list[Row], str | None]:
            return await self._read(
                lambda db: read_backwards(db, self._names, query, before, limit, self._given_now())
            )

        return await scan_by_id(query, read_older, self._list)

    async def stats(self) -> QueueStats:
        return await self._count(lambda db: queries.read_stats(db, self._names, self._given_now()))

    async def count_waiting(self) -> int:
        return await self._read(lambda db: queries.count_waiting(db, self._names))

    async def workers(self) -> list[WorkerInfo]:
        return await self._read(
            lambda db: queries.read_workers(db, self._names, self._given_lease_now())
        )

    async def _set_worker_paused(self, owner: str, paused: bool) -> bool:
        sql = (
            "UPDATE {schema}.leases SET paused = $2 WHERE owner = $1 AND NOT fenced "
            "AND until > (SELECT {schema}.micros($3)) RETURNING owner"
        )
        return await self._fetch(sql, owner, paused, self._given_lease_now()) != []

    async def held_by(self, owner: str) -> dict[str, int]:
        return await self._read(lambda db: queries.read_held(db, self._names, owner))
