"""Queries: the statements of readers, each of them a single statement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from omniq.errors import SerializationError
from omniq.gate_rules import GateState
from omniq.models import DeadLetter, Progress, QueueStats, Schedule, TaskStatus, WorkerInfo
from omniq.serialization import Serializer, encode_internal, internal_decoder
from omniq.storage.inspection import DeadQuery, TaskQuery, queue_stats
from omniq.storage.postgres import encoding
from omniq.storage.postgres.connection import Connection
from omniq.storage.postgres.record import decode_gate
from omniq.storage.postgres.statements import SchemaNames
from omniq.storage.row_rules import FinishedRow, Row
from omniq.storage.types import Renewal

_decode_letter = internal_decoder(DeadLetter)
_decode_progress = internal_decoder(Progress)
_decode_schedule = internal_decoder(Schedule)
decode_info = internal_decoder(WorkerInfo)


Record = Row | FinishedRow


async def find_records(
    db: Connection, names: SchemaNames, task_ids: list[str], now: int | None
) -> dict[str, Record]:
    """The records of these tasks, live or finished, without the expired ones."""
    sql = names(
        f"SELECT {encoding.LIVE_COLUMNS}, NULL::bigint, NULL::bigint, NULL::bytea AS result "
        "FROM {schema}.live WHERE id = ANY ($1) "
        f"UNION ALL SELECT {encoding.ENDED_COLUMNS}, finished_at, expires_at, result "
        "FROM {schema}.finished WHERE id = ANY ($1) AND expires_at > (SELECT {schema}.micros($2))"
    )
    found = map(_read_record, await db.fetch(sql, task_ids, now))
    return {(each.row if isinstance(each, FinishedRow) else each).id: each for each in found}


def _read_record(columns: Sequence[Any]) -> Record:
    *_, finished_at, expires_at, result = columns
    row = encoding.stored_row(columns).row
    if result is None:
        return row
    return FinishedRow(row=row, finished_at=finished_at, expires_at=expires_at, result=result)


async def list_rows(
    db: Connection, names: SchemaNames, query: TaskQuery, now: int | None
) -> list[Row]:
    """A page of tasks, live and finished together, in id order."""
    wanted = (
        "id > $1 AND ($2::smallint IS NULL OR status = $2) AND ($3::text IS NULL OR queue = $3) "
        "AND ($4::text IS NULL OR func_path = $4)"
    )
    sql = names(
        f"(SELECT {encoding.LIVE_COLUMNS} FROM {{schema}}.live WHERE {wanted} ORDER BY id LIMIT $5) "
        f"UNION ALL (SELECT {encoding.ENDED_COLUMNS} FROM {{schema}}.finished "
        f"WHERE {wanted} AND expires_at > (SELECT {{schema}}.micros($6)) ORDER BY id LIMIT $5) "
        "ORDER BY id LIMIT $5"
    )
    status = None if query.status is None else encoding.STATUS_NUMBERS[query.status]
    found = await db.fetch(sql, query.after, status, query.queue, query.func_path, query.limit, now)
    return [encoding.stored_row(record).row for record in found]


async def count_waiting(db: Connection, names: SchemaNames) -> int:
    """The number of live tasks that are not running."""
    sql = (
        "SELECT (SELECT count(*) FROM {schema}.live) - "
        "(SELECT count(*) FROM {schema}.live WHERE place = 4 AND status = 1)"
    )
    waiting: int = await db.fetchval(names(sql))
    return waiting


async def read_stats(db: Connection, names: SchemaNames, given_now: int | None) -> QueueStats:
    """Counts of tasks by status and queue, and the age of the oldest due task of each queue."""
    by_status = dict.fromkeys(TaskStatus, 0)
    by_queue: dict[str, int] = {}
    dead = 0
    found = await db.fetch(names.file("stats"), given_now)
    now = found[0]["due"]
    oldest: dict[str, int] = {}
    for kind, status, queue, count, due in found[1:]:
        if kind == "dead":
            dead = count
            continue
        by_status[encoding.STATUSES[status]] += count
        if kind == "live":
            by_queue[queue] = by_queue.get(queue, 0) + count
            if due is not None:
                oldest[queue] = min(due, oldest.get(queue, due))
    return queue_stats(by_status, by_queue, oldest, now=now, dead=dead)


def build_renewal(
    found: Sequence[tuple[str, int, bool]] | Iterable[Any], *, paused: bool
) -> Renewal:
    """Build the renewal from the id, token and cancel flag of each task that the owner holds."""
    held = list(found)
    return Renewal(
        {task_id: token for task_id, token, _ in held},
        frozenset(task_id for task_id, _, is_cancelled in held if is_cancelled),
        paused,
    )


async def read_held(db: Connection, names: SchemaNames, owner: str) -> dict[str, int]:
    """The claims of an owner: task id to token."""
    sql = "SELECT id, token FROM {schema}.live WHERE place = 4 AND owner = $1"
    return dict(await db.fetch(names(sql), owner))


async def read_workers(
    db: Connection, names: SchemaNames, lease_now: int | None
) -> list[WorkerInfo]:
    """Workers with a valid lease, each with the ids of the tasks it holds."""
    sql = (
        "SELECT info, paused, array(SELECT id FROM {schema}.live WHERE place = 4 "
        "AND live.owner = leases.owner ORDER BY id) FROM {schema}.leases "
        "WHERE NOT fenced AND until > (SELECT {schema}.micros($1)) ORDER BY owner"
    )
    return [
        msgspec.structs.replace(decode_info(info), running=tuple(running), paused=paused)
        for info, paused, running in await db.fetch(names(sql), lease_now)
    ]


async def read_gates(db: Connection, names: SchemaNames) -> dict[str, GateState]:
    """The state of every gate that was ever used."""
    found = await db.fetch(names("SELECT key, state FROM {schema}.gates"))
    return {key: decode_gate(state) for key, state in found}


# Dead letters, progress


async def list_dead(db: Connection, names: SchemaNames, query: DeadQuery) -> list[DeadLetter]:
    """A page of dead letters in id order."""
    sql = (
        "SELECT letter FROM {schema}.dead WHERE id > $1 AND ($2::text IS NULL OR func_path = $2) "
        "AND ($3::text IS NULL OR reason = $3) ORDER BY id LIMIT $4"
    )
    found = await db.fetch(names(sql), query.after, query.func_path, query.reason, query.limit)
    return [_decode_letter(letter) for (letter,) in found]


async def read_dead(
    db: Connection, names: SchemaNames, task_ids: list[str]
) -> dict[str, DeadLetter]:
    """Dead letters with their checkpoints."""
    sql = (
        "SELECT id, letter, checkpoint FROM {schema}.dead "
        "LEFT JOIN {schema}.checkpoints USING (id) WHERE id = ANY ($1)"
    )
    return {
        task_id: msgspec.structs.replace(_decode_letter(letter), checkpoint=checkpoint)
        for task_id, letter, checkpoint in await db.fetch(names(sql), task_ids)
    }


async def read_checkpoints(
    db: Connection, names: SchemaNames, task_ids: list[str]
) -> dict[str, bytes]:
    """The checkpoints of these tasks."""
    sql = "SELECT id, checkpoint FROM {schema}.checkpoints WHERE id = ANY ($1)"
    return dict(await db.fetch(names(sql), task_ids))


async def read_dead_row(db: Connection, names: SchemaNames, task_id: str) -> Row | None:
    """The row that is stored with a dead letter for its retry."""
    sql = f"SELECT {encoding.ENDED_COLUMNS} FROM {{schema}}.dead WHERE id = $1"
    found = await db.fetchrow(names(sql), task_id)
    return None if found is None else encoding.stored_row(found).row


async def read_progress(
    db: Connection, names: SchemaNames, task_ids: list[str]
) -> dict[str, Progress]:
    """The latest progress reports of these tasks."""
    sql = "SELECT id, report FROM {schema}.progress WHERE id = ANY ($1)"
    found = await db.fetch(names(sql), task_ids)
    return {task_id: _decode_progress(report) for task_id, report in found}


# Schedules


async def read_schedules(
    db: Connection, names: SchemaNames, serializer: Serializer, schedule_id: str | None = None
) -> list[Schedule]:
    """All schedules in id order, or the one with that id."""
    sql = (
        "SELECT version, schedule, task FROM {schema}.schedules "
        "WHERE $1::text IS NULL OR id = $1 ORDER BY id"
    )
    found = []
    for version, schedule, task in await db.fetch(names(sql), schedule_id):
        # In a list, a schedule that cannot be decoded is skipped; read by its id, it raises.
        with suppress(*(() if schedule_id else (SerializationError,))):
            found.append(
                msgspec.structs.replace(
                    _decode_schedule(schedule), task=serializer.decode_task(task), version=version
                )
            )
    return found


def schedule_columns(serializer: Serializer, schedule: Schedule) -> tuple[str, bytes, bytes]:
    """The values of the columns `id`, `schedule` and `task`."""
    # Arguments and metadata are user data: only the serializer may encode them.
    bare = msgspec.structs.replace(schedule.task, args=(), kwargs={}, metadata={})
    return (
        schedule.id,
        encode_internal(msgspec.structs.replace(schedule, task=bare)),
        serializer.encode_task(schedule.task),
    )
