"""Tables: reads and writes rows, many at a time.

Every step of a statement releases the interpreter lock, and a busy event loop takes milliseconds to
return it. So a batch is read by one statement that returns one line of JSON, and written by a few
statements with many rows each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any

import msgspec

from omniq.gate_rules import Gate
from omniq.models import Attempt, TaskStatus
from omniq.serialization import encode_internal, lenient_decoder
from omniq.storage.row_rules import FinishedRow, Row
from omniq.storage.sqlite.connection import Connection, StatementRunner, statement

READY, SUSPECT, DELAYED, PARKED, HELD = range(5)
"""The values of the column `place` of `omniq_live`: see `schema.sql`."""

_INLINE_BYTES = 8_192
"""Bytes of a body or a history that may be part of the JSON; longer ones are read separately."""

_LARGEST_WRITE = 256

_STATUSES = {status.value: status for status in TaskStatus}
decode_json = msgspec.json.Decoder().decode
_decode_gates = lenient_decoder(tuple[Gate, ...], None)
_decode_history = lenient_decoder(tuple[Attempt, ...], ())


def place_of(row: Row, now: int) -> int:
    """The place in which a claim finds the row."""
    if row.owner is not None:
        return HELD
    if row.visible > now:
        return DELAYED
    if row.parked is not None:
        return PARKED
    return SUSPECT if row.is_suspect else READY


def json_text(value: Any) -> str:
    """Encode a parameter of `json_each`."""
    return msgspec.json.encode(value).decode()


# Reading

_TASK_COLUMNS = (
    "seq", "id", "nonce", "queue", "priority", "func_path", "created_at", "repeats", "unique_key",
    "expires", "result_ttl",
)  # fmt: skip
_STATE_COLUMNS = (
    "due", "visible", "status", "attempts", "crashes", "releases", "token", "settled", "owner",
    "started_at", "cancel_requested", "parked", "attached",
)  # fmt: skip
_LIVE_ONLY = {"owner", "parked", "attached"}


def _blob(column: str) -> str:
    """SQL for a blob in hexadecimal: "" for NULL, and NULL when it is too long for the JSON."""
    return f"CASE WHEN coalesce(length({column}), 0) <= {_INLINE_BYTES} THEN hex({column}) END"


def _columns(*, body: bool, union: bool) -> str:
    """The columns that `_row` expects.

    With `union` the state is that of `live` or, for a task that is not live, of `finished`.
    """

    def state(column: str) -> str:
        if not union:
            return f"state.{column}"
        if column in _LIVE_ONLY:
            return f"live.{column}"
        return f"coalesce(live.{column}, finished.{column})"

    return ", ".join(
        [
            *(f"tasks.{column}" for column in _TASK_COLUMNS),
            *map(state, _STATE_COLUMNS),
            "hex(tasks.gates)",
            _blob(state("history")),
            _blob("tasks.body") if body else "''",
        ]
    )


@cache
def rows_statement(name: str, *, body: bool = True, union: bool = False, place: int = 0) -> str:
    """The SQL of that name, with the columns of a row and the place filled in."""
    columns = _columns(body=body, union=union)
    return statement(name).replace("{columns}", columns).replace("{place}", str(place))


class StoredRow(msgspec.Struct, frozen=True):
    """A row, and whether it may have side data that must be deleted when the task ends."""

    row: Row
    attached: bool


def read_rows(db: Connection, sql: str, parameters: dict[str, Any]) -> list[StoredRow]:
    """The rows that a statement made by `rows_statement` finds, in its order."""
    (text,) = db.execute(sql, parameters).fetchone()
    return [_row(db, values) for values in decode_json(text)]


def read_array(
    db: StatementRunner, sql: str, parameters: dict[str, Any] | None = None
) -> list[Any]:
    """The JSON array that a statement returns."""
    (text,) = db.execute(sql, parameters or {}).fetchone()
    array: list[Any] = decode_json(text)
    return array


def read_record(db: Connection, task_id: str, now: int) -> Row | FinishedRow | None:
    """Return the record of the task, live or finished and not expired; or None."""
    sql = rows_statement("find", union=True)
    found = db.execute(sql, {"id": task_id, "now": now}).fetchone()
    if found is None:
        return None
    text, finished_at, expires_at, result = found
    row = _row(db, decode_json(text)).row
    if result is None:
        return row
    return FinishedRow(row=row, finished_at=finished_at, expires_at=expires_at, result=result)


def _row(db: Connection, values: list[Any]) -> StoredRow:
    (
        seq, task_id, nonce, queue, priority, func_path, created_at, repeats, unique, expires, ttl,
        due, visible, status, attempts, crashes, releases, token, settled, owner, started_at,
        cancel_requested, parked, attached, gates, history, body,
    ) = values  # fmt: skip
    if history is None:
        history = _fetch_history(db, seq)
    if body is None:
        (body,) = db.execute("SELECT hex(body) FROM omniq_tasks WHERE seq = ?", (seq,)).fetchone()
    limits = _decode_gates(bytes.fromhex(gates)) if gates else ()
    row = Row(
        id=task_id,
        seq=seq,
        nonce=nonce,
        queue=queue,
        priority=priority,
        func_path=func_path,
        # A task whose limits cannot be decoded must not run: without a body it cannot.
        body=b"" if limits is None else bytes.fromhex(body),
        due=due,
        visible=visible,
        created_at=created_at,
        status=_STATUSES[status],
        attempts=attempts,
        crashes=crashes,
        releases=releases,
        token=token,
        settled=settled,
        owner=owner,
        started_at=started_at,
        cancel_requested=cancel_requested == 1,
        repeats=repeats == 1,
        unique=unique,
        expires=expires,
        result_ttl=ttl,
        gates=limits or (),
        parked=parked,
        history=_decode_history(bytes.fromhex(history)) if history else (),
    )
    return StoredRow(row, attached == 1)


def _fetch_history(db: Connection, seq: int) -> str:
    sql = " UNION ALL ".join(
        f"SELECT hex(history) FROM {table} WHERE seq = :seq"
        for table in ("omniq_live", "omniq_finished", "omniq_dead")
    )
    history: str = db.execute(sql, {"seq": seq}).fetchone()[0]
    return history


# Writing


class BulkInsert:
    """An INSERT that writes any number of rows in a few statements, one for each power of two."""

    def __init__(self, table: str, columns: Sequence[str], suffix: str = "") -> None:
        group = f"({', '.join('?' * len(columns))})"
        self._start = f"INSERT INTO {table} ({', '.join(columns)}) VALUES {group}"
        self._more = f", {group}"
        self._end = f" {suffix}"
        self._statements: dict[int, str] = {}

    def write(self, db: StatementRunner, rows: Sequence[tuple[Any, ...]]) -> int:
        """Write the rows; returns how many were written."""
        written = 0
        for size, part in _parts(rows):
            sql = self._statements.get(size)
            if sql is None:
                sql = self._start + self._more * (size - 1) + self._end
                self._statements[size] = sql
            written += db.execute(sql, list(chain.from_iterable(part))).rowcount
        return written


def _parts(rows: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, Sequence[tuple[Any, ...]]]]:
    """The rows in parts whose sizes are powers of two.

    >>> [size for size, _ in _parts([()] * 37)]
    [32, 4, 1]
    """
    start, size = 0, _LARGEST_WRITE
    while start < len(rows):
        while size > len(rows) - start:
            size //= 2
        yield size, rows[start : start + size]
        start += size


_CHANGING = ("place", "lot", *_STATE_COLUMNS, "history")
_ENDED = (*(column for column in _STATE_COLUMNS if column not in _LIVE_ONLY), "history")
_LIVE = ("seq", "queue", "priority", "unique_key", *_CHANGING)
_SAVE = "ON CONFLICT (seq) DO UPDATE SET " + ", ".join(f"{c} = excluded.{c}" for c in _CHANGING)

_INSERT_TASKS = BulkInsert(
    "omniq_tasks", [*_TASK_COLUMNS, "gates", "body"], "ON CONFLICT (id) DO NOTHING"
)
_INSERT_NEW = BulkInsert(
    "omniq_live",
    ("seq", "queue", "priority", "unique_key", "place", "due", "visible", "attempts"),
)
_SAVE_LIVE = BulkInsert("omniq_live", _LIVE, _SAVE)
_INSERT_FINISHED = BulkInsert(
    "omniq_finished", ["seq", *_ENDED, "finished_at", "expires_at", "result"]
)
_INSERT_DEAD = BulkInsert("omniq_dead", ["seq", "id", *_ENDED, "last_failure", "reason", "letter"])


def insert_tasks(db: StatementRunner, rows: Iterable[Row]) -> int:
    """Write the constant part of new rows; returns fewer than given when an id is taken."""
    return _INSERT_TASKS.write(
        db,
        [
            (
                row.seq, row.id, row.nonce, row.queue, row.priority, row.func_path, row.created_at,
                row.repeats, row.unique, row.expires, row.result_ttl,
                encode_internal(row.gates) if row.gates else None, row.body,
            )
            for row in rows
        ],
    )  # fmt: skip


def insert_new(db: StatementRunner, rows: Iterable[Row], now: int) -> None:
    """Write the state of rows that have never been claimed."""
    _INSERT_NEW.write(
        db,
        [
            (
                row.seq, row.queue, row.priority, row.unique, place_of(row, now), row.due,
                row.visible, row.attempts,
            )
            for row in rows
        ],
    )  # fmt: skip


def save_live(db: Connection, rows: Iterable[StoredRow], now: int) -> None:
    """Insert or update the state of live rows."""
    _SAVE_LIVE.write(db, [_live(stored.row, now, stored.attached) for stored in rows])


def insert_finished(db: Connection, ended: Iterable[FinishedRow]) -> None:
    """Write the state and result of rows that have ended."""
    _INSERT_FINISHED.write(
        db,
        [
            (each.row.seq, *_ended(each.row), each.finished_at, each.expires_at, each.result)
            for each in ended
        ],
    )


def insert_dead(db: Connection, row: Row, *, last_failure: int, reason: str, letter: bytes) -> None:
    """Write a dead letter, and the state from which its task can be retried."""
    _INSERT_DEAD.write(db, [(row.seq, row.id, *_ended(row), last_failure, reason, letter)])


def delete(db: StatementRunner, table: str, seqs: Iterable[int]) -> None:
    """Delete the rows with these `seq`."""
    db.execute(
        f"DELETE FROM {table} WHERE seq IN (SELECT value FROM json_each(?))",
        (json_text(list(seqs)),),
    )


def _live(row: Row, now: int, attached: bool) -> tuple[Any, ...]:
    return (
        row.seq, row.queue, row.priority, row.unique, place_of(row, now), _lot(row), row.due, row.visible,
        row.status._value_, row.attempts, row.crashes, row.releases, row.token, row.settled,
        row.owner, row.started_at, row.cancel_requested, row.parked, attached, _history(row),
    )  # fmt: skip


def _lot(row: Row) -> str | None:
    # The name of a queue contains no slash.
    return None if row.parked is None else f"{row.is_suspect:d}/{row.queue}/{row.parked}"


def _ended(row: Row) -> tuple[Any, ...]:
    return (
        row.due, row.visible, row.status._value_, row.attempts, row.crashes, row.releases, row.token,
        row.settled, row.started_at, row.cancel_requested, _history(row),
    )  # fmt: skip


def _history(row: Row) -> bytes | None:
    return encode_internal(row.history) if row.history else None
