"""Encoding: the contents of a file: a header with format, length and checksum, then a record.

    offset  0  "omnq"        4  format       5  kind      6  two zero bytes
            8  length        12 CRC-32 of the first 12 bytes and the payload
            16 payload (MessagePack)

A file that is empty, truncated, longer than its header says, changed in any bit or of another kind is
not a record: `NotARecord` says why, and the file is moved to `corrupt/`. A whole record of a later
format is left where it is: `NewerRecord`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from enum import IntEnum
from operator import attrgetter
from typing import Generic, TypeVar

import msgspec

from omniq.errors import SerializationError
from omniq.gate_rules import Gate
from omniq.models import StoredLetter, TaskStatus, WorkerInfo
from omniq.serialization import encode_internal, internal_decoder
from omniq.storage.backend import Document
from omniq.storage.row_rules import FinishedRow, Row

FORMAT = 1
HEADER_SIZE = 16

_HEADER = struct.Struct(">4sBBHI")
_CHECKSUM = struct.Struct(">I")
_MAGIC = b"omnq"


class NotARecord(Exception):
    """The file is not a complete record of the expected kind; the message says why."""


class NewerRecord(Exception):
    """A complete record of a later format than this version of omniq can read."""


class Kind(IntEnum):
    """The kinds of records. The numbers are stored in the files; 4 to 8 only in older stores."""

    LIVE = 1
    ENDED = 2
    WORKER = 3
    GATE = 4
    SCHEDULE = 5
    CHECKPOINT = 7
    PROGRESS = 8
    SHARED = 9
    DOCUMENT = 10


class Live(msgspec.Struct, omit_defaults=True):
    """The record of a task that waits or is held."""

    row: Row


class EndedTask(msgspec.Struct, omit_defaults=True):
    """The record of a task that has ended, with its dead letter if it has one."""

    row: Row
    finished_at: int
    expires_at: int
    result: bytes
    letter: StoredLetter | None = None

    @property
    def finished_row(self) -> FinishedRow:
        """The record as the engine knows it."""
        return FinishedRow(
            row=self.row,
            finished_at=self.finished_at,
            expires_at=self.expires_at,
            result=self.result,
        )


class WaitingRow(msgspec.Struct, gc=False):
    """The fields of a waiting task that decide its order, as the index holds them: no body."""

    id: str
    queue: str
    priority: int
    func_path: str
    due: int
    visible: int
    seq: int = 0
    crashes: int = 0
    status: TaskStatus = TaskStatus.PENDING
    gates: tuple[Gate, ...] = ()
    turn: int | None = None
    parked: str | None = None
    owner: str | None = None
    content: str = ""

    @property
    def order(self) -> tuple[int, int, int]:
        """The sort key: the order in which tasks are claimed."""
        return (-self.priority, self.due if self.turn is None else self.turn, self.seq)

    @classmethod
    def of(cls, row: Row, content: str) -> WaitingRow:
        """Return these fields of the row, which is stored in that content."""
        waiting = cls(*_order_fields(row))
        waiting.content = content
        return waiting


_order_fields = attrgetter(*WaitingRow.__struct_fields__[:11])


class _LiveSummary(msgspec.Struct):
    row: WaitingRow


class EndedSummary(msgspec.Struct):
    """The fields of an ended task's record that counting and purging need."""

    class Row(msgspec.Struct):
        """The fields of its row."""

        id: str
        status: TaskStatus

    row: Row
    finished_at: int
    expires_at: int


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


def frame(kind: Kind, payload: bytes, record_format: int = FORMAT) -> bytes:
    """Return a complete record: header and payload."""
    header = _HEADER.pack(_MAGIC, record_format, kind, 0, len(payload))
    return header + _CHECKSUM.pack(zlib.crc32(payload, zlib.crc32(header))) + payload


def declared_size(start: bytes) -> int:
    """Return the file size that the header declares; raises `NotARecord` for another header."""
    if len(start) < HEADER_SIZE:
        raise NotARecord(f"only {len(start)} bytes long")
    magic, _, _, _, length = _HEADER.unpack_from(start)
    if magic != _MAGIC:
        raise NotARecord("not a file of omniq")
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
    if data[4] > FORMAT:
        raise NewerRecord(f"format {data[4]} of the record; this is format {FORMAT}")
    return data[5], payload


LIVE = Codec(Kind.LIVE, Live)
ENDED = Codec(Kind.ENDED, EndedTask)
WORKER = Codec(Kind.WORKER, WorkerInfo)
DOCUMENT = Codec(Kind.DOCUMENT, Document)

ENDED_SUMMARY = Codec(Kind.ENDED, EndedSummary)
_LIVE_SUMMARY = Codec(Kind.LIVE, _LiveSummary)


def decode_waiting(data: bytes) -> WaitingRow:
    """Decode the fields of a waiting task's record that decide its order."""
    return _LIVE_SUMMARY.decode(data).row


def encode(record: Row | EndedTask | Document | None) -> bytes:
    """Encode a record of a live task, of an ended one, or of a document."""
    if isinstance(record, Row):
        return LIVE.encode(Live(record))
    if isinstance(record, EndedTask):
        return ENDED.encode(record)
    assert record is not None
    return DOCUMENT.encode(record)


def decode(data: bytes) -> Row | EndedTask | Document:
    """Decode what `encode` has encoded."""
    kind, _ = unframe(data)
    if kind == Kind.LIVE:
        return LIVE.decode(data).row
    return ENDED.decode(data) if kind == Kind.ENDED else DOCUMENT.decode(data)
