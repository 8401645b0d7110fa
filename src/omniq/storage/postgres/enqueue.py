"""How tasks get in, on our connection or inside somebody else's transaction."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any

import msgspec

from omniq.clock import Clock
from omniq.errors import DuplicateTask, QueueFull
from omniq.serialization import encode_internal
from omniq.storage import row_rules
from omniq.storage.postgres import encoding
from omniq.storage.postgres.connection import Connection
from omniq.storage.postgres.encoding import Stored
from omniq.storage.postgres.record import Ledger
from omniq.storage.postgres.statements import Names
from omniq.storage.row_rules import Row

_PLACES = ", ".join(f"${number}" for number in range(1, 19))
# Ids that are those given need not come back.
_ANSWER = "SELECT refusal, detail, nullif(ids, $2) AS ids"
_ENQUEUE = f"{_ANSWER} FROM {{schema}}.enqueue({_PLACES})"
_ENQUEUE_POOLED = f"{_ANSWER} FROM {{schema}}.enqueue_pooled({_PLACES})"
_ENQUEUE_ONE = "SELECT {{schema}}.enqueue_one({})".format(
    ", ".join(f"${number}" for number in range(1, 17))
)
_COLUMNS: dict[str, Callable[[Row], Any]] = {
    "nonce": attrgetter("nonce"),
    "id": attrgetter("id"),
    "queue": attrgetter("queue"),
    "rank": lambda row: ~row.priority,
    "func_path": attrgetter("func_path"),
    "body": attrgetter("body"),
    "due": attrgetter("due"),
    "visible": attrgetter("visible"),
    "created_at": attrgetter("created_at"),
    "attempts": attrgetter("attempts"),
    "repeats": attrgetter("repeats"),
    "unique_key": attrgetter("unique"),
    "expires": attrgetter("expires"),
    "result_ttl": attrgetter("result_ttl"),
    "gates": lambda row: encode_internal(row.gates) if row.gates else None,
}
_ID = list(_COLUMNS).index("id")
_OPTIONAL = {"unique_key", "expires", "gates"}

PART = 250
"""So many tasks of a large batch go to the server at once, while those after them are made."""


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
        if await db.fetchval(names(_ENQUEUE_ONE), *(get(row) for get in _COLUMNS.values()), now):
            return [row.id]
    sql = names(_ENQUEUE_POOLED if is_pooled else _ENQUEUE)
    answer = await db.fetchrow(sql, *_columns(rows), now, max_pending, False)
    return ids_of(answer, max_pending) or [row.id for row in rows]


class Batch:
    """Many rows, made when they are wanted, and kept for a transaction that is made again."""

    def __init__(self, rows: list[Row], rest: Iterator[Row]) -> None:
        self._rows = rows
        self._rest = rest
        self._error: Exception | None = None

    def all(self) -> list[Row]:
        """All of them. Raises what the making of one of them has raised."""
        self._make(None)
        return self._rows

    def parts(self) -> Iterator[list[list[Any]]]:
        """The columns of `PART` rows at a time."""
        start = 0
        while True:
            if start == len(self._rows):
                self._make(PART)
            part = self._rows[start : start + PART]
            if not part:
                return
            start += len(part)
            yield _columns(part)

    def _make(self, count: int | None) -> None:
        # A generator that has raised looks as if it had come to its end.
        if self._error is not None:
            raise self._error
        try:
            self._rows += islice(self._rest, count)
        except Exception as error:
            self._error = error
            raise


async def enqueue_in_parts(
    db: Connection,
    names: Names,
    batch: Batch,
    now: int | None,
    max_pending: int | None,
    clock: Clock,
    *,
    is_pooled: bool = False,
) -> list[str]:
    """`enqueue` of a large batch: the server keeps one part of it while the next is made."""
    sql = names(_ENQUEUE_POOLED if is_pooled else _ENQUEUE)
    parts = batch.parts()

    async def next_part() -> list[list[Any]] | None:
        # Not before the part ahead of it is on its way.
        await clock.sleep(0)
        return next(parts, None)

    ids: list[str] = []
    async with db.transaction():
        part = next(parts, None)
        while part is not None:
            # Told in any case: somebody may begin to wait before this is committed.
            keeping = db.fetchrow(sql, *part, now, max_pending, True)
            given = part[_ID]
            # Neither is left alone when the other one fails: a connection has one user at a time.
            answer, part = await asyncio.gather(keeping, next_part(), return_exceptions=True)
            for outcome in (answer, part):
                if isinstance(outcome, BaseException):
                    raise outcome
            ids += ids_of(answer, max_pending) or given
    return ids


def _columns(rows: Sequence[Row]) -> list[list[Any]]:
    return [_brief(name, list(map(get, rows))) for name, get in _COLUMNS.items()]


def ids_of(answer: Mapping[str, Any], max_pending: int | None) -> list[str] | None:
    """What `enqueue` answered, as the contract says it; None for the ids that were given."""
    match answer["refusal"]:
        case "duplicate":
            raise DuplicateTask(answer["detail"])
        case "full":
            raise QueueFull(max_pending or 0)
    ids: list[str] | None = answer["ids"]
    return ids


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
    task = {name: get(row) for name, get in _COLUMNS.items()}
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
        names(f"SELECT {encoding.ENDED} FROM {{schema}}.dead WHERE id = $1 FOR UPDATE"), task_id
    )
    if found is None:
        return False
    if max_pending is not None:
        await db.execute(names("SELECT pg_advisory_xact_lock({schema}.lock_key('room'))"))
        if not await db.fetchval(names("SELECT {schema}.has_room(1, $1)"), max_pending):
            raise QueueFull(max_pending)
    row = encoding.stored_of(found).row
    if row.unique is not None:
        holder = await db.fetchval(
            names("SELECT id FROM {schema}.live WHERE unique_key = $1"), row.unique
        )
        if holder is not None:
            raise DuplicateTask(holder)
    row_rules.revive(row, ledger.now)
    await db.execute(names.file("revive"), task_id, body)
    for table in ("dead", "finished", "checkpoints") if from_start else ("dead", "finished"):
        await db.execute(names(f"DELETE FROM {{schema}}.{table} WHERE id = $1"), task_id)
    # A checkpoint may have waited with the letter.
    ledger.adopt(Stored(row, True))
    ledger.change(row)
    await ledger.flush()
    await db.execute(names("SELECT {schema}.tell_of_work(0) WHERE {schema}.is_awaited('work')"))
    return True
