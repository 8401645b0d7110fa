"""How tasks get in, on our connection or inside somebody else's transaction."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from omniq.errors import DuplicateTask, QueueFull
from omniq.serialization import encode_internal
from omniq.storage import _rows
from omniq.storage._postgres import tables
from omniq.storage._postgres.connection import Connection
from omniq.storage._postgres.ledger import Ledger
from omniq.storage._postgres.statements import Names
from omniq.storage._postgres.tables import Stored
from omniq.storage._rows import Row

_PLACES = ", ".join(f"${number}" for number in range(1, 19))
_ENQUEUE = f"SELECT * FROM {{schema}}.enqueue({_PLACES})"
_ENQUEUE_POOLED = f"SELECT * FROM {{schema}}.enqueue_pooled({_PLACES})"
_ENQUEUE_ONE = "SELECT {{schema}}.enqueue_one({})".format(
    ", ".join(f"${number}" for number in range(1, 17))
)
_COLUMNS = (
    "nonce", "id", "queue", "rank", "func_path", "body", "due", "visible", "created_at", "attempts",
    "repeats", "unique_key", "expires", "result_ttl", "gates",
)  # fmt: skip
_OPTIONAL = {"unique_key", "expires", "gates"}


async def enqueue(
    db: Connection,
    names: Names,
    rows: Sequence[Row],
    now: int | None,
    max_pending: int | None,
    *,
    is_pooled: bool = False,
) -> list[str]:
    """Keep the rows, or raise DuplicateTask or QueueFull; the id that now stands for each."""
    if len(rows) == 1 and max_pending is None and not is_pooled:
        (row,) = rows
        if await db.fetchval(names(_ENQUEUE_ONE), *_line(row), now):
            return [row.id]
    sql = names(_ENQUEUE_POOLED if is_pooled else _ENQUEUE)
    lines = tables.columns(map(_line, rows), len(_COLUMNS))
    answer = await db.fetchrow(sql, *map(_brief, _COLUMNS, lines), now, max_pending, False)
    return ids_of(answer, max_pending)


def ids_of(answer: Mapping[str, Any], max_pending: int | None) -> list[str]:
    """What `enqueue` answered, as the contract says it."""
    match answer["refusal"]:
        case "duplicate":
            raise DuplicateTask(answer["detail"])
        case "full":
            raise QueueFull(max_pending or 0)
    ids: list[str] = answer["ids"]
    return ids


def _line(row: Row) -> tuple[Any, ...]:
    return (
        row.nonce, row.id, row.queue, ~row.priority, row.func_path, row.body, row.due, row.visible,
        row.created_at, row.attempts, row.repeats, row.unique, row.expires, row.result_ttl,
        encode_internal(row.gates) if row.gates else None,
    )  # fmt: skip


def _brief(name: str, column: list[Any]) -> list[Any]:
    """What is the same for all tasks is said once, and nothing is said of what none of them has.

    >>> _brief("rank", [3, 3]), _brief("expires", [None, None]), _brief("expires", [3, 3])
    ([3], [], [3, 3])
    """
    first = column[0]
    if column.count(first) < len(column):
        return column
    if first is None:
        return []
    return column if name in _OPTIONAL else [first]


def request_text(store: str, rows: Sequence[Row], now: int | None, max_pending: int | None) -> str:
    """The parameter of `enqueue_text`."""
    request = {
        "store": store,
        "now": now,
        "max_pending": max_pending,
        "tasks": [_task(row) for row in rows],
    }
    return msgspec.json.encode(request).decode()


def _task(row: Row) -> dict[str, Any]:
    task = dict(zip(_COLUMNS, _line(row), strict=True))
    for name in ("body", "gates"):
        if task[name] is not None:
            task[name] = base64.b64encode(task[name]).decode()
    return task


async def enqueue_once(ledger: Ledger, row: Row, max_pending: int | None) -> None:
    """Keep the row unless its id is on record or its unique key is held."""
    try:
        await enqueue(ledger.db, ledger.names, [row], ledger.now, max_pending)
    except DuplicateTask:
        return


async def revive(
    ledger: Ledger,
    task_id: str,
    *,
    body: bytes | None,
    from_start: bool,
    max_pending: int | None,
) -> bool:
    """Put a dead letter's task back in the queue; False when there is no such letter."""
    db, names = ledger.db, ledger.names
    found = await db.fetchrow(
        names(f"SELECT {tables.ENDED} FROM {{schema}}.dead WHERE id = $1 FOR UPDATE"), task_id
    )
    if found is None:
        return False
    if max_pending is not None:
        await db.execute(names("SELECT pg_advisory_xact_lock({schema}.lock_key('room'))"))
        if not await db.fetchval(names("SELECT {schema}.has_room(1, $1)"), max_pending):
            raise QueueFull(max_pending)
    row = tables.stored_of(found).row
    if row.unique is not None:
        holder = await db.fetchval(
            names("SELECT id FROM {schema}.live WHERE unique_key = $1"), row.unique
        )
        if holder is not None:
            raise DuplicateTask(holder)
    _rows.revive(row, ledger.now)
    await db.execute(names.file("revive"), task_id, body)
    for table in ("dead", "finished", "checkpoints") if from_start else ("dead", "finished"):
        await db.execute(names(f"DELETE FROM {{schema}}.{table} WHERE id = $1"), task_id)
    # A checkpoint may have waited with the letter.
    ledger.adopt(Stored(row, True))
    ledger.change(row)
    await ledger.flush()
    await db.execute(names("SELECT {schema}.tell_of_work(0) WHERE {schema}.is_awaited('work')"))
    return True
