"""Queries: pages and counts, each of them a single statement."""

from __future__ import annotations

from typing import Any

from omniq.models import StoredLetter, TaskStatus
from omniq.storage.backend import Counts, FinishedQuery
from omniq.storage.inspection import DeadQuery, TaskQuery
from omniq.storage.postgres import encoding
from omniq.storage.postgres.statements import Statements
from omniq.storage.row_codec import letter_of
from omniq.storage.row_rules import Row


async def list_rows(statements: Statements, query: TaskQuery, now: int | None) -> list[Row]:
    """A page of tasks, live and finished together, in id order."""
    wanted = (
        "id > $1 AND ($2::smallint IS NULL OR status = $2) AND ($3::text IS NULL OR queue = $3) "
        "AND ($4::text IS NULL OR func_path = $4)"
    )
    sql = (
        f"(SELECT {encoding.LIVE_COLUMNS} FROM {{schema}}.live WHERE {wanted} ORDER BY id LIMIT $5) "
        f"UNION ALL (SELECT {encoding.ENDED_COLUMNS} FROM {{schema}}.finished "
        f"WHERE {wanted} AND expires_at > (SELECT {{schema}}.micros($6)) ORDER BY id LIMIT $5) "
        "ORDER BY id LIMIT $5"
    )
    status = None if query.status is None else encoding.STATUS_NUMBERS[query.status]
    parameters = (query.after, status, query.queue, query.func_path, query.limit, now)
    found = await statements.fetch(sql, *parameters)
    return [encoding.row_from(record) for record in found]


async def list_dead(statements: Statements, query: DeadQuery) -> list[StoredLetter]:
    """A page of dead letters in id order."""
    conditions = ["id > $1"]
    parameters: list[Any] = [query.after, query.limit]
    for condition, value in (
        ("func_path =", query.func_path),
        ("reason =", query.reason),
        ("failed_at >=", query.since),
        ("failed_at <", query.until),
    ):
        if value is not None:
            parameters.append(value)
            conditions.append(f"{condition} ${len(parameters)}")
    sql = (
        "SELECT {schema}.fitting(letter), id, func_path FROM {schema}.dead "
        f"WHERE {' AND '.join(conditions)} ORDER BY id LIMIT $2"
    )
    return [letter_of(*values) for values in await statements.fetch(sql, *parameters)]


async def list_finished(statements: Statements, query: FinishedQuery) -> list[str]:
    """The ids of records whose instant is at most that of the query."""
    parameters: tuple[Any, ...] = (query.before, query.limit)
    if query.by == "expires_at":
        sql = "SELECT id FROM {schema}.finished WHERE expires_at <= $1 ORDER BY expires_at LIMIT $2"
    else:
        sql = (
            "SELECT id FROM {schema}.finished WHERE id > $3 AND finished_at <= $1 "
            "ORDER BY id LIMIT $2"
        )
        parameters = (*parameters, query.after)
    return [task_id for (task_id,) in await statements.fetch(sql, *parameters)]


async def count_waiting(statements: Statements) -> int:
    """The number of live tasks that are not running."""
    sql = (
        "SELECT (SELECT pg_catalog.count(*) FROM {schema}.live) - "
        "(SELECT pg_catalog.count(*) FROM {schema}.live WHERE place = 4 AND status = 1)"
    )
    ((waiting,),) = await statements.fetch(sql)
    return int(waiting)


async def read_counts(statements: Statements, given_now: int | None) -> Counts:
    """Counts of tasks by status and queue, and when the oldest waiting task of each queue is due."""
    found = await statements.file("stats", given_now)
    counts = Counts(
        now=found[0]["due"], by_status=dict.fromkeys(TaskStatus, 0), by_queue={}, oldest={}
    )
    for kind, number, queue, count, due in found[1:]:
        if kind == "dead":
            counts.dead = count
            continue
        status = encoding.STATUSES[number]
        counts.by_status[status] += count
        if kind == "live":
            counts.waiting += 0 if status is TaskStatus.RUNNING else count
            counts.by_queue[queue] = counts.by_queue.get(queue, 0) + count
            if due is not None:
                counts.oldest[queue] = min(due, counts.oldest.get(queue, due))
    return counts
