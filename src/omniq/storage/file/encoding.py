"""Encoding: the contents of a file: a header with version, length and checksum, then a record.

    offset  0  "omnq"        4  version      5  kind      6  two zero bytes
            8  length        12 CRC-32 of the first 12 bytes and the payload
            16 payload (MessagePack)

A file that is empty, truncated, longer than its header says, changed in any bit, of another kind or
of a later version is not a record: `NotARecord` says why, and the file is moved to `corrupt/`.
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
    """The file is not a complete record of the expected kind; the message says why."""


class Kind(IntEnum):
    """The kinds of records. The numbers are stored in the files."""

    LIVE = 1
    ENDED = 2
    WORKER = 3
    GATE = 4
    SCHEDULE = 5
    HOLDERS = 6
    CHECKPOINT = 7
    PROGRESS = 8
    SHARED = 9


class Live(msgspec.Struct, omit_defaults=True):
    """The record of a task that waits or is held.

    `newest` is the result of a repeating task's last run. With `clears_notes` the task starts from
    the beginning: the checkpoint and the progress of earlier runs are deleted.
    """

    row: Row
    newest: bytes | None = None
    clears_notes: bool = False


class Ended(msgspec.Struct, omit_defaults=True):
    """The record of a task that has ended, with its dead letter if it has one."""

    row: Row
    finished_at: int
    expires_at: int
    result: bytes
    letter: DeadLetter | None = None

    @property
    def finished_row(self) -> FinishedRow:
        """The record as the contract's read methods return it."""
        return FinishedRow(
            row=self.row,
            finished_at=self.finished_at,
            expires_at=self.expires_at,
            result=self.result,
        )


class IndexEntry(msgspec.Struct, gc=False):
    """The fields of a waiting task that decide its order, as the index holds them: no body."""

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
        """The sort key: the order in which tasks are claimed."""
        return (-self.priority, self.due, self.seq)

    @property
    def is_suspect(self) -> bool:
        """Whether a worker died while it held the task."""
        return self.crashes > 0

    @classmethod
    def of(cls, row: Row) -> IndexEntry:
        """Return the index entry of that row."""
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


class _LiveSummary(msgspec.Struct):
    row: IndexEntry


class EndedSummary(msgspec.Struct):
    """The fields of an ended task's record that counting and purging need."""

    class Row(msgspec.Struct):
        """The fields of its row."""

        id: str
        status: TaskStatus

    row: Row
    finished_at: int
    expires_at: int


class Holder(msgspec.Struct, array_like=True):
    """The task that holds a unique key. While the file `via` exists, it is about to become live."""

    task_id: str
    via: str = ""


class Checkpoint(msgspec.Struct):
    """The data from which a task resumes, and when it was saved."""

    saved_at: int
    data: bytes


class StoredSchedule(msgspec.Struct):
    """A schedule; its task's arguments are in `body`, encoded by the user's serializer."""

    schedule: Schedule
    body: bytes


T = TypeVar("T")


class Codec(Generic[T]):
    """Encodes and decodes records of one kind, with their headers."""

    def __init__(self, kind: Kind, shape: type[T]) -> None:
        self._kind = kind
        self._decode: Callable[[bytes], T] = internal_decoder(shape)

    def encode(self, value: T) -> bytes:
        """Return the file's contents."""
        return frame(self._kind, encode_internal(value))

    def decode(self, data: bytes) -> T:
        """Return the value that was encoded; raises `NotARecord` for any other contents."""
        kind, payload = unframe(data)
        if kind != self._kind:
            raise NotARecord(f"a record of kind {kind} where one of kind {self._kind} belongs")
        try:
            return self._decode(payload)
        except SerializationError as error:
            raise NotARecord(str(error)) from error


def frame(kind: Kind, payload: bytes) -> bytes:
    """Return a complete record: header and payload."""
    header = _HEADER.pack(_MAGIC, VERSION, kind, 0, len(payload))
    return header + _CHECKSUM.pack(zlib.crc32(payload, zlib.crc32(header))) + payload


def declared_size(start: bytes) -> int:
    """Return the file size that the header declares; raises `NotARecord` for another header."""
    if not start:
        raise NotARecord("the file is empty")
    if len(start) < HEADER_SIZE:
        raise NotARecord(f"truncated: {len(start)} bytes are shorter than a header")
    magic, version, _, _, length = _HEADER.unpack_from(start)
    if magic != _MAGIC:
        raise NotARecord("the header does not begin with 'omnq'")
    if version != VERSION:
        raise NotARecord(f"written in version {version} of the format; this is version {VERSION}")
    return HEADER_SIZE + int(length)


def unframe(data: bytes) -> tuple[int, bytes]:
    """Return the kind and the payload of a complete record."""
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

_LIVE_SUMMARY = Codec(Kind.LIVE, _LiveSummary)
ENDED_SUMMARY = Codec(Kind.ENDED, EndedSummary)


def decode_index_entry(data: bytes) -> IndexEntry:
    """Decode a waiting task's record into its index entry."""
    return _LIVE_SUMMARY.decode(data).row


def decode_part(data: bytes) -> Live | Ended:
    """Decode the new record of a change: the task is still live, or it has ended."""
    kind, _ = unframe(data)
    return LIVE.decode(data) if kind == Kind.LIVE else ENDED.decode(data)
