"""Queries: pages and counts, each inside one read transaction."""

from __future__ import annotations

from typing import Any

import msgspec

from omniq.models import StoredLetter, TaskStatus
from omniq.storage.backend import Counts, FinishedQuery
from omniq.storage.inspection import DeadQuery, ScanQuery, TaskQuery
from omniq.storage.row_codec import letter_of
from omniq.storage.row_rules import Row
from omniq.storage.sqlite import tables
from omniq.storage.sqlite.connection import LARGEST, Connection
from omniq.storage.sqlite.scan import scan


def read_page(db: Connection, query: Any, now: int) -> Any:
    """The page that the query describes."""
    match query:
        case TaskQuery():
            return list_rows(db, query, now)
        case ScanQuery():
            return scan(db, query, now)
        case DeadQuery():
            return list_dead(db, query)
        case FinishedQuery():
            return list_finished(db, query)


def list_rows(db: Connection, query: TaskQuery, now: int) -> list[Row]:
    """A page of tasks in id order."""
    parameters = {**msgspec.structs.asdict(query), "now": now}
    if query.status is not None:
        parameters["status"] = query.status.value
    return tables.read_rows(db, tables.rows_statement("list_tasks"), parameters)


def list_dead(db: Connection, query: DeadQuery) -> list[StoredLetter]:
    """A page of dead letters in id order."""
    by_time = query.since is not None or query.until is not None
    index = "INDEXED BY omniq_dead_failure" if by_time else ""
    found = db.execute(
        f"SELECT CASE WHEN length(dead.letter) <= {LARGEST} THEN dead.letter ELSE x'' END, dead.id, "
        f"tasks.func_path FROM omniq_dead AS dead {index} "
        "CROSS JOIN omniq_tasks AS tasks ON tasks.seq = dead.seq "
        "WHERE dead.id > :after AND (:func_path IS NULL OR tasks.func_path = :func_path) "
        "AND (:reason IS NULL OR dead.reason = :reason) "
        + ("AND dead.last_failure >= :since " if query.since is not None else "")
        + ("AND dead.last_failure < :until " if query.until is not None else "")
        + "ORDER BY dead.id LIMIT :limit",
        msgspec.structs.asdict(query),
    )
    return [letter_of(*values) for values in found]


def list_finished(db: Connection, query: FinishedQuery) -> list[str]:
    """The ids of records whose instant is at most that of the query."""
    return tables.read_array(
        db,
        "SELECT json_group_array(id) FROM (SELECT tasks.id AS id FROM omniq_finished AS finished "
        "CROSS JOIN omniq_tasks AS tasks ON tasks.seq = finished.seq "
        f"WHERE finished.{query.by} <= :before LIMIT :limit)",
        {"before": query.before, "limit": query.limit},
    )


def count_waiting(db: Connection, now: int) -> Counts:
    """The number of live tasks that are not running, without reading all of them."""
    (waiting,) = db.execute(
        "SELECT (SELECT count(*) FROM omniq_live) - "
        "(SELECT count(*) FROM omniq_live WHERE place = 4 AND status = 'running')"
    ).fetchone()
    return Counts(now=now, waiting=waiting)


def count_all(db: Connection, now: int) -> Counts:
    """Counts of tasks by status and queue, and the first due instant of each queue."""
    counts = Counts(now=now, by_status=dict.fromkeys(TaskStatus, 0))
    for status, queue, count, due in db.execute(
        "SELECT status, queue, count(*), min(CASE WHEN place <> 4 THEN turn + due_after END) "
        "FROM omniq_live GROUP BY status, queue"
    ):
        counts.by_status[TaskStatus(status)] += count
        counts.by_queue[queue] = counts.by_queue.get(queue, 0) + count
        if due is not None:
            counts.oldest[queue] = min(due, counts.oldest.get(queue, due))
    live = sum(counts.by_status.values())
    counts.waiting = live - counts.by_status[TaskStatus.RUNNING]
    # Both from indexes, which are much smaller than the table.
    (succeeded,) = db.execute(
        "SELECT count(*) FROM omniq_finished INDEXED BY omniq_finished_seq WHERE expires_at > ?",
        (now,),
    ).fetchone()
    for status, count in db.execute(
        "SELECT status, count(*) FROM omniq_finished INDEXED BY omniq_ended_badly "
        "WHERE status <> 'success' AND expires_at > ? GROUP BY status",
        (now,),
    ):
        counts.by_status[TaskStatus(status)] += count
        succeeded -= count
    counts.by_status[TaskStatus.SUCCESS] = succeeded
    (counts.dead,) = db.execute("SELECT count(*) FROM omniq_dead").fetchone()
    return counts
