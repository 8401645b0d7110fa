"""Scan: the newest tasks, read backwards by `seq` at a bounded cost.

Live and finished tasks are in different tables, so a status is searched only in the table that can
have it. Statuses that are usually rare have their own index (`schema.sql`): for these, only rows
with that status count against the bound.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from omniq.clock import encode_id
from omniq.models import TaskStatus
from omniq.storage.inspection import Scan, ScanQuery, cursor_sequence, scan_by_sequence
from omniq.storage.sqlite import tables
from omniq.storage.sqlite.connection import Connection

_LATEST = 2**62

# Written exactly as in the indexes: SQLite uses a partial index only for the same expression.
_CONDITIONS = {
    TaskStatus.RUNNING: "place = 4 AND status = 'running'",
    TaskStatus.RETRYING: "status = 'retrying'",
    TaskStatus.FAILED: "status <> 'success' AND status = 'failed'",
    TaskStatus.CANCELLED: "status <> 'success' AND status = 'cancelled'",
}
_INDEXES = {
    "omniq_live": {TaskStatus.RUNNING: "omniq_held", TaskStatus.RETRYING: "omniq_retrying"},
    "omniq_finished": {
        TaskStatus.FAILED: "omniq_ended_badly",
        TaskStatus.CANCELLED: "omniq_ended_badly",
    },
}


def scan(db: Connection, query: ScanQuery, now: int) -> Scan:
    """Return matching tasks, the newest first."""
    before = cursor_sequence(query.cursor)
    if before is None:
        before = _LATEST if query.until is None else _first_after(db, query.until)
    parameters = {**msgspec.structs.asdict(query), "now": now, "before": before}
    parameters["limit"] = query.limit + 1
    parameters["status"] = None if query.status is None else query.status.value
    searched = _tables_for(query.status)
    lowest = [_lowest_seq(db, table, query.status, parameters) for table in searched]
    stopped_at = max((seq for seq in lowest if seq is not None), default=None)
    parameters["lowest_seq"] = -1 if stopped_at is None else stopped_at
    sql = _statement(query.status, query.queue is not None, query.func_path is not None)
    rows = tables.read_rows(db, sql, parameters)
    return scan_by_sequence(rows, query.limit, stopped_at)


def _first_after(db: Connection, until: int) -> int:
    """The `seq` after the last task that was enqueued by `until`, judged by the ids omniq makes."""
    found = db.execute(
        "SELECT seq FROM omniq_tasks WHERE id < ? ORDER BY id DESC LIMIT 1",
        (encode_id(max(0, until) // 1000 + 1, 0),),
    ).fetchone()
    return 0 if found is None else found[0] + 1


def _lowest_seq(
    db: Connection, table: str, status: TaskStatus | None, parameters: dict[str, Any]
) -> int | None:
    """The `seq` of the last record within the bound; None when there are fewer records."""
    if status is TaskStatus.RUNNING:
        # The number of running tasks is limited by the workers' slots: all of them can be read.
        return None
    indexed = status if status in _INDEXES[table] else None
    sql = (
        f"SELECT seq FROM {_source(table, indexed)} WHERE seq < :before "
        f"{_condition(indexed)} ORDER BY seq DESC LIMIT 1 OFFSET :max_scanned - 1"
    )
    found = db.execute(sql, parameters).fetchone()
    return None if found is None else found[0]


def _tables_for(status: TaskStatus | None) -> tuple[str, ...]:
    if status is None:
        return "omniq_live", "omniq_finished"
    return ("omniq_finished",) if status.is_final else ("omniq_live",)


@cache
def _statement(status: TaskStatus | None, by_queue: bool, by_function: bool) -> str:
    joined = "CROSS JOIN omniq_tasks AS tasks USING (seq)" if by_queue or by_function else ""
    found = " UNION ALL ".join(
        f"SELECT seq FROM {_source(table, status)} {joined} "
        f"WHERE seq >= :lowest_seq AND seq < :before {_condition(status)}"
        + (" AND expires_at > :now" if table == "omniq_finished" else "")
        + (" AND tasks.queue = :queue" if by_queue else "")
        + (" AND tasks.func_path = :func_path" if by_function else "")
        for table in _tables_for(status)
    )
    return tables.rows_statement("scan").replace("{found}", found)


def _source(table: str, status: TaskStatus | None) -> str:
    index = None if status is None else _INDEXES[table].get(status)
    return table if index is None else f"{table} INDEXED BY {index}"


def _condition(status: TaskStatus | None) -> str:
    if status is None:
        return ""
    return f"AND {_CONDITIONS.get(status, 'status = :status')}"
