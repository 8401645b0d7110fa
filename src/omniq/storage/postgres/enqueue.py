"""Enqueue: inserts tasks on the storage's connection or in a caller's transaction."""

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
from omniq.storage.postgres.encoding import StoredRow
from omniq.storage.postgres.record import Recorder
from omniq.storage.postgres.statements import SchemaNames
from omniq.storage.row_rules import Row

_PLACEHOLDERS = ", ".join(f"${number}" for number in range(1, 19))
# The ids are returned only when they differ from the given ones.
_REPLY_COLUMNS = "SELECT refusal, detail, nullif(ids, $2) AS ids"
_ENQUEUE = f"{_REPLY_COLUMNS} FROM {{schema}}.enqueue({_PLACEHOLDERS})"
_ENQUEUE_POOLED = f"{_REPLY_COLUMNS} FROM {{schema}}.enqueue_pooled({_PLACEHOLDERS})"
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
_ID_COLUMN = list(_COLUMNS).index("id")
_OPTIONAL = {"unique_key", "expires", "gates"}

PART_SIZE = 250
"""A large batch is sent in parts of this many tasks: the next is built while the server inserts one."""


async def enqueue(
    db: Connection,
    names: SchemaNames,
    rows: Sequence[Row],
    now: int | None,
    max_pending: int | None,
    *,
    is_pooled: bool = False,
) -> list[str]:
    """Insert the rows, or raise `DuplicateTask` or `QueueFull`.

    Returns an id for each row: its own, or that of the task that holds its unique key.
    """
    if len(rows) == 1 and max_pending is None and not is_pooled:
        (row,) = rows
        if await db.fetchval(names(_ENQUEUE_ONE), *(get(row) for get in _COLUMNS.values()), now):
            return [row.id]
    sql = names(_ENQUEUE_POOLED if is_pooled else _ENQUEUE)
    reply = await db.fetchrow(sql, *_columns(rows), now, max_pending, False)
    return ids_from_reply(reply, max_pending) or [row.id for row in rows]


class LargeBatch:
    """Many rows, built as they are needed, and retained in case the transaction is repeated."""

    def __init__(self, rows: list[Row], unbuilt: Iterator[Row]) -> None:
        self._rows = rows
        self._unbuilt = unbuilt
        self._error: Exception | None = None

    def all(self) -> list[Row]:
        """Build and return all rows. Raises the error of a row that could not be built."""
        self._build(None)
        return self._rows

    def parts(self) -> Iterator[list[list[Any]]]:
        """The columns of `PART_SIZE` rows at a time."""
        start = 0
        while True:
            if start == len(self._rows):
                self._build(PART_SIZE)
            part = self._rows[start : start + PART_SIZE]
            if not part:
                return
            start += len(part)
            yield _columns(part)

    def _build(self, count: int | None) -> None:
        # A generator that has raised would look exhausted: raise its error again instead.
        if self._error is not None:
            raise self._error
        try:
            self._rows += islice(self._unbuilt, count)
        except Exception as error:
            self._error = error
            raise


async def enqueue_in_parts(
    db: Connection,
    names: SchemaNames,
    batch: LargeBatch,
    now: int | None,
    max_pending: int | None,
    clock: Clock,
    *,
    is_pooled: bool = False,
) -> list[str]:
    """`enqueue` of a large batch: the server inserts one part while the next is built."""
    sql = names(_ENQUEUE_POOLED if is_pooled else _ENQUEUE)
    parts = batch.parts()

    async def next_part() -> list[list[Any]] | None:
        # Lets the insert of the part before be sent first.
        await clock.sleep(0)
        return next(parts, None)

    ids: list[str] = []
    async with db.transaction():
        part = next(parts, None)
        while part is not None:
            # Notifies in any case: a storage may begin to wait before this is committed.
            insert = db.fetchrow(sql, *part, now, max_pending, True)
            given = part[_ID_COLUMN]
            # Both are awaited even if one fails: a connection can run one statement at a time.
            reply, part = await asyncio.gather(insert, next_part(), return_exceptions=True)
            for outcome in (reply, part):
                if isinstance(outcome, BaseException):
                    raise outcome
            ids += ids_from_reply(reply, max_pending) or given
    return ids


def _columns(rows: Sequence[Row]) -> list[list[Any]]:
    return [_shortened(name, list(map(get, rows))) for name, get in _COLUMNS.items()]


def ids_from_reply(reply: Mapping[str, Any], max_pending: int | None) -> list[str] | None:
    """The ids in the reply of the SQL function `enqueue`; None if they are the given ones.

    Raises `DuplicateTask` or `QueueFull` when it has refused the tasks.
    """
    match reply["refusal"]:
        case "duplicate":
            raise DuplicateTask(reply["detail"])
        case "full":
            raise QueueFull(max_pending or 0)
    ids: list[str] | None = reply["ids"]
    return ids


def _shortened(name: str, column: list[Any]) -> list[Any]:
    """One value for a required column that is equal in all rows; none for an unused optional one.

    >>> _shortened("rank", [3, 3])
    [3]
    >>> _shortened("expires", [None, None]), _shortened("expires", [3, 3])
    ([], [3, 3])
    """
    first = column[0]
    if column.count(first) < len(column):
        return column
    if first is None:
        return []
    return column if name in _OPTIONAL else [first]


def request_text(store: str, rows: Sequence[Row], now: int | None, max_pending: int | None) -> str:
    """The parameter of the SQL function `enqueue_text`."""
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


async def enqueue_unless_duplicate(recorder: Recorder, row: Row, max_pending: int | None) -> None:
    """Insert the row, unless its id is stored or its unique key is held."""
    try:
        await enqueue(recorder.db, recorder.names, [row], recorder.now, max_pending)
    except DuplicateTask:
        return


async def retry_dead(
    recorder: Recorder,
    task_id: str,
    *,
    body: bytes | None,
    from_start: bool,
    max_pending: int | None,
) -> bool:
    """Put a dead letter's task back into its queue; False when there is no such dead letter."""
    db, names = recorder.db, recorder.names
    found = await db.fetchrow(
        names(f"SELECT {encoding.ENDED_COLUMNS} FROM {{schema}}.dead WHERE id = $1 FOR UPDATE"),
        task_id,
    )
    if found is None:
        return False
    if max_pending is not None:
        await db.execute(names("SELECT pg_advisory_xact_lock({schema}.lock_key('room'))"))
        if not await db.fetchval(names("SELECT {schema}.has_room(1, $1)"), max_pending):
            raise QueueFull(max_pending)
    row = encoding.stored_row(found).row
    if row.unique is not None:
        holder = await db.fetchval(
            names("SELECT id FROM {schema}.live WHERE unique_key = $1"), row.unique
        )
        if holder is not None:
            raise DuplicateTask(holder)
    row_rules.retry_dead(row, recorder.now)
    await db.execute(names.file("retry_dead"), task_id, body)
    for table in ("dead", "finished", "checkpoints") if from_start else ("dead", "finished"):
        await db.execute(names(f"DELETE FROM {{schema}}.{table} WHERE id = $1"), task_id)
    # Marked as attached, because the dead letter may have a checkpoint.
    recorder.track(StoredRow(row, True))
    recorder.change(row)
    await recorder.flush()
    await recorder.notify_work()
    return True
