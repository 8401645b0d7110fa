"""The newest tasks, however many there are: a bounded stretch of ids, read backwards.

Live and finished tasks lie apart, so a status is looked for where it can be. Statuses that are
mostly rare have an index of their own (0002_looking.sql): of those, only they count as looked at.
"""

from __future__ import annotations

from typing import Any

from omniq.models import TaskStatus
from omniq.storage.inspection import ScanQuery
from omniq.storage.postgres import encoding
from omniq.storage.postgres.connection import Connection
from omniq.storage.postgres.statements import Names
from omniq.storage.row_rules import Row

_INDEXED = {
    TaskStatus.RETRYING: "status = 2",
    TaskStatus.FAILED: "status <> 3 AND status = 4",
    TaskStatus.CANCELLED: "status <> 3 AND status = 5",
}
_COLUMNS = {"live": encoding.LIVE, "finished": encoding.ENDED}


async def read_back(
    db: Connection, names: Names, query: ScanQuery, before: str, limit: int, now: int | None
) -> tuple[list[Row], str | None]:
    """Rows in question before that id, the last one first; and the id at which it had to stop."""
    places = _places(query.status)
    floor = None
    # As many run as there are slots: all of them can be looked at.
    if query.status is not TaskStatus.RUNNING:
        floor = await db.fetchval(names(_floor(places, query.status)), before, query.most)
    given: list[Any] = [before, floor or "", limit]
    conditions = [f"id < $1 AND id >= $2 AND {_condition(query.status)}"]
    for column, value in (("queue", query.queue), ("func_path", query.func_path)):
        if value is not None:
            given.append(value)
            conditions.append(f"{column} = ${len(given)}")
    if "finished" in places:
        given.append(now)
    wanted = " AND ".join(conditions)
    sql = " UNION ALL ".join(
        f"(SELECT {_COLUMNS[table]} FROM {{schema}}.{table} WHERE {wanted}"
        + (_kept(len(given)) if table == "finished" else "")
        + " ORDER BY id DESC LIMIT $3)"
        for table in places
    )
    sql = f"SELECT * FROM ({sql}) AS found ORDER BY id DESC LIMIT $3"
    found = await db.fetch(names(sql), *given)
    rows = [encoding.stored_of(record).row for record in found]
    return rows, floor if len(rows) < limit else None


def _kept(parameter: int) -> str:
    return f" AND expires_at > (SELECT {{schema}}.micros(${parameter}))"


def _floor(places: tuple[str, ...], status: TaskStatus | None) -> str:
    """The id of the last record that may be looked at; NULL when there are not so many."""
    condition = _INDEXED.get(status, "true") if status is not None else "true"
    parts = " UNION ALL ".join(
        f"(SELECT id FROM {{schema}}.{table} WHERE id < $1 AND {condition} "
        "ORDER BY id DESC LIMIT $2)"
        for table in places
    )
    return f"SELECT id FROM ({parts}) AS looked_at ORDER BY id DESC OFFSET $2 - 1 LIMIT 1"


def _places(status: TaskStatus | None) -> tuple[str, ...]:
    if status is None:
        return "live", "finished"
    return ("finished",) if status.is_final else ("live",)


def _condition(status: TaskStatus | None) -> str:
    if status is None:
        return "true"
    if status is TaskStatus.RUNNING:
        return "place = 4 AND status = 1"
    return _INDEXED.get(status, f"status = {encoding.NUMBERS[status]}")
