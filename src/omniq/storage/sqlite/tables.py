"""Tables: reads and writes rows, many at a time.

Every step of a statement releases the interpreter lock, and a busy event loop takes milliseconds to
return it. So a batch is read by one statement that returns one line of JSON, and written by a few
statements with many rows each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import chain
from typing import Any

import msgspec

from omniq.clock import to_micros
from omniq.errors import SerializationError
from omniq.gate_rules import Gate
from omniq.models import TaskStatus
from omniq.serialization import encode_internal, internal_decoder
from omniq.storage.backend import DELAYED, READY, Ended, Record, place_of
from omniq.storage.row_codec import RowCodec, letter_of
from omniq.storage.row_rules import EPOCH_BITS, FinishedRow, Row
from omniq.storage.sqlite.connection import LARGEST, StatementRunner, statement

_INLINE_BYTES = 8_192
"""Bytes of a blob that may be part of the JSON; longer ones are read separately."""

_LARGEST_WRITE = 256

_CONSTANT = (
    "seq", "id", "nonce", "queue", "priority", "func_path", "created_at", "result_ttl", "repeats",
)  # fmt: skip
"""The columns of `omniq_tasks` that are stored as they are."""

_STATE = ("attempts", "crashes", "token", "settled", "started_at", "status", "cancel_requested")
"""The columns of `omniq_live`, `omniq_finished` and `omniq_dead` that are stored as they are."""

_LIVE_STATE = {"visible": "0", "owner": "NULL", "parked": "NULL", "attached": "0"}
"""The columns of `omniq_live` alone, and their values for a task that has ended."""

_OTHERS = ("unique", "expires", "stored_at", "due", "turn", "gates")
_CODEC = RowCodec((*_CONSTANT, *_STATE, *_LIVE_STATE, *_OTHERS))
_STATUSES = {status.value: status for status in TaskStatus}
decode_json = msgspec.json.Decoder().decode
_decode_gates = internal_decoder(tuple[Gate, ...])


def json_text(value: Any) -> str:
    """Encode a parameter of `json_each`."""
    return msgspec.json.encode(value).decode()


# Reading


def _inline_hex(blob: str, condition: str = "true") -> str:
    """SQL for a blob in hexadecimal: "" for NULL, and NULL when it is too long for the JSON.

    "" also for one that is too large to be read at all, on the condition: see `largest_value`.
    """
    return (
        # Most are empty, and are not worth two calls of functions.
        f"CASE WHEN coalesce({blob}, x'') = x'' THEN '' "
        f"WHEN length({blob}) <= {_INLINE_BYTES} THEN hex({blob}) "
        f"WHEN length({blob}) > {LARGEST} AND {condition} THEN '' END"
    )


@cache
def _columns(*, bodies: bool, is_live: bool) -> str:
    """The columns that `_row` expects; the tables have the names that `rows_statement` describes."""
    columns = [f'tasks."{column}"' for column in _CONSTANT]
    columns += ["nullif(tasks.\"unique\", '')", "nullif(tasks.expires, 0)"]
    columns.append("tasks.created_at + tasks.stored_after")
    if is_live:
        columns += [f"live.{column}" for column in (*_STATE, *_LIVE_STATE)]
        columns += ["live.turn + live.due_after", "live.turn"]
        rest = "live.rest"
    else:
        columns += [f"coalesce(live.{name}, dead.{name}, finished.{name})" for name in _STATE]
        columns += [f"coalesce(live.{name}, {ended})" for name, ended in _LIVE_STATE.items()]
        columns.append("coalesce(live.turn + live.due_after, dead.due, finished.due)")
        columns.append("coalesce(live.turn, dead.due, finished.due)")
        rest = "coalesce(live.rest, dead.rest, finished.rest)"
    columns += ["hex(tasks.gates)", _inline_hex(rest)]
    return ", ".join([*columns, _inline_hex("tasks.body") if bodies else "''"])


_JOINS = """
LEFT JOIN omniq_live AS live ON live.seq = tasks.seq
LEFT JOIN omniq_dead AS dead ON dead.seq = tasks.seq
LEFT JOIN omniq_finished AS finished ON finished.seq = tasks.seq AND finished.expires_at > :now
"""


_HAS_LIMIT = "found.kind <> 'gate'"
"""The state of a gate has no limit: a rate limit has many starts."""

_DOCUMENT = f"json_array(found.kind, found.key, {_inline_hex('found.data', _HAS_LIMIT)}, found.due)"
_LONG_BODY = "SELECT hex(body) FROM omniq_tasks WHERE seq = ?1"
_LONG_REST = (
    "SELECT hex(rest) FROM omniq_live WHERE seq = ?1 UNION ALL "
    "SELECT hex(rest) FROM omniq_dead WHERE seq = ?1 UNION ALL "
    "SELECT hex(rest) FROM omniq_finished WHERE seq = ?1 LIMIT 1"
)
_LONG_RESULT = "SELECT hex(result) FROM omniq_finished WHERE seq = ?1"
_LONG_LETTER = "SELECT hex(letter) FROM omniq_dead WHERE seq = ?1"


@cache
def rows_statement(name: str, *, bodies: bool = True) -> str:
    """The SQL of that name, with the columns of rows filled in.

    `{live}` are those of live tasks, from the tables `tasks` and `live`. `{any}` are those of any task,
    from `tasks` and the other tables, which `{joins}` joins. `{document}` is one of the table `found`.
    """
    return (
        statement(name)
        .replace("{live}", _columns(bodies=bodies, is_live=True))
        .replace("{any}", _columns(bodies=bodies, is_live=False))
        .replace("{joins}", _JOINS)
        .replace("{ended}", f"{_inline_hex('finished.result')}, {_inline_hex('dead.letter')}")
        .replace("{document}", _DOCUMENT)
    )


def read_array(
    db: StatementRunner, sql: str, parameters: dict[str, Any] | None = None
) -> list[Any]:
    """The JSON array that a statement returns."""
    (text,) = db.execute(sql, parameters or {}).fetchone()
    array: list[Any] = decode_json(text)
    return array


def read_rows(db: StatementRunner, sql: str, parameters: dict[str, Any]) -> list[Row]:
    """The rows that a statement made by `rows_statement` finds, in its order."""
    return [_row(db, values) for values in read_array(db, sql, parameters)]


def read_records(
    db: StatementRunner, ids: Sequence[str], now: int, *, bodies: bool
) -> dict[str, Record]:
    """What is stored under these ids; a record past its `expires_at` is not."""
    found: dict[str, Record] = {}
    sql = rows_statement("load", bodies=bodies)
    for values in read_array(db, sql, {"ids": json_text(ids), "now": now}):
        *values, finished_at, expires_at, is_dead, result, letter = values
        row = _row(db, values)
        finished = dead = None
        if finished_at is not None:
            data = blob(db, result, _LONG_RESULT, row.seq)
            finished = FinishedRow(
                row=row, finished_at=finished_at, expires_at=expires_at, result=data
            )
        if is_dead:
            data = blob(db, letter, _LONG_LETTER, row.seq)
            dead = letter_of(data, row.id, row.func_path)
        found[row.id] = Record(row, finished, dead)
    return found


def _row(db: StatementRunner, values: Sequence[Any]) -> Row:
    seq, gates, rest, body = values[0], values[-3], values[-2], values[-1]
    if rest is None:
        (rest,) = db.execute(_LONG_REST, (seq,)).fetchone()
    if body is None:
        (body,) = db.execute(_LONG_BODY, (seq,)).fetchone()
    try:
        row = _CODEC.without_columns(bytes.fromhex(rest))
        row.gates = _gates(gates) if gates else ()
        row.body = bytes.fromhex(body)
    except SerializationError:
        # A task whose limits cannot be decoded must not run: without a body it cannot.
        row = _CODEC.without_columns(b"")
    # In the order of the columns. One statement, because most of the time of a claim is spent here.
    (
        row.seq, row.id, row.nonce, row.queue, row.priority, row.func_path, row.created_at,
        row.result_ttl, repeats, row.unique, row.expires, row.stored_at,
        row.attempts, row.crashes, row.token, row.settled, row.started_at, status, cancelled,
        row.visible, row.owner, row.parked, attached, row.due, row.turn, _, _, _,
    ) = values  # fmt: skip
    row.repeats, row.cancel_requested, row.attached = (repeats == 1, cancelled == 1, attached == 1)
    row.status = _STATUSES[status]
    return row


@lru_cache(maxsize=1_000)
def _gates(text: str) -> tuple[Gate, ...]:
    """Decode gates; cached, because many tasks have the same."""
    gates: tuple[Gate, ...] = _decode_gates(bytes.fromhex(text))
    return gates


def blob(db: StatementRunner, inline: str | None, sql: str, *key: Any) -> bytes:
    """A blob that was read in hexadecimal, or None if it is long: then `sql` reads it."""
    if inline is None:
        (inline,) = db.execute(sql, key).fetchone()
    return bytes.fromhex(inline or "")


# Writing


class BulkInsert:
    """An INSERT that writes any number of rows in a few statements, one for each power of two.

    `computed` has the SQL of columns whose values are not parameters as they are.
    """

    def __init__(
        self, table: str, columns: Sequence[str], suffix: str = "", **computed: str
    ) -> None:
        self._values = f"({', '.join(computed.get(column, '?') for column in columns)})"
        names = ", ".join(f'"{column}"' for column in columns)
        self._start = f"INSERT INTO {table} ({names}) VALUES "
        self._end = f" {suffix}"
        self._statements: dict[int, str] = {}

    def write(self, db: StatementRunner, rows: Sequence[tuple[Any, ...]]) -> int:
        """Write the rows; returns how many were written."""
        written = 0
        for size, part in _parts(rows):
            sql = self._statements.get(size)
            if sql is None:
                sql = self._start + ", ".join([self._values] * size) + self._end
                self._statements[size] = sql
            written += db.execute(sql, list(chain.from_iterable(part))).rowcount
        return written


def _parts(rows: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, Sequence[tuple[Any, ...]]]]:
    """The rows in parts whose sizes are powers of two.

    >>> [size for size, _ in _parts([()] * 37)]
    [32, 4, 1]
    """
    start, left = 0, len(rows)
    while left:
        size = min(_LARGEST_WRITE, 1 << (left.bit_length() - 1))
        yield size, rows[start : start + size]
        start, left = start + size, left - size


_PLACED = ("due_after", "rank", "turn", "place", "rest")
_INSERT_TASKS = BulkInsert(
    "omniq_tasks",
    (*_CONSTANT, "unique", "expires", "stored_after", "gates", "body"),
    "ON CONFLICT (id) DO NOTHING",
)
_INSERT_NEW = BulkInsert(
    "omniq_live",
    (
        "seq", "queue", "func", "visible", "attempts", "token", "attached", "due_after", "rank",
        "turn", "place", "rest",
    ),
)  # fmt: skip
_SAVE_LIVE = BulkInsert(
    "omniq_live",
    ("seq", "queue", "func", *_STATE, *_LIVE_STATE, *_PLACED),
    "ON CONFLICT (seq) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in (*_STATE, *_LIVE_STATE, *_PLACED))
    + ", lot = CASE WHEN excluded.parked IS NOT NULL "
    "THEN func || '/' || (excluded.crashes > 0) || '/' || queue END",
    # A path without a number was not written by omniq: no claim asks for 0.
    func="coalesce((SELECT id FROM omniq_functions WHERE path = ?), 0)",
)
_INSERT_FINISHED = BulkInsert(
    "omniq_finished", ("seq", "due", *_STATE, "rest", "finished_at", "expires_at", "result")
)
_INSERT_DEAD = BulkInsert(
    "omniq_dead", ("seq", "due", *_STATE, "rest", "id", "last_failure", "reason", "letter")
)


def rank(priority: int) -> int:
    """A number of the same size that sorts the other way."""
    return ~priority


# The driver binds plain strings, numbers and bytearrays directly; for None, bytes and others it searches
# for an adapter, which takes longer than all else. So what is missing is stored as "" or 0 where that has
# no other meaning. Each tuple is written out: that is several times faster than an `attrgetter`.


def _rest(row: Row) -> bytearray:
    return bytearray(_CODEC.rest(row))


def insert_rows(db: StatementRunner, rows: Sequence[Row], now: int) -> bool:
    """Insert waiting rows in order, giving each its `seq`; False, and none is, when an id is taken."""
    newest, functions = 0, {}
    for path in {row.func_path for row in rows}:
        newest, functions[path] = _newest_and_function(db, path)
    for seq, row in enumerate(rows, start=newest + 1):
        row.seq = seq
    tasks = [
        (
            row.seq, row.id, row.nonce, row.queue, row.priority, row.func_path, row.created_at,
            row.result_ttl, +row.repeats, row.unique or "", row.expires or 0,
            row.stored_at - row.created_at, bytearray(encode_internal(row.gates) if row.gates else b""),
            bytearray(row.body),
        )
        for row in rows
    ]  # fmt: skip
    if _INSERT_TASKS.write(db, tasks) < len(rows):
        db.execute("DELETE FROM omniq_tasks WHERE seq > ?", (newest,))
        return False
    live = [
        (
            row.seq, row.queue, functions[row.func_path], row.visible, row.attempts, row.token,
            +row.attached, 0 if row.turn is None else row.due - row.turn, ~row.priority,
            row.due if row.turn is None else row.turn, DELAYED if row.visible > now else READY,
            _rest(row),
        )
        for row in rows
    ]  # fmt: skip
    _INSERT_NEW.write(db, live)
    return True


_NEWEST_AND_FUNCTION = (
    "SELECT max(coalesce((SELECT max(seq) FROM omniq_tasks), 0), "
    "coalesce((SELECT max(seq) FROM omniq_live), 0), coalesce((SELECT due FROM "
    f"omniq_documents WHERE kind = 'store' AND key = 'store'), 0) << {EPOCH_BITS}), "
    "(SELECT id FROM omniq_functions WHERE path = ?)"
)


def _newest_and_function(db: StatementRunner, path: str) -> tuple[int, int]:
    """The number behind which the next task is inserted, and the number of the function.

    The first is that of the newest task, or that of the epoch.
    """
    newest, function = db.execute(_NEWEST_AND_FUNCTION, (path,)).fetchone()
    if function is None:
        sql = "INSERT INTO omniq_functions (path) VALUES (?) RETURNING id"
        (function,) = db.execute(sql, (path,)).fetchone()
    return newest, function


def save_live(db: StatementRunner, rows: Iterable[Row], now: int) -> None:
    """Insert or update the state of live rows."""
    live = [
        (
            row.seq, row.queue, row.func_path, row.attempts, row.crashes, row.token, row.settled,
            row.started_at, row.status._value_, +row.cancel_requested, row.visible, row.owner,
            row.parked, +row.attached, row.due - row.order[1], ~row.priority, row.order[1],
            place_of(row, now),
            _rest(row),
        )
        for row in rows
    ]  # fmt: skip
    _SAVE_LIVE.write(db, live)


def rewrite(db: StatementRunner, rows: Iterable[Row]) -> None:
    """Store the queue, priority and body of live rows, which no other change has."""
    for row in rows:
        body = bytearray(row.body)
        db.execute(
            "UPDATE omniq_tasks SET queue = ?, priority = ?, body = ? WHERE seq = ?",
            (row.queue, row.priority, body, row.seq),
        )
        db.execute("UPDATE omniq_live SET queue = ? WHERE seq = ?", (row.queue, row.seq))


def _ended(row: Row) -> tuple[Any, ...]:
    return (
        row.seq, row.due, row.attempts, row.crashes, row.token, row.settled, row.started_at,
        row.status._value_, +row.cancel_requested, _rest(row),
    )  # fmt: skip


def insert_ended(db: StatementRunner, ended: Sequence[Ended]) -> None:
    """Replace live rows by their records and dead letters."""
    delete(db, "omniq_live", (each.row.seq for each in ended))
    finished = [each.finished for each in ended if each.row.result_ttl]
    _INSERT_FINISHED.write(
        db,
        [
            (*_ended(each.row), each.finished_at, each.expires_at, bytearray(each.result))
            for each in finished
        ],
    )
    if len(finished) == len(ended) and not any(each.letter for each in ended):
        return
    _INSERT_DEAD.write(
        db,
        [
            (
                *_ended(each.row), each.row.id, to_micros(each.letter.last_failure),
                each.letter.failure_reason, encode_internal(each.letter),
            )
            for each in ended
            if each.letter is not None
        ],
    )  # fmt: skip
    gone = [each.row.seq for each in ended if not each.row.result_ttl and each.letter is None]
    if gone:
        delete(db, "omniq_tasks", gone)


def delete(db: StatementRunner, table: str, seqs: Iterable[int]) -> None:
    """Delete the rows with these `seq`."""
    db.execute(
        f"DELETE FROM {table} WHERE seq IN (SELECT value FROM json_each(?))",
        (json_text(list(seqs)),),
    )


_SEQS = "SELECT seq FROM omniq_tasks WHERE id IN (SELECT value FROM json_each(:ids))"


def delete_records(
    db: StatementRunner, table: str, ids: Sequence[str], condition: str = "true", **values: Any
) -> None:
    """Delete finished records or dead letters, and the tasks of which nothing else is stored."""
    parameters = {"ids": json_text(ids), **values}
    db.execute(f"DELETE FROM {table} WHERE seq IN ({_SEQS}) AND {condition}", parameters)
    has_no_record = " ".join(
        f"AND NOT EXISTS (SELECT 1 FROM {other} AS state WHERE state.seq = omniq_tasks.seq)"
        for other in ("omniq_live", "omniq_finished", "omniq_dead")
    )
    db.execute(
        "DELETE FROM omniq_tasks WHERE id IN (SELECT value FROM json_each(:ids)) " + has_no_record,
        {"ids": parameters["ids"]},
    )
