"""Scan: the newest tasks, read backwards by id at a bounded cost.

Live and finished tasks are in different tables, so a status is searched only in the table that can
have it. Statuses that are usually rare have their own index (`0004_documents.sql`): for these,
only rows with that status count against the bound.
"""

from __future__ import annotations

from typing import Any

from omniq.models import TaskStatus
from omniq.storage.inspection import Scan, ScanQuery
from omniq.storage.newest_by_id import scan_by_id
from omniq.storage.postgres import encoding, queries
from omniq.storage.postgres.statements import Statements
from omniq.storage.row_rules import Row

_INDEXED = {
    TaskStatus.RETRYING: "status = 2",
    TaskStatus.FAILED: "status <> 3 AND status = 4",
    TaskStatus.CANCELLED: "status <> 3 AND status = 5",
}
_COLUMNS = {"live": encoding.LIVE_COLUMNS, "finished": encoding.ENDED_COLUMNS}


async def scan(statements: Statements, query: ScanQuery, now: int | None) -> Scan:
    """The matching tasks, newest first."""
    return await scan_by_id(
        query,
        lambda before, limit: _read_backwards(statements, query, before, limit, now),
        lambda page: queries.list_rows(statements, page, now),
    )


async def _read_backwards(
    statements: Statements, query: ScanQuery, before: str, limit: int, now: int | None
) -> tuple[list[Row], str | None]:
    """Read matching rows with ids below `before`, the largest id first.

    The second value is the id at which the bound stopped the scan; None when it did not.
    """
    tables = _tables(query.status)
    lowest_id = None
    # The number of running tasks is limited by the workers' slots: all of them can be read.
    if query.status is not TaskStatus.RUNNING:
        sql = _lowest_id_query(tables, query.status)
        last = await statements.fetch(sql, before, query.max_scanned)
        lowest_id = last[0]["id"] if last else None
    parameters: list[Any] = [before, lowest_id or "", limit]
    conditions = [f"id < $1 AND id >= $2 AND {_condition(query.status)}"]
    for column, value in (("queue", query.queue), ("func_path", query.func_path)):
        if value is not None:
            parameters.append(value)
            conditions.append(f"{column} = ${len(parameters)}")
    if "finished" in tables:
        parameters.append(now)
    matching = " AND ".join(conditions)
    sql = " UNION ALL ".join(
        f"(SELECT {_COLUMNS[table]} FROM {{schema}}.{table} WHERE {matching}"
        + (_and_not_expired(len(parameters)) if table == "finished" else "")
        + " ORDER BY id DESC LIMIT $3)"
        for table in tables
    )
    sql = f"SELECT * FROM ({sql}) AS found ORDER BY id DESC LIMIT $3"
    found = await statements.fetch(sql, *parameters)
    rows = [encoding.row_from(record) for record in found]
    return rows, lowest_id if len(rows) < limit else None


def _and_not_expired(parameter: int) -> str:
    return f" AND expires_at > (SELECT {{schema}}.micros(${parameter}))"


def _lowest_id_query(tables: tuple[str, ...], status: TaskStatus | None) -> str:
    """SQL for the id of the last record within the bound; NULL when there are fewer records."""
    condition = _INDEXED.get(status, "true") if status is not None else "true"
    parts = " UNION ALL ".join(
        f"(SELECT id FROM {{schema}}.{table} WHERE id < $1 AND {condition} "
        "ORDER BY id DESC LIMIT $2)"
        for table in tables
    )
    return f"SELECT id FROM ({parts}) AS scanned ORDER BY id DESC OFFSET $2 - 1 LIMIT 1"


def _tables(status: TaskStatus | None) -> tuple[str, ...]:
    if status is None:
        return "live", "finished"
    return ("finished",) if status.is_final else ("live",)


def _condition(status: TaskStatus | None) -> str:
    if status is None:
        return "true"
    if status is TaskStatus.RUNNING:
        return "place = 4 AND status = 1"
    return _INDEXED.get(status, f"status = {encoding.STATUS_NUMBERS[status]}")
