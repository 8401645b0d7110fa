"""What is inside a file: a header with version, length and checksum, then one of omniq's records.

    offset  0  "omnq"        4  version      5  kind      6  two zero bytes
            8  length        12 CRC-32 of the first 12 bytes and the payload
            16 payload (MessagePack)

A file that is empty, cut short, longer than it says, changed in any bit, of another kind or of a
later version is not a record: `NotARecord` says why, and the file is set aside, never trusted.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from enum import IntEnum
from typing import Generic, TypeVar

import msgspec

from omniq.errors import SerializationError
from omniq.gate_rules import Gate, GateState
from omniq.models import DeadLetter, Progress, Schedule, TaskStatus, WorkerInfo
from omniq.serialization import encode_internal, internal_decoder
from omniq.storage.row_rules import FinishedRow, Row

VERSION = 1
HEADER_SIZE = 16

_HEADER = struct.Struct(">4sBBHI")
_CHECKSUM = struct.Struct(">I")
_MAGIC = b"omnq"


class NotARecord(Exception):
    """The file is not a whole record of the expected kind; the message says why."""


class Kind(IntEnum):
    """What a record holds."""

    LIVE = 1
    ENDED = 2
    WORKER = 3
    GATE = 4
    SCHEDULE = 5
    HOLDERS = 6
    CHECKPOINT = 7
    PROGRESS = 8
    GATHERED = 9


class Live(msgspec.Struct, omit_defaults=True):
    """A task that waits or is held. `newest` is the result of a repeating task's last run.

    `clears_notes` says that the record begins a new round: what earlier runs noted goes.
    """

    row: Row
    newest: bytes | None = None
    clears_notes: bool = False


class Ended(msgspec.Struct, omit_defaults=True):
    """A task that has ended, and its dead letter if it has become one."""

    row: Row
    finished_at: int
    expires_at: int
    result: bytes
    letter: DeadLetter | None = None

    @property
    def finished_row(self) -> FinishedRow:
        """The same as the contract's read side knows it."""
        return FinishedRow(
            row=self.row,
            finished_at=self.finished_at,
            expires_at=self.expires_at,
            result=self.result,
        )


class Waiter(msgspec.Struct, gc=False):
    """What the index keeps of a waiting task: what ordering needs, and no body."""

    id: str
    queue: str
    priority: int
    due: int
    visible: int
    seq: int = 0
    token: int = 0
    crashes: int = 0
    status: TaskStatus = TaskStatus.PENDING
    expires: int | None = None
    gates: tuple[Gate, ...] = ()
    parked: str | None = None

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts as the tasks are to be claimed."""
        return (-self.priority, self.due, self.seq)

    @property
    def is_suspect(self) -> bool:
        """Whether a worker died while it held the task."""
        return self.crashes > 0

    @classmethod
    def of(cls, row: Row) -> Waiter:
        """What the index keeps of that row."""
        return cls(
            id=row.id,
            queue=row.queue,
            priority=row.priority,
            due=row.due,
            visible=row.visible,
            seq=row.seq,
            token=row.token,
            crashes=row.crashes,
            status=row.status,
            expires=row.expires,
            gates=row.gates,
        )


class _LiveInBrief(msgspec.Struct):
    row: Waiter


class EndedInBrief(msgspec.Struct):
    """What counting and purging need to know of a task that has ended."""

    class Row(msgspec.Struct):
        """Of its row."""

        id: str
        status: TaskStatus

    row: Row
    finished_at: int
    expires_at: int


class Holder(msgspec.Struct, array_like=True):
    """Who has a unique key. While the file `via` exists the holder is on its way."""

    task_id: str
    via: str = ""


class Checkpoint(msgspec.Struct):
    """What a task needs to resume, and when it was saved."""

    saved_at: int
    data: bytes


class StoredSchedule(msgspec.Struct):
    """A schedule whose task's arguments are kept as the serializer's bytes, not as omniq's own."""

    schedule: Schedule
    body: bytes


T = TypeVar("T")


class Codec(Generic[T]):
    """Records of one kind to whole file contents and back."""

    def __init__(self, kind: Kind, shape: type[T]) -> None:
        self._kind = kind
        self._decode: Callable[[bytes], T] = internal_decoder(shape)

    def encode(self, value: T) -> bytes:
        """The file's contents."""
        return frame(self._kind, encode_internal(value))

    def decode(self, data: bytes) -> T:
        """What `encode` was given; `NotARecord` when these are not such contents."""
        kind, payload = unframe(data)
        if kind != self._kind:
            raise NotARecord(f"a record of kind {kind} where one of kind {self._kind} belongs")
        try:
            return self._decode(payload)
        except SerializationError as error:
            raise NotARecord(str(error)) from error


def frame(kind: Kind, payload: bytes) -> bytes:
    """A whole record: the payload behind its header."""
    header = _HEADER.pack(_MAGIC, VERSION, kind, 0, len(payload))
    return header + _CHECKSUM.pack(zlib.crc32(payload, zlib.crc32(header))) + payload


def declared_size(start: bytes) -> int:
    """How long a file with this beginning says it is; `NotARecord` if it does not begin as one."""
    if not start:
        raise NotARecord("the file is empty")
    if len(start) < HEADER_SIZE:
        raise NotARecord(f"cut short: {len(start)} bytes, not even a header")
    magic, version, _, _, length = _HEADER.unpack_from(start)
    if magic != _MAGIC:
        raise NotARecord("does not begin as a record does")
    if version != VERSION:
        raise NotARecord(f"written in version {version} of the format; this is version {VERSION}")
    return HEADER_SIZE + int(length)


def unframe(data: bytes) -> tuple[int, bytes]:
    """The kind and the payload of a whole record."""
    size = declared_size(data)
    if len(data) != size:
        raise NotARecord(f"{len(data)} bytes long, where its header says {size}")
    payload = data[HEADER_SIZE:]
    (checksum,) = _CHECKSUM.unpack_from(data, 12)
    if zlib.crc32(payload, zlib.crc32(data[:12])) != checksum:
        raise NotARecord("the checksum is wrong")
    return data[5], payload


LIVE = Codec(Kind.LIVE, Live)
ENDED = Codec(Kind.ENDED, Ended)
WORKER = Codec(Kind.WORKER, WorkerInfo)
GATE: Codec[tuple[str, GateState]] = Codec(Kind.GATE, tuple[str, GateState])
SCHEDULE = Codec(Kind.SCHEDULE, StoredSchedule)
HOLDERS: Codec[dict[str, Holder]] = Codec(Kind.HOLDERS, dict[str, Holder])
CHECKPOINT = Codec(Kind.CHECKPOINT, Checkpoint)
PROGRESS = Codec(Kind.PROGRESS, Progress)

_LIVE_IN_BRIEF = Codec(Kind.LIVE, _LiveInBrief)
ENDED_IN_BRIEF = Codec(Kind.ENDED, EndedInBrief)


def decode_waiter(data: bytes) -> Waiter:
    """What the index keeps of a waiting task's file."""
    return _LIVE_IN_BRIEF.decode(data).row


def decode_part(data: bytes) -> Live | Ended:
    """The record that a change brings about: the task goes on, or has ended."""
    kind, _ = unframe(data)
    return LIVE.decode(data) if kind == Kind.LIVE else ENDED.decode(data)
