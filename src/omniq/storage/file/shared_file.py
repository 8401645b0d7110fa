"""Shared file: records of many tasks and documents in one file, which has one name for each of them.

A sync of a file costs the same whether it holds one record or sixty, and so does its removal. The
records of a write are therefore in few files, each linked to the names of all its tasks. Each name is
moved and removed like that of a separate file, and the file system frees the file with its last name.
A record is never changed in place, so a change of one task does not affect the others.

    a header (see `encoding`) of kind SHARED; its payload has a line for each record,
    "<key> <start> <size>", where `start` is counted from the end of that payload,
    a line ">name target" for each name that the write only renames,
    and a line "=content" unless it is the first file of its write
    the records, each as it would be in a separate file, with its own checksum
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from omniq.storage.file.encoding import HEADER_SIZE, Kind, NotARecord, declared_size, frame, unframe

_LARGEST = 18_432
"""The maximum sum of the sizes of a file's records: reading one of them reads the whole file."""

_PLACE = re.compile(rb"\n[^ >=\n][^ \n]* ([0-9]+) ([0-9]+)(?=\n)")
_RENAME = re.compile(r"\n>([^ \n]+) ([^ \n]+)(?=\n)")
_CONTENT = re.compile(r"\n=([^ \n]+)\n")


class Packed(NamedTuple):
    """A file to be written: the name of its content, the keys of its records, and its bytes."""

    content: str
    keys: list[str]
    data: bytes


def pack(
    write: str, records: Iterable[tuple[str, bytes]], renames: Mapping[str, str] | None = None
) -> list[Packed]:
    """The contents of as few files as possible.

    The first of them has the `renames`; it is there even if it has no record.
    """
    groups: list[list[tuple[str, bytes]]] = [[]]
    size = 0
    for key, record in records:
        if groups[-1] and size + len(record) > _LARGEST:
            groups.append([])
            size = 0
        groups[-1].append((key, record))
        size += len(record)
    first = [f">{name} {target}" for name, target in (renames or {}).items()]
    packed = [_encode_file(write, groups[0], first, is_bare=renames is None)]
    for number, group in enumerate(groups[1:], start=1):
        content = f"{write}_{number}"
        packed.append(_encode_file(content, group, [f"={content}"], is_bare=False))
    return packed


def _encode_file(
    content: str, group: list[tuple[str, bytes]], lines: list[str], *, is_bare: bool
) -> Packed:
    keys = [key for key, _ in group]
    if is_bare and len(group) == 1:
        return Packed(content, keys, group[0][1])
    start = 0
    for key, record in group:
        lines.append(f"{key} {start} {len(record)}")
        start += len(record)
    header = frame(Kind.SHARED, ("\n" + "".join(f"{line}\n" for line in lines)).encode())
    return Packed(content, keys, header + b"".join(record for _, record in group))


class SharedFile(NamedTuple):
    """The contents of a shared file whose header was checked."""

    data: bytes
    records_at: int
    lines: bytes

    def find(self, key: str) -> tuple[int, int]:
        """The offset and size of the record with that key."""
        before = self.lines.find(f"\n{key} ".encode())
        place = None if before < 0 else _PLACE.match(self.lines, before)
        if place is None:
            raise NotARecord("the file has no place of this record")
        return self.records_at + int(place[1]), int(place[2])

    @property
    def size(self) -> int:
        """The size of the whole file by its header."""
        ends = (int(place[1]) + int(place[2]) for place in _PLACE.finditer(self.lines))
        return self.records_at + max(ends, default=0)

    @property
    def renames(self) -> dict[str, str]:
        """The names that the write of this file only renames, with their new names."""
        return dict(_RENAME.findall(self.lines.decode("ascii", "replace")))


def open_shared(data: bytes) -> SharedFile | None:
    """Check the header of a file; None if the file is not shared."""
    if len(data) < HEADER_SIZE or data[5] != Kind.SHARED:
        return None
    end = declared_size(data)
    return SharedFile(data, end, unframe(data[:end])[1])


def unpack_one(data: bytes, key: str) -> bytes:
    """Return the record with that key from a file's contents; all of it if it is not shared."""
    file = open_shared(data)
    if file is None:
        return data
    start, size = file.find(key)
    return data[start : start + size]


def content_of(data: bytes, write: str) -> str:
    """Return the name of the content of a file that this write has written."""
    file = open_shared(data)
    named = None if file is None else _CONTENT.search(file.lines.decode("ascii", "replace"))
    return write if named is None else named[1]
