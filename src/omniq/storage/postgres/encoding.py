"""Encoding: rows as columns of the tables, and back; changes as parameters of the SQL functions.

`rest` has all fields of a row that no statement uses (`RowCodec`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from omniq.clock import to_micros
from omniq.errors import SerializationError
from omniq.models import Runnable, TaskStatus
from omniq.serialization import encode_internal
from omniq.storage.backend import ANY, DocumentChange, Ended
from omniq.storage.row_codec import RowCodec
from omniq.storage.row_rules import Row

STATUSES = tuple(TaskStatus)
"""The statuses, indexed by their numbers in the tables."""

STATUS_NUMBERS = {status: number for number, status in enumerate(STATUSES)}

_CODEC = RowCodec(
    (
        "id", "seq", "queue", "func_path", "priority", "turn", "due", "visible", "created_at",
        "expires", "token", "settled", "started_at", "crashes", "status", "cancel_requested",
        "attached", "owner", "parked",
    )
)  # fmt: skip
_NAMES = ["rank" if name == "priority" else name for name in _CODEC.columns]
_WIDTH = len(_CODEC.columns)
_PRIORITY, _TURN, _STATUS = map(_CODEC.columns.index, ("priority", "turn", "status"))

_SHARED = (
    "id, seq, queue, func_path, rank, turn, due, visible, created_at, expires, token, settled, "
    "started_at, crashes, status, cancel_requested, "
)
LIVE_COLUMNS = f"{_SHARED} attached, owner, parked, rest, body"
LIVE_COLUMNS_WITHOUT_BODY = f"{_SHARED} attached, owner, parked, rest, ''::bytea AS body"
ENDED_COLUMNS = (
    f"{_SHARED} false AS attached, NULL::text AS owner, NULL::text AS parked, rest, body"
)
ENDED_COLUMNS_WITHOUT_BODY = ENDED_COLUMNS.replace("rest, body", "rest, ''::bytea AS body")
"""The columns that `row_from` expects: of `live`, and of `finished` and `dead`."""


def row_from(record: Sequence[Any]) -> Row:
    """Build the row from the columns above. More columns may follow them."""
    values = list(record[:_WIDTH])
    values[_PRIORITY] = ~values[_PRIORITY]
    values[_STATUS] = STATUSES[values[_STATUS]]
    try:
        return _CODEC.row(values, record[_WIDTH], record[_WIDTH + 1])
    except SerializationError:
        # A task whose limits cannot be decoded must not run: without a body it cannot.
        return _CODEC.row(values, b"")


def row_from_names(record: dict[str, Any]) -> Row:
    """Build the row without its body from the columns by their names, where bytes are hexadecimal."""
    return row_from([*map(record.get, _NAMES), unhex(record["rest"]), b""])


def unhex(text: str) -> bytes:
    """The bytes that PostgreSQL has written in hexadecimal form."""
    return bytes.fromhex(text.removeprefix("\\x"))


def task(row: Row, *, body: bool = False) -> tuple[Any, ...]:
    """The row as a value of the SQL type `task`."""
    values = list(_CODEC.values(row))
    values[_PRIORITY] = ~row.priority
    values[_STATUS] = STATUS_NUMBERS[row.status]
    values[_TURN] = row.due if row.turn is None else row.turn
    return (*values, _CODEC.rest(row), row.body if body else None, _gate_keys(row), None)


def new_task(row: Row) -> tuple[Any, ...]:
    """A row that was never claimed as a value of the SQL type `new_task`."""
    return (
        row.id,
        row.queue,
        row.func_path,
        ~row.priority,
        row.due if row.turn is None else row.turn,
        row.due,
        row.visible,
        row.created_at,
        row.expires,
        _CODEC.rest(row),
        row.body,
        _gate_keys(row),
    )


NEW_TASK_FIELDS = (
    "id", "queue", "func_path", "rank", "turn", "due", "visible", "created_at", "expires", "rest",
    "body", "gates",
)  # fmt: skip
"""The names of the values of a `new_task`."""


def _gate_keys(row: Row) -> list[str] | None:
    return [gate.key for gate in row.gates] if row.gates else None


def ending(ended: Ended, *, is_known: bool = False) -> tuple[Any, ...]:
    """The end of a row as a value of the SQL type `ending`.

    `is_known`: the rest of the row is stored already, because the task has not failed.
    """
    finished, letter = ended.finished, ended.letter
    row = finished.row
    dead: tuple[bytes | None, int | None, str | None] = (None, None, None)
    if letter is not None:
        dead = (encode_internal(letter), to_micros(letter.last_failure), letter.failure_reason)
    return (
        row.id,
        row.token,
        row.settled,
        row.crashes,
        STATUS_NUMBERS[row.status],
        None if is_known else _CODEC.rest(row),
        finished.result,
        finished.finished_at,
        finished.expires_at if row.result_ttl else None,
        *dead,
    )


def document_changes(changes: Iterable[DocumentChange]) -> list[tuple[Any, ...]]:
    """Changes as values of the SQL type `document_change`: each key once, in the order of the keys."""
    merged: dict[tuple[str, str], DocumentChange] = {}
    for change in changes:
        first = merged.get((change.kind, change.key), change)
        merged[change.kind, change.key] = DocumentChange(
            change.kind, change.key, first.before, change.after, change.due, first.if_equal
        )
    return [_document_change(merged[key]) for key in sorted(merged)]


def _document_change(change: DocumentChange) -> tuple[Any, ...]:
    condition = 1 if change.before is ANY else 2 if change.if_equal else 0
    before = None if condition == 1 else change.before
    return (change.kind, change.key, before, change.after, change.due, condition)


DOCUMENT_FIELDS = ("kind", "key", "before", "after", "due", "condition")
"""The names of the values of a `document_change`."""

_AFTER_ALL = "\U0010ffff"


def function_ranges(runnable: Runnable | None) -> tuple[list[str], list[str], list[str]]:
    """The functions that a claim wants: ranges of names, from and before which, and excluded names.

    >>> function_ranges(Runnable(modules=("a", "a.b"), names=frozenset({"c.d", "a.e"})))
    (['a.', 'c.d'], ['a/', 'c.d '], [])
    """
    if runnable is None or runnable.modules is None:
        excluded = [] if runnable is None else sorted(runnable.excluded)
        return [""], [_AFTER_ALL], excluded
    # "/" is the character after ".", and no name has a character as low as " ".
    modules = sorted((f"{module}.", f"{module}/") for module in runnable.modules)
    ranges: list[tuple[str, str]] = []
    for low, high in modules:
        if not ranges or low >= ranges[-1][1]:
            ranges.append((low, high))
    ranges += [
        (name, f"{name} ")
        for name in sorted(runnable.names)
        if not any(low <= name < high for low, high in ranges)
    ]
    return [low for low, _ in ranges], [high for _, high in ranges], sorted(runnable.excluded)
