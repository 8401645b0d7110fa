"""Encoding: rows as columns of the tables, and back; changes as parameters of the SQL functions.

`rest` has all fields of a row that no statement uses (`RowCodec`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

from omniq.clock import to_micros
from omniq.errors import SerializationError
from omniq.gate_rules import Gate
from omniq.models import Runnable, TaskStatus
from omniq.serialization import encode_internal
from omniq.storage.backend import ANY, DocumentChange, Ended
from omniq.storage.row_codec import RowCodec
from omniq.storage.row_rules import Row
from omniq.storage.types import Claim


class _Statuses(dict[int, TaskStatus]):
    """Statuses by their numbers. A number that omniq does not write must not make a list fail."""

    def __missing__(self, number: int) -> TaskStatus:
        return TaskStatus.PENDING


STATUSES = _Statuses(enumerate(TaskStatus))
"""The statuses, indexed by their numbers in the tables."""

GATE_KINDS = frozenset(("running",))
"""The gates that the SQL function `record_outcomes_and_claim` applies."""

NOTHING_LEFT: tuple[list[Any], ...] = ([], [], [], [])
"""No row leaves a limit: a value of the SQL type `leaving`."""

STATUS_NUMBERS = {status: number for number, status in STATUSES.items()}

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
_QUOTED = re.compile(r'["\\]')
_claim_order = itemgetter(4, 5, 1)
"""The rank, turn and seq of a line that `claimed_rows` reads."""

_BYTES = "{schema}.fitting(rest), {schema}.fitting(body)"
LIVE_COLUMNS = f"{_SHARED} attached, owner, parked, {_BYTES}"
ENDED_COLUMNS = f"{_SHARED} false AS attached, NULL::text AS owner, NULL::text AS parked, {_BYTES}"
"""The columns that `row_from` expects: of `live`, and of `finished` and `dead`."""


def row_from(record: Sequence[Any], gates: Sequence[str] | None = None) -> Row:
    """Build the row from the columns above. More columns may follow them.

    `gates`: that column, which says which limits a row may have entered whose other fields cannot be decoded.
    """
    row, body = _blank(record[_WIDTH], record[_WIDTH + 1], gates)
    row.body = body
    (
        row.id, row.seq, row.queue, row.func_path, rank, row.turn, row.due, row.visible,
        row.created_at, row.expires, row.token, row.settled, row.started_at, row.crashes, status,
        row.cancel_requested, row.attached, row.owner, row.parked,
    ) = record[:_WIDTH]  # fmt: skip
    row.priority = ~rank
    row.status = STATUSES[status]
    return row


def _blank(rest: bytes, body: bytes, gates: Sequence[str] | None = None) -> tuple[Row, bytes]:
    """A row with the fields of `rest`, and the body."""
    try:
        return _CODEC.without_columns(rest), body
    except SerializationError:
        # A task whose limits cannot be decoded must not run: without a body it cannot.
        row = _CODEC.without_columns(b"")
        row.gates = gates_in(gates)
        return row, b""


def claimed_rows(lines: Iterable[Sequence[Any]], owner: str, now: int) -> list[Row]:
    """The rows that the SQL function `record_outcomes_and_claim` has claimed, in claim order."""
    rows: list[Row] = []
    # A tuple is divided several times faster than the driver's record.
    for values in sorted([line[:] for line in lines], key=_claim_order):
        row, body = _blank(values[-2], values[-1])
        (
            row.id, row.seq, row.queue, row.func_path, rank, row.turn, row.due, row.visible,
            row.created_at, row.expires, row.token, row.settled, row.attached, _, _,
        ) = values  # fmt: skip
        row.priority, row.body = ~rank, body
        row.status, row.owner, row.started_at = TaskStatus.RUNNING, owner, now
        rows.append(row)
    return rows


def row_from_names(record: dict[str, Any]) -> Row:
    """Build the row from the columns by their names, where bytes are hexadecimal; its body may be left out."""
    body = unhex(record.get("body", ""))
    return row_from([*map(record.get, _NAMES), unhex(record["rest"]), body])


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
    turn = row.due if row.turn is None else row.turn
    return (
        row.id, row.body, row.queue, row.func_path, ~row.priority, turn, row.due, row.visible,
        row.created_at, _CODEC.rest(row), row.expires, _gate_keys(row),
    )  # fmt: skip


def new_tasks(rows: Sequence[Row]) -> tuple[list[Any], ...]:
    """Rows that were never claimed as a value of the SQL type `new_tasks`."""
    return (
        id_array([row.id for row in rows]),
        [row.body for row in rows],
        same([row.queue for row in rows]),
        same([row.func_path for row in rows]),
        same([~row.priority for row in rows]),
        same([row.due if row.turn is None else row.turn for row in rows]),
        same([row.due for row in rows]),
        same([row.visible for row in rows]),
        same([row.created_at for row in rows]),
        same([_CODEC.rest(row) for row in rows]),
        _any([row.expires for row in rows]),
        _any([None if (keys := _gate_keys(row)) is None else (keys,) for row in rows]),
    )


NEW_TASKS_FIELDS = (
    "ids", "bodies", "queues", "func_paths", "ranks", "turns", "dues", "visibles", "created_at",
    "rests", "expires", "gates",
)  # fmt: skip
"""The names of the values of `new_tasks`."""


def id_array(ids: list[str]) -> list[str]:
    """The ids as a parameter for the SQL function `ids_of`: the text of an array, as the only element of one.

    The driver checks each element of an array with the abstract classes of Python, which takes longer than
    all else that is done for an id.

    >>> id_array(["a", "b"]), id_array([])
    (['{"a","b"}'], [])
    """
    if not ids:
        return []
    text = '","'.join(ids)
    if "\\" in text or text.count('"') > 2 * len(ids) - 2:
        # Not an id of a task that omniq has enqueued.
        text = '","'.join([_QUOTED.sub(r"\\\g<0>", task_id) for task_id in ids])
    return [f'{{"{text}"}}']


def same(column: list[Any]) -> list[Any]:
    """The column, or only its first value if all are equal. None of them may be None.

    >>> same([3, 3]), same([3, 4]), same([])
    ([3], [3, 4], [])
    """
    return column[:1] if column[1:] == column[:-1] else column


def _any(column: list[Any]) -> list[Any]:
    """The column, or nothing if all of its values are None."""
    return [] if column.count(None) == len(column) else column


def _gate_keys(row: Row) -> list[str] | None:
    """The keys of the row's gates, and their sizes if all are running limits: see `0008_limits.sql`."""
    gates = row.gates
    if not gates:
        return None
    keys = [gate.key for gate in gates]
    if all(gate.kind in GATE_KINDS and gate.cost == 1 for gate in gates):
        keys += [f"={gate.size}" for gate in gates]
    return keys


def gates_in(column: Sequence[str] | None) -> tuple[Gate, ...]:
    """The running limits that a row without readable fields may have entered."""
    keys = column or ()
    sizes = [int(key[1:]) for key in keys if re.fullmatch(r"=[0-9]{1,18}", key)]
    return tuple(Gate(key, "running", size) for key, size in zip(keys, sizes, strict=False))


def leaving(rows: Iterable[Row]) -> tuple[list[Any], ...]:
    """The running limits of these rows, and the rows that leave them, as a value of the SQL type `leaving`."""
    limits: dict[str, tuple[int, list[bytes]]] = {}
    for row in rows:
        for gate in row.gates:
            _, holders = limits.setdefault(gate.key, (gate.size, []))
            holders.append(encode_internal((row.id, row.token)))
    if not limits:
        return NOTHING_LEFT
    left = limits.values()
    return (
        id_array(list(limits)),
        same([size for size, _ in left]),
        same([len(holders) for _, holders in left]),
        [b"".join(holders) for _, holders in left],
    )


def endings(ended: Sequence[Ended], holders: Sequence[str]) -> tuple[list[Any], ...]:
    """The ends of rows as a value of the SQL type `endings`.

    `holders`: the owner that must still hold each row, as it was claimed; empty for a row that is locked.
    """
    records = [each.finished for each in ended]
    rows = [record.row for record in records]
    letters = [each.letter for each in ended]
    has_letters = any(letters)
    return (
        id_array([row.id for row in rows]),
        [record.result for record in records],
        same(list(holders)),
        same([row.token for row in rows]),
        same([row.settled for row in rows]),
        same([row.crashes for row in rows]),
        same([STATUS_NUMBERS[row.status] for row in rows]),
        same([record.finished_at for record in records]),
        same([record.expires_at if record.row.result_ttl else 0 for record in records]),
        # A success changes nothing in the rest of a row as it was claimed. A failure in the same step, which may
        # come before the success, does, and is in the history.
        _any(
            [
                None
                if holder and row.status is TaskStatus.SUCCESS and not row.history
                else _CODEC.rest(row)
                for row, holder in zip(rows, holders, strict=True)
            ]
        ),
        [each and encode_internal(each) for each in letters] if has_letters else [],
        [each and to_micros(each.last_failure) for each in letters] if has_letters else [],
        [each and each.failure_reason for each in letters] if has_letters else [],
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


def claim(given: Claim, wanted: tuple[Any, ...], *, name: str, beat: int) -> tuple[Any, ...]:
    """A claim of wanted tasks as a value of the SQL type `claim`."""
    witness = given.witness
    return (
        given.limit,
        given.now,
        wanted,
        name,
        beat,
        None if witness is None else witness.id,
        None if witness is None else witness.token,
    )


def wanted_tasks(queues: Sequence[str] | None, runnable: Runnable | None) -> tuple[Any, ...]:
    """Which tasks a claim may take, as a value of the SQL type `wanted_tasks`."""
    return (None if queues is None else list(queues), *function_ranges(runnable))


@lru_cache(maxsize=16)
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
