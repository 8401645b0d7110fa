"""Encodes rows as Redis stores them, and decodes them. `lua/lib/places.lua` defines a place."""

from __future__ import annotations

from typing import Any

import msgspec

from omniq.clock import to_micros
from omniq.errors import StorageCorrupt
from omniq.gate_rules import Gate
from omniq.models import Attempt, DeadLetter, TaskStatus
from omniq.serialization import encode_internal, internal_decoder, lenient_decoder
from omniq.storage.redis.scripts import raw
from omniq.storage.row_rules import FinishedRow, Instant, Row

_TOP_PRIORITY = 2**63 - 1
_STAMP_OFFSET = 10**17
"""Added to an instant so that any datetime has 18 digits."""

STAMP_SIZE = 18
"""Characters of a stamp, which stands in front of stored dead letters and checkpoints."""

STATUS_LETTERS = {
    TaskStatus.PENDING: "p",
    TaskStatus.RUNNING: "r",
    TaskStatus.RETRYING: "t",
    TaskStatus.SUCCESS: "s",
    TaskStatus.FAILED: "f",
    TaskStatus.CANCELLED: "c",
}
SUCCEEDED = STATUS_LETTERS[TaskStatus.SUCCESS]
STATUSES = {letter: status for status, letter in STATUS_LETTERS.items()}


class PlaceSlices:
    """The parts of a place between the slash behind the queue and the next slash.

    `lua/lib/places.lua` has the same parts, counted from 1; a test compares the two.
    """

    PRIORITY = slice(0, 20)
    DUE = slice(20, 38)
    SEQUENCE = slice(38, 54)
    ORDER = slice(0, 54)
    STATUS = slice(54, 55)
    VISIBLE = slice(55, 56)
    CONDITIONS = slice(56, 57)
    SUSPECT = slice(57, 58)
    CANCEL_REQUESTED = slice(58, 59)
    SETTLED = slice(59, 60)
    TOKEN = slice(60, None)


_ORDER_SIZE = PlaceSlices.ORDER.stop
_FLAGS_KEPT_BY_SUCCESS = PlaceSlices.CANCEL_REQUESTED.stop - PlaceSlices.VISIBLE.start


class _Fixed(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The parts of a task that never change, except for its function and the nonce."""

    priority: int
    created_at: Instant
    result_ttl: int
    body: bytes
    attempts: int = 0
    repeats: bool = False
    unique: str | None = None
    expires: Instant | None = None
    gates: tuple[Gate, ...] = ()


class _State(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The parts of a task that outcomes change, except for its place. `result`: only once it ended."""

    attempts: int
    crashes: int
    releases: int
    settled: int
    started_at: Instant
    history: tuple[Attempt, ...] = ()
    result: bytes = b""


class _StoredDeadLetter(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A dead letter, and the place and state that its task had."""

    letter: DeadLetter
    place: str
    state: _State


_UNREADABLE = "unreadable.record"

_decode_fixed = internal_decoder(_Fixed)
_decode_state = internal_decoder(_State)
_decode_state_or_none = lenient_decoder(_State, None)
_decode_dead = internal_decoder(_StoredDeadLetter)


class StoredRow(msgspec.Struct):
    """A task as it is stored: its row, its place, and its end if it has ended."""

    row: Row
    place: str
    finished: FinishedRow | None = None

    @property
    def claim_id(self) -> str:
        """The id of the claim that holds the task."""
        return self.place.split("/", 4)[4]


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


# Writing


def new_row(row: Row) -> tuple[Any, ...]:
    """A row as `lua/lib/insert.lua` takes it: a new task, or the retried task of a dead letter."""
    conditions = _conditions(row) if row.gates or row.expires is not None else ""
    return (
        row.id, raw(_record(row)), row.queue, _rank(row), _flags(row), row.token,
        row.unique or "", conditions, raw(encode_state(row)) if row.token else "",
    )  # fmt: skip


def _record(row: Row) -> bytes:
    """`function nonce-length nonce` and the rest: the parts that scripts read come first."""
    fixed = _Fixed(
        row.priority, row.created_at, row.result_ttl, row.body, row.attempts, row.repeats,
        row.unique, row.expires, row.gates,
    )  # fmt: skip
    nonce = row.nonce.encode("utf-8", "surrogatepass")
    return b"%b %d %b%b" % (row.func_path.encode(), len(nonce), nonce, encode_internal(fixed))


def _conditions(row: Row) -> msgspec.Raw:
    expires = "" if row.expires is None else stamp(row.expires)
    gates = [msgspec.structs.astuple(gate) for gate in row.gates]
    return raw(msgspec.msgpack.encode((expires, gates)))


def _rank(row: Row) -> str:
    return f"{_TOP_PRIORITY - row.priority:020d}{row.due + _STAMP_OFFSET:018d}"


def _flags(row: Row) -> str:
    return (
        STATUS_LETTERS[row.status]
        + ("1" if row.visible else "0")
        + ("1" if row.gates or row.expires is not None else "0")
        + ("1" if row.crashes else "0")
        + ("1" if row.cancel_requested else "0")
        + ("1" if row.settled == row.token and row.token else "0")
    )


def _core(row: Row) -> str:
    return f"{row.queue}/{_rank(row)}{row.seq:016d}{_flags(row)}{row.token}"


def live_place(row: Row, claim_id: str = "") -> str:
    """The place of a row that has not ended; `claim_id` is that of the claim that holds it."""
    if row.owner is not None:
        return f"h{_core(row)}/{row.owner}/{row.started_at}/{claim_id}"
    if row.parked is not None:
        gate = row.parked.replace("%", "%25").replace("/", "%2F")
        return f"p{_core(row)}/{gate}"
    return f"{'s' if row.is_suspect else 'r'}{_core(row)}/"


def ended_place(row: Row, before: str, now: int) -> str:
    """The place of a row that has just ended, was at `before`, and so has the same order."""
    return f"f{before[1 : _status_at(row)]}{_flags(row)}{row.token}/{ended_times(row, now)}"


def succeeded_place(row: Row, before: str, times: str) -> str:
    """`ended_place` of a held row that succeeded: only the first and last of its flags change."""
    status_at = _status_at(row)
    flags = before[status_at + 1 : status_at + 1 + _FLAGS_KEPT_BY_SUCCESS]
    return f"f{before[1:status_at]}{SUCCEEDED}{flags}1{row.token}/{times}"


def ended_times(row: Row, now: int) -> str:
    """The last part of the place of a row that ended at `now`."""
    return f"{now}/{now + row.result_ttl}"


def _status_at(row: Row) -> int:
    """The position of the status in a place: behind the kind, the queue, its slash and the order."""
    return 1 + len(row.queue) + 1 + _ORDER_SIZE


def encode_state(row: Row, result: bytes = b"") -> bytes:
    """The parts of a row that outcomes change."""
    return encode_internal(
        _State(
            row.attempts, row.crashes, row.releases, row.settled, row.started_at, row.history, result
        )
    )  # fmt: skip


def encode_dead(letter: DeadLetter, row: Row) -> bytes:
    """A dead letter with the row of its task, behind the stamp of its last failure."""
    stored = _StoredDeadLetter(letter, f"f{_core(row)}/", _decode_state(encode_state(row)))
    return stamp(to_micros(letter.last_failure)).encode() + encode_internal(stored)


# Reading


def stored_row(task_id: str, place: bytes, record: bytes, state: bytes) -> StoredRow:
    """A stored task. Raises `StorageCorrupt` when its place cannot be parsed."""
    try:
        return _stored_row(task_id, place.decode(), record, state)
    except (ValueError, LookupError) as error:
        raise StorageCorrupt(f"task {task_id}: its place in Redis is damaged") from error


def _stored_row(task_id: str, place: str, record: bytes, state: bytes) -> StoredRow:
    known = _decode_state_or_none(state) if state else None
    row = _row(task_id, place, record, known)
    if place[0] != "f":
        return StoredRow(row, place)
    finished_at, expires_at = place.split("/")[2:4]
    finished = FinishedRow(
        row=row,
        finished_at=int(finished_at),
        expires_at=int(expires_at),
        result=b"" if known is None else known.result,
    )
    return StoredRow(row, place, finished)


def stored_rows(reply: list[bytes]) -> list[StoredRow]:
    """The tasks of a reply that has id, place, record and state of each."""
    return [
        stored_row(reply[n].decode(), reply[n + 1], reply[n + 2], reply[n + 3])
        for n in range(0, len(reply), 4)
        if reply[n + 2]
    ]


def decode_dead(encoded: bytes, record: bytes) -> tuple[DeadLetter, Row]:
    """A dead letter, and the row from which its task can be retried."""
    stored = _decode_dead(encoded[STAMP_SIZE:])
    task_id = stored.letter.task_id
    try:
        return stored.letter, _row(task_id, stored.place, record, stored.state)
    except (ValueError, LookupError) as error:
        raise StorageCorrupt(f"task {task_id}: its place in Redis is damaged") from error


def decode_dead_letter(encoded: bytes) -> DeadLetter:
    """A dead letter without its row."""
    return _decode_dead(encoded[STAMP_SIZE:]).letter


def _row(task_id: str, place: str, record: bytes, state: _State | None) -> Row:
    parts = place.split("/", 4)
    core = parts[1]
    func_path, nonce, fixed = _read_record(record)
    due = int(core[PlaceSlices.DUE]) - _STAMP_OFFSET
    row = Row(
        id=task_id,
        seq=int(core[PlaceSlices.SEQUENCE]),
        nonce=nonce,
        queue=parts[0][1:],
        priority=fixed.priority,
        func_path=func_path,
        body=fixed.body,
        due=due,
        visible=due if core[PlaceSlices.VISIBLE] == "1" else 0,
        created_at=fixed.created_at,
        status=STATUSES[core[PlaceSlices.STATUS]],
        attempts=fixed.attempts,
        token=int(core[PlaceSlices.TOKEN]),
        cancel_requested=core[PlaceSlices.CANCEL_REQUESTED] == "1",
        repeats=fixed.repeats,
        unique=fixed.unique,
        expires=fixed.expires,
        result_ttl=fixed.result_ttl,
        gates=fixed.gates,
    )
    if state is not None:
        row.attempts, row.crashes, row.releases = state.attempts, state.crashes, state.releases
        row.settled, row.started_at, row.history = state.settled, state.started_at, state.history
    if place[0] == "h":
        row.owner, row.started_at = parts[2], int(parts[3])
    elif place[0] == "p":
        row.parked = parts[2].replace("%2F", "/").replace("%25", "%")
    return row


def _read_record(record: bytes) -> tuple[str, str, _Fixed]:
    try:
        func_path, length, rest = record.split(b" ", 2)
        size = int(length)
        nonce = rest[:size].decode("utf-8", "surrogatepass")
        return func_path.decode(), nonce, _decode_fixed(rest[size:])
    except ValueError:
        # Not written by omniq. Without a body it cannot run; the owner that claims it records that.
        return _UNREADABLE, "", _Fixed(0, 0, 0, b"")
