"""Rows to what Redis keeps of them, and back. `lua/places.lua` says what a place is made of."""

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
_ZERO = 10**17
"""Added to an instant so that any datetime has 18 digits."""

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


class _Fixed(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What never changes of a task, besides its function and the nonce."""

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
    """What outcomes change of a task, besides its place. `result` only of one that has ended."""

    attempts: int
    crashes: int
    releases: int
    settled: int
    started_at: Instant
    history: tuple[Attempt, ...] = ()
    result: bytes = b""


class _Grave(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A dead letter, and where and how its task was."""

    letter: DeadLetter
    place: str
    state: _State


_UNREADABLE = "unreadable.record"

_decode_fixed = internal_decoder(_Fixed)
_decode_state = internal_decoder(_State)
_decode_state_or_none = lenient_decoder(_State, None)
_decode_grave = internal_decoder(_Grave)


class Kept(msgspec.Struct):
    """A task as it is on record: its row, its place, and its end if it has ended."""

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
    return f"{instant + _ZERO:018d}"


def instant_of(digits: str) -> int:
    """The instant of a stamp.

    >>> instant_of(stamp(7))
    7
    """
    return int(digits) - _ZERO


# Writing


def new_row(row: Row) -> tuple[Any, ...]:
    """A row as `lua/inserting.lua` takes it, fresh or revived."""
    terms = _terms(row) if row.gates or row.expires is not None else ""
    return (
        row.id, raw(_record(row)), row.queue, _rank(row), _flags(row), row.token,
        row.unique or "", terms, raw(state_of(row)) if row.token else "",
    )  # fmt: skip


def _record(row: Row) -> bytes:
    """`function nonce-length nonce` and the rest: what scripts look for stands in front."""
    fixed = _Fixed(
        row.priority, row.created_at, row.result_ttl, row.body, row.attempts, row.repeats,
        row.unique, row.expires, row.gates,
    )  # fmt: skip
    nonce = row.nonce.encode("utf-8", "surrogatepass")
    return b"%b %d %b%b" % (row.func_path.encode(), len(nonce), nonce, encode_internal(fixed))


def _terms(row: Row) -> msgspec.Raw:
    expires = "" if row.expires is None else stamp(row.expires)
    gates = [msgspec.structs.astuple(gate) for gate in row.gates]
    return raw(msgspec.msgpack.encode((expires, gates)))


def _rank(row: Row) -> str:
    return f"{_TOP_PRIORITY - row.priority:020d}{row.due + _ZERO:018d}"


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
    """Where a row belongs that has not ended; `claim_id` is that of the claim that holds it."""
    if row.owner is not None:
        return f"h{_core(row)}/{row.owner}/{row.started_at}/{claim_id}"
    if row.parked is not None:
        gate = row.parked.replace("%", "%25").replace("/", "%2F")
        return f"p{_core(row)}/{gate}"
    return f"{'s' if row.is_suspect else 'r'}{_core(row)}/"


def ended_place(row: Row, before: str, now: int) -> str:
    """Where a row belongs that has just ended at `before`: ending does not change its order."""
    return f"f{before[1 : _end_of_order(row)]}{_flags(row)}{row.token}/{times_of(row, now)}"


def succeeded_place(row: Row, before: str, times: str) -> str:
    """`ended_place` of a held row that did well: of its flags, the first and the last have changed."""
    order = _end_of_order(row)
    return f"f{before[1:order]}{SUCCEEDED}{before[order + 1 : order + 5]}1{row.token}/{times}"


def times_of(row: Row, now: int) -> str:
    """The end of the place of a row that has ended."""
    return f"{now}/{now + row.result_ttl}"


def _end_of_order(row: Row) -> int:
    return len(row.queue) + 56


def state_of(row: Row, result: bytes = b"") -> bytes:
    """What outcomes have changed."""
    return encode_internal(
        _State(
            row.attempts, row.crashes, row.releases, row.settled, row.started_at, row.history, result
        )
    )  # fmt: skip


def grave_of(letter: DeadLetter, row: Row) -> bytes:
    """A dead letter with the row it came from, behind the stamp of its last failure."""
    grave = _Grave(letter, f"f{_core(row)}/", _decode_state(state_of(row)))
    return stamp(to_micros(letter.last_failure)).encode() + encode_internal(grave)


# Reading


def kept_of(task_id: str, place: bytes, record: bytes, state: bytes) -> Kept:
    """A task that is on record. `StorageCorrupt` when its place is none."""
    try:
        return _kept(task_id, place.decode(), record, state)
    except (ValueError, LookupError) as error:
        raise StorageCorrupt(f"task {task_id}: what Redis has of its place is damaged") from error


def _kept(task_id: str, text: str, record: bytes, state: bytes) -> Kept:
    known = _decode_state_or_none(state) if state else None
    row = _row(task_id, text, record, known)
    if text[0] != "f":
        return Kept(row, text)
    finished_at, expires_at = text.split("/")[2:4]
    finished = FinishedRow(
        row=row,
        finished_at=int(finished_at),
        expires_at=int(expires_at),
        result=b"" if known is None else known.result,
    )
    return Kept(row, text, finished)


def kept_rows(reply: list[bytes]) -> list[Kept]:
    """The tasks of a reply with id, place, record and state of each."""
    return [
        kept_of(reply[n].decode(), reply[n + 1], reply[n + 2], reply[n + 3])
        for n in range(0, len(reply), 4)
        if reply[n + 2]
    ]


def read_grave(grave: bytes, record: bytes) -> tuple[DeadLetter, Row]:
    """A dead letter, and the row that its task is to be revived from."""
    kept = _decode_grave(grave[18:])
    task_id = kept.letter.task_id
    try:
        return kept.letter, _row(task_id, kept.place, record, kept.state)
    except (ValueError, LookupError) as error:
        raise StorageCorrupt(f"task {task_id}: what Redis has of its place is damaged") from error


def read_letter(grave: bytes) -> DeadLetter:
    """A dead letter without its row."""
    return _decode_grave(grave[18:]).letter


def _row(task_id: str, place: str, record: bytes, state: _State | None) -> Row:
    parts = place.split("/", 4)
    core = parts[1]
    func_path, nonce, fixed = _read_record(record)
    due = int(core[20:38]) - _ZERO
    row = Row(
        id=task_id,
        seq=int(core[38:54]),
        nonce=nonce,
        queue=parts[0][1:],
        priority=fixed.priority,
        func_path=func_path,
        body=fixed.body,
        due=due,
        visible=due if core[55] == "1" else 0,
        created_at=fixed.created_at,
        status=STATUSES[core[54]],
        attempts=fixed.attempts,
        token=int(core[60:]),
        cancel_requested=core[58] == "1",
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
        # Not one of ours. Without a body it cannot run, and whoever claims it finds that out.
        return _UNREADABLE, "", _Fixed(0, 0, 0, b"")
