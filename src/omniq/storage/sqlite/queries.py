"""Queries: the statements of readers, each call inside one read transaction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec

from omniq.clock import Clock
from omniq.errors import SerializationError
from omniq.models import DeadLetter, Progress, QueueStats, Schedule, TaskStatus, WorkerInfo
from omniq.serialization import Serializer, encode_internal, internal_decoder
from omniq.storage.inspection import DeadQuery, TaskQuery, queue_stats
from omniq.storage.row_rules import Row
from omniq.storage.sqlite import leases, tables
from omniq.storage.sqlite.connection import Connection, statement
from omniq.storage.types import Renewal

_decode_letter = internal_decoder(DeadLetter)
_decode_progress = internal_decoder(Progress)
_decode_schedule = internal_decoder(Schedule)


def list_rows(db: Connection, query: TaskQuery, now: int) -> list[Row]:
    """A page of tasks in id order."""
    parameters = {**msgspec.structs.asdict(query), "now": now}
    if query.status is not None:
        parameters["status"] = query.status.value
    sql = tables.rows_statement("list_tasks", union=True)
    return [stored.row for stored in tables.read_rows(db, sql, parameters)]


def read_newest(db: Connection, task_id: str) -> bytes | None:
    """The newest result of a task that repeats."""
    result: bytes | None = _scalar(
        db,
        "SELECT newest.result FROM omniq_newest AS newest "
        "JOIN omniq_tasks AS tasks ON tasks.seq = newest.seq WHERE tasks.id = ?",
        task_id,
    )
    return result


def count_waiting(db: Connection) -> int:
    """The number of live tasks that are not running."""
    (waiting,) = db.execute(
        "SELECT (SELECT count(*) FROM omniq_live) - "
        "(SELECT count(*) FROM omniq_live WHERE place = 4 AND status = 'running')"
    ).fetchone()
    return int(waiting)


def read_stats(db: Connection, now: int) -> QueueStats:
    """Counts of tasks by status and queue, and the age of the oldest due task of each queue."""
    by_status = dict.fromkeys(TaskStatus, 0)
    by_queue: dict[str, int] = {}
    oldest: dict[str, int] = {}
    for status, queue, count, due in db.execute(
        "SELECT status, queue, count(*), min(CASE WHEN place <> 4 THEN due END) "
        "FROM omniq_live GROUP BY status, queue"
    ):
        by_status[TaskStatus(status)] += count
        by_queue[queue] = by_queue.get(queue, 0) + count
        if due is not None:
            oldest[queue] = min(due, oldest.get(queue, due))
    for status, count in db.execute(
        "SELECT status, count(*) FROM omniq_finished WHERE expires_at > ? GROUP BY status", (now,)
    ):
        by_status[TaskStatus(status)] += count
    (dead,) = db.execute("SELECT count(*) FROM omniq_dead").fetchone()
    return queue_stats(by_status, by_queue, oldest, now=now, dead=dead)


def read_renewal(db: Connection, owner: str) -> Renewal:
    """The tasks that the owner holds, which of them were cancelled, and whether it is paused."""
    found = _held(db, "AND live.owner = :owner", owner)
    return Renewal(
        {task_id: token for task_id, token, _, _ in found},
        frozenset(task_id for task_id, _, is_cancelled, _ in found if is_cancelled),
        leases.is_paused(db, owner),
    )


def read_workers(db: Connection, clock: Clock) -> list[WorkerInfo]:
    """Workers with a valid lease, each with the ids of the tasks it holds."""
    running: dict[str, list[str]] = {}
    for task_id, _, _, owner in _held(db, ""):
        running.setdefault(owner, []).append(task_id)
    return [
        msgspec.structs.replace(info, running=tuple(sorted(running.get(info.id, ()))))
        for info in leases.read_workers(db, clock)
    ]


def _held(db: Connection, condition: str, owner: str = "") -> list[tuple[str, int, int, str]]:
    return [
        (task_id, token, is_cancelled, holder)
        for task_id, token, is_cancelled, holder in tables.read_array(
            db,
            "SELECT json_group_array(json_array(tasks.id, live.token, live.cancel_requested, "
            "live.owner)) FROM omniq_live AS live "
            "CROSS JOIN omniq_tasks AS tasks ON tasks.seq = live.seq "
            f"WHERE live.place = 4 {condition}",
            {"owner": owner},
        )
    ]


def read_holders(db: Connection) -> list[str]:
    """The owners that hold tasks."""
    return tables.read_array(db, statement("holders"))


# Dead letters, checkpoints, progress


def list_dead(db: Connection, query: DeadQuery) -> list[DeadLetter]:
    """A page of dead letters in id order."""
    found = db.execute(
        "SELECT dead.letter FROM omniq_dead AS dead "
        "CROSS JOIN omniq_tasks AS tasks ON tasks.seq = dead.seq "
        "WHERE dead.id > :after AND (:func_path IS NULL OR tasks.func_path = :func_path) "
        "AND (:reason IS NULL OR dead.reason = :reason) ORDER BY dead.id LIMIT :limit",
        msgspec.structs.asdict(query),
    )
    return [_decode_letter(letter) for (letter,) in found]


def read_dead(db: Connection, task_id: str) -> DeadLetter | None:
    """A dead letter with its checkpoint."""
    letter = _scalar(db, "SELECT letter FROM omniq_dead WHERE id = ?", task_id)
    if letter is None:
        return None
    return msgspec.structs.replace(_decode_letter(letter), checkpoint=read_checkpoint(db, task_id))


def read_dead_row(db: Connection, task_id: str, now: int) -> Row | None:
    """The row that is stored with a dead letter for its retry."""
    if _scalar(db, "SELECT 1 FROM omniq_dead WHERE id = ?", task_id) is None:
        return None
    # The dead letter's row comes before that of the finished record.
    sql = tables.rows_statement("ended_by_id")
    return tables.read_rows(db, sql, {"id": task_id, "now": now})[0].row


def read_checkpoint(db: Connection, task_id: str) -> bytes | None:
    """The checkpoint of the task, or None."""
    sql = "SELECT checkpoint FROM omniq_checkpoints WHERE id = ?"
    checkpoint: bytes | None = _scalar(db, sql, task_id)
    return checkpoint


def read_progress(db: Connection, task_id: str) -> Progress | None:
    """The latest progress report of the task, or None."""
    report = _scalar(
        db,
        "SELECT progress.report FROM omniq_progress AS progress "
        "JOIN omniq_tasks AS tasks ON tasks.seq = progress.seq WHERE tasks.id = ?",
        task_id,
    )
    return None if report is None else _decode_progress(report)


# Schedules


def read_schedules(
    db: Connection, serializer: Serializer, schedule_id: str | None = None
) -> Iterator[Schedule]:
    """All schedules in id order, or the one with that id."""
    for version, schedule, task in db.execute(
        "SELECT version, schedule, task FROM omniq_schedules "
        "WHERE :id IS NULL OR id = :id ORDER BY id",
        {"id": schedule_id},
    ):
        # In a list, a schedule that cannot be decoded is skipped; read by its id, it raises.
        with suppress(*(() if schedule_id else (SerializationError,))):
            yield msgspec.structs.replace(
                _decode_schedule(schedule), task=serializer.decode_task(task), version=version
            )


def write_schedule(
    db: Connection, serializer: Serializer, schedule: Schedule, version: int
) -> None:
    """Store the schedule with that version."""
    # Arguments and metadata are user data: only the serializer may encode them.
    bare = msgspec.structs.replace(schedule.task, args=(), kwargs={}, metadata={})
    db.execute(
        "INSERT OR REPLACE INTO omniq_schedules VALUES (?, ?, ?, ?)",
        (
            schedule.id,
            version,
            encode_internal(msgspec.structs.replace(schedule, task=bare)),
            serializer.encode_task(schedule.task),
        ),
    )


def read_version(db: Connection, schedule_id: str) -> int | None:
    """The version of a schedule."""
    sql = "SELECT version FROM omniq_schedules WHERE id = ?"
    version: int | None = _scalar(db, sql, schedule_id)
    return version


def _scalar(db: Connection, sql: str, parameter: str) -> Any:
    found = db.execute(sql, (parameter,)).fetchone()
    return None if found is None else found[0]
