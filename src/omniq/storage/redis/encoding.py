"""How rows are stored in Redis. The scripts get the positions of a place's parts from here.

The place of a task is one string that says where the task is and in which state. It has everything
that scripts read or change; no two states of a task have the same place, so a section that changes a
row names the place that it has read. All else is in the task's record, which is stored once, in its
state, which is stored when an outcome has changed it, and in what is stored at its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from operator import attrgetter
from typing import Any

import msgspec

from omniq.clock import to_micros
from omniq.errors import SerializationError, StorageCorrupt
from omniq.gate_rules import Gate
from omniq.models import StoredLetter, TaskStatus
from omniq.serialization import encode_internal, lenient_decoder
from omniq.storage import row_rules
from omniq.storage.backend import Ended, Record
from omniq.storage.row_codec import RowCodec, damaged_letter
from omniq.storage.row_rules import FinishedRow, Row

_PARTS = {
    "KIND": 1, "STATUS": 1, "CANCELLED": 1, "ATTACHED": 1, "SUSPECT": 1, "GATED": 1, "EXPIRING": 1,
    "PRIORITY": 20, "TURN": 18, "SEQ": 16, "DUE": 18, "VISIBLE": 18,
}  # fmt: skip
"""The parts of fixed size, in order, and their sizes. `lua/lib/places.lua` has the others."""


def _slices() -> dict[str, slice]:
    found: dict[str, slice] = {}
    start = 0
    for name, size in _PARTS.items():
        found[name] = slice(start, start + size)
        start += size
    found["ORDER"] = slice(found["PRIORITY"].start, found["SEQ"].stop)
    found["FIXED"] = slice(0, start)
    return found


SLICES = _slices()
_PRIORITY, _TURN, _SEQ, _DUE, _VISIBLE, _ORDER = (
    SLICES[name] for name in ("PRIORITY", "TURN", "SEQ", "DUE", "VISIBLE", "ORDER")
)
_STATUS, _CANCELLED, _ATTACHED = (
    SLICES[name].start for name in ("STATUS", "CANCELLED", "ATTACHED")
)
_FIXED = SLICES["FIXED"].stop

LUA_CONSTANTS = {
    name: value
    for part, place in SLICES.items()
    for name, value in (
        ((part, place.stop),)
        if place.stop - place.start == 1
        else ((f"{part}_FIRST", place.start + 1), (f"{part}_LAST", place.stop))
    )
}
"""The positions of the parts as Lua counts them."""

_TOP_PRIORITY = 2**63 - 1
_LONGEST_NUMBER = 16
"""Digits of a token or a time in a place: numbers stay below 2^53."""

_STAMP_OFFSET = 10**17
"""Added to an instant so that any datetime has 18 digits."""

_SHORT_PREFIXES = [bytes((0xA0 | size,) if size < 32 else (0xD9, size)) for size in range(256)]
"""The msgpack prefix of a string of that size."""

STATUS_LETTERS = {
    TaskStatus.PENDING: "p",
    TaskStatus.RUNNING: "r",
    TaskStatus.RETRYING: "t",
    TaskStatus.SUCCESS: "s",
    TaskStatus.FAILED: "f",
    TaskStatus.CANCELLED: "c",
}
STATUSES = {letter: status for status, letter in STATUS_LETTERS.items()}
_PENDING, _RUNNING, _SUCCESS = TaskStatus.PENDING, TaskStatus.RUNNING, TaskStatus.SUCCESS

_shared_fields = attrgetter(
    *(field for field in Row.__struct_fields__ if field not in ("id", "seq", "body"))
)
_codec = RowCodec(
    (
        *("id", "seq", "queue", "priority", "func_path", "due", "visible", "turn", "created_at"),
        *("status", "token", "owner", "cancel_requested", "parked", "attached", "expires"),
    )
)


class _StoredDead(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A dead letter, and the place and state that its task had."""

    letter: StoredLetter
    place: str
    state: bytes


_decode_dead = lenient_decoder(_StoredDead, None)


class _Gates(msgspec.Struct, frozen=True, gc=False):
    gates: tuple[Gate, ...] = ()


_decode_gates = lenient_decoder(_Gates, _Gates())


def stamp(instant: int) -> str:
    """18 digits that sort as instants do.

    >>> stamp(-1) < stamp(0) < stamp(10)
    True
    """
    return f"{instant + _STAMP_OFFSET:018d}"


def instant_of(digits: str) -> int:
    """The instant of a stamp.

    >>> instant_of(stamp(7))
    7
    """
    return int(digits) - _STAMP_OFFSET


def status_letter(status: TaskStatus) -> str:
    """The letter of a status. Most are one of three, and the hash of an enum takes long."""
    if status is _PENDING:
        return "p"
    if status is _RUNNING:
        return "r"
    return "s" if status is _SUCCESS else STATUS_LETTERS[status]


@lru_cache(1_000)
def _rank(priority: int) -> str:
    return f"{_TOP_PRIORITY - priority:020d}"


_EARLIEST, _LATEST = (
    stamp(to_micros(instant)).encode()
    for instant in (datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC))
)


def order_text(order: tuple[int, int, int]) -> str:
    """The part of a place that sorts as `Row.order` does."""
    lower, turn, seq = order
    return f"{_TOP_PRIORITY + lower:020d}{turn + _STAMP_OFFSET:018d}{seq:016d}"


def gate_name(key: str) -> str:
    """The key of a gate without slashes.

    >>> gate_name("rate:a/b%")
    'rate:a%2Fb%25'
    """
    return key.replace("%", "%25").replace("/", "%2F")


# Writing


def raw(data: bytes) -> msgspec.Raw:
    """Bytes that the scripts can read: as msgpack strings, since the server knows no binary type."""
    size = len(data)
    if size < 256:
        return msgspec.Raw(_SHORT_PREFIXES[size] + data)
    if size < 65_536:
        return msgspec.Raw(b"\xda" + size.to_bytes(2, "big") + data)
    return msgspec.Raw(b"\xdb" + size.to_bytes(4, "big") + data)


def place_of(row: Row, claim_id: str = "") -> str:
    """The place of a row that has not ended; `claim_id` is that of the claim that holds it."""
    if row.owner is not None:
        tail = f"{row.owner}/{row.started_at}/{claim_id}"
        return f"{_head('h', row)}{row.seq:016d}{foot_of(row)}{tail}"
    if row.parked is not None:
        return f"{_head('p', row)}{row.seq:016d}{foot_of(row)}{gate_name(row.parked)}"
    return f"{head_of(row)}{row.seq:016d}{foot_of(row)}"


def head_of(row: Row) -> str:
    """The place of a waiting row up to its `seq`."""
    return _head("w", row)


def _head(kind: str, row: Row) -> str:
    turn = row.due if row.turn is None else row.turn
    return (
        kind
        + status_letter(row.status)
        + ("1" if row.cancel_requested else "0")
        + ("1" if row.attached else "0")
        + ("1" if row.crashes else "0")
        + ("1" if row.gates or turn < 0 else "0")
        + ("0" if row.expires is None else "1")
        + _rank(row.priority)
        + f"{turn + _STAMP_OFFSET:018d}"
    )


def foot_of(row: Row) -> str:
    """The place of a row behind its `seq`, without its tail."""
    expires = "" if row.expires is None else stamp(row.expires)
    return (
        f"{row.due + _STAMP_OFFSET:018d}{row.visible + _STAMP_OFFSET:018d}"
        f"{row.token}/{row.queue}/{row.func_path}/{expires}/"
    )


def ended_place(ended: Ended) -> str:
    """The place of a row that has ended."""
    row, finished = ended.row, ended.finished
    times = f"{finished.finished_at}/{finished.expires_at}"
    return f"{_head('f', row)}{row.seq:016d}{foot_of(row)}{times}"


def state_of(row: Row) -> bytes:
    """What is stored of a row besides its place, `created_at` and its body."""
    return _codec.rest(row) or b"\x80"


def record_of(row: Row) -> bytes:
    """What is stored of a row once: when it was created, its state as enqueued, and its body."""
    return _record_start(row) + row.body


def _record_start(row: Row) -> bytes:
    state = state_of(row)
    return b"%018d/%d/%b" % (row.created_at + _STAMP_OFFSET, len(state), state)


def new_rows(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """New rows as `lua/lib/changes.lua` takes them: in groups that differ in ids and bodies only."""
    groups: list[tuple[Any, ...]] = []
    shared: tuple[Any, ...] = ()
    members: list[Any] = []
    for row in rows:
        its_own = _shared_fields(row)
        if its_own != shared:
            shared, members = its_own, []
            groups.append((head_of(row), foot_of(row), raw(_record_start(row)), members))
        members += (row.id, raw(row.body))
    return groups


def end_record(ended: Ended) -> bytes:
    """What is stored of a row at its end: its state and its result."""
    state = state_of(ended.row)
    return b"%d/%b%b" % (len(state), state, ended.finished.result)


def end_groups(endings: Sequence[Ended]) -> list[tuple[Any, ...]]:
    """Endings without dead letters as `lua/lib/endings.lua` takes them."""
    groups: dict[tuple[Any, ...], list[Any]] = {}
    shared: tuple[Any, ...] = ()
    members: list[Any] = []
    for ended in endings:
        row, finished = ended.row, ended.finished
        expires_at = finished.expires_at if row.result_ttl else 0
        # Compared with the last one first: the hash of an enum takes long.
        its_own = (
            *(row.queue, row.func_path, row.token, row.status),
            *(finished.finished_at, expires_at),
        )
        if its_own != shared:
            shared, members = its_own, groups.setdefault(its_own, [])
        members += (row.id, raw(end_record(ended)) if row.result_ttl else "")
    return [
        (queue, func_path, str(token), status_letter(status), str(finished_at), str(until), ended)
        for (queue, func_path, token, status, finished_at, until), ended in groups.items()
    ]


def limits_of(rows: Iterable[Row]) -> list[list[str | int]]:
    """The limits of these rows, each with the ids and tokens of those that leave it."""
    limits: dict[str, list[str | int]] = {}
    for row in rows:
        for gate in row.gates:
            limit = limits.get(gate.key)
            if limit is None:
                limit = limits[gate.key] = [gate.key, gate.kind, gate.size, gate.span]
            limit += (row.id, row.token)
    return list(limits.values())


def dead_record(ended: Ended) -> tuple[bytes, int]:
    """A dead letter with the row of its task, and when it failed."""
    assert ended.letter is not None
    stored = _StoredDead(ended.letter, ended_place(ended), state_of(ended.row))
    return encode_internal(stored), to_micros(ended.letter.last_failure)


# Reading


def read_row(task_id: str, place: bytes, record: bytes, state: bytes) -> Row:
    """A stored row. Raises `StorageCorrupt` when its place cannot be parsed."""
    try:
        created_at, enqueued, body = _read_record(record)
        start, end = place[: _TURN.start], place[_VISIBLE.start :]
        try:
            row = row_rules.copy_of(_without_order(start, end, state or enqueued))
        except SerializationError:
            # Not written by omniq. Without a body it cannot run; the owner that claims it records that.
            row, body = row_rules.copy_of(_without_order(start, end, b"")), b""
            # It leaves the limits that a script has counted it in.
            row.gates = _decode_gates(state or enqueued).gates
        turn, due = place[_TURN], place[_DUE]
        row.turn = row.due = _instant(turn)
        if due != turn:
            row.due = _instant(due)
        row.id, row.seq, row.created_at, row.body = task_id, int(place[_SEQ]), created_at, body
        return row
    except (ValueError, LookupError) as error:
        raise StorageCorrupt(f"task {task_id}: its place in Redis is damaged") from error


@lru_cache(1_000)
def _without_order(start: bytes, end: bytes, state: bytes) -> Row:
    """The fields that rows that are claimed together have in common: all but the order, id and body.

    `start` is a place up to the turn, `end` begins with when the row is visible.
    """
    row = _codec.without_columns(state)
    flags = start.decode()
    row.status = STATUSES[flags[_STATUS]]
    row.cancel_requested = flags[_CANCELLED] == "1"
    row.attached = flags[_ATTACHED] == "1"
    row.priority = _TOP_PRIORITY - int(flags[_PRIORITY])
    visible = _VISIBLE.stop - _VISIBLE.start
    row.visible = _instant(end[:visible])
    token, row.queue, row.func_path, expires, tail = end[visible:].decode().split("/", 4)
    row.token = _number(token)
    row.expires = _instant(expires.encode()) if expires else None
    if flags[0] == "h":
        row.owner, started_at, _ = tail.split("/", 2)
        row.started_at = _number(started_at)
    elif flags[0] == "p":
        row.parked = tail.replace("%2F", "/").replace("%25", "%")
    return row


def _number(digits: str) -> int:
    """A number that a damaged place may have made too long to be stored."""
    if len(digits) > _LONGEST_NUMBER:
        raise ValueError("a number is too long")
    return int(digits)


def _instant(digits: bytes) -> int:
    """The instant of a stamp in a place, which may be damaged."""
    if len(digits) != len(_LATEST) or not _EARLIEST <= digits <= _LATEST:
        raise ValueError("a time is out of range")
    return int(digits) - _STAMP_OFFSET


def _read_record(record: bytes) -> tuple[int, bytes, bytes]:
    try:
        created_at, size, rest = record.split(b"/", 2)
        length = int(size)
        return _instant(created_at), rest[:length], rest[length:]
    except ValueError:
        return 0, b"", b""


def read_rows(reply: list[bytes]) -> list[Row]:
    """The rows of a reply that has id, place, record and state of each."""
    return [
        read_row(task_id.decode(), place, record, state)
        for task_id, place, record, state in zip(*[iter(reply)] * 4, strict=True)
    ]


def read_finished(task_id: str, place: bytes, record: bytes, ended: bytes) -> FinishedRow:
    """The record of a task that has ended."""
    size, _, rest = ended.partition(b"/")
    length = int(size) if size.isdigit() else 0
    row = read_row(task_id, place, record, rest[:length])
    try:
        finished_at, expires_at = map(int, place.rsplit(b"/", 2)[1:])
    except ValueError as error:
        raise StorageCorrupt(f"task {task_id}: its place in Redis is damaged") from error
    return FinishedRow(
        row=row, finished_at=finished_at, expires_at=expires_at, result=rest[length:]
    )


def read_record(
    task_id: str, place: bytes, record: bytes, state: bytes, dead: bytes
) -> Record | None:
    """Everything that is stored under an id."""
    if place and place[:1] != b"f":
        return Record(read_row(task_id, place, record, state))
    finished = read_finished(task_id, place, record, state) if place else None
    if dead:
        stored = _decode_dead(dead)
        if stored is None or stored.letter.task_id != task_id:
            row = _codec.without_columns(b"") if finished is None else finished.row
            row.id = task_id
            return Record(row, finished, damaged_letter(task_id, row.func_path))
        row = read_row(task_id, stored.place.encode(), record, stored.state)
        return Record(row, finished, stored.letter)
    return None if finished is None else Record(finished.row, finished)


def read_letters(found: Iterable[bytes]) -> list[StoredLetter]:
    """Dead letters without their rows; one that cannot be decoded is left out."""
    return [stored.letter for stored in map(_decode_dead, found) if stored is not None]


def read_held(reply: list[bytes]) -> tuple[dict[str, int], frozenset[str]]:
    """Ids and tokens of the tasks that an owner holds, and the ids of those that were cancelled."""
    held: dict[str, int] = {}
    cancelled: set[str] = set()
    for task_id, place in zip(reply[::2], reply[1::2], strict=True):
        token = place[_FIXED:].partition(b"/")[0]
        if token.isdigit():
            held[task_id.decode()] = int(token)
            if place[_CANCELLED : _CANCELLED + 1] == b"1":
                cancelled.add(task_id.decode())
    return held, frozenset(cancelled)


def pairs(reply: list[Any]) -> list[tuple[Any, Any]]:
    """The values of a reply in twos."""
    return list(zip(reply[::2], reply[1::2], strict=True))
