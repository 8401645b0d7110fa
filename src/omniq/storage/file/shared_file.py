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

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from omniq.storage.file.encoding import (
    HEADER_SIZE,
    Kind,
    NotARecord,
    declared_size,
    frame,
    unframe,
)

_LARGEST = 18_432
"""The maximum sum of the sizes of a file's records: reading one of them reads the whole file."""


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


def unpack_one(data: bytes, key: str) -> bytes:
    """Return the record with that key from a file's contents; all of it if it is not shared."""
    place = find_record(data, key)
    return data if place is None else data[place[0] : place[0] + place[1]]


class SharedFile(NamedTuple):
    """The contents of a shared file whose header was checked."""

    data: bytes
    records_at: int
    lines: bytes

    def find(self, key: str) -> tuple[int, int]:
        """The offset and size of the record with that key."""
        before = self.lines.find(f"\n{key} ".encode())
        if before < 0:
            raise NotARecord("the file holds only records of other tasks")
        try:
            line = self.lines[before + 1 : self.lines.index(b"\n", before + 1)]
            start, size = map(int, line.split(b" ")[1:])
        except ValueError as error:
            raise NotARecord("its lines cannot be read") from error
        return self.records_at + start, size


def open_shared(data: bytes) -> SharedFile | None:
    """Check the header of a file; None if the file is not shared."""
    return SharedFile(data, *_read_header(data)) if _is_shared(data) else None


def find_record(data: bytes, key: str) -> tuple[int, int] | None:
    """The offset and size of a record in a shared file; None if the file is not shared."""
    file = open_shared(data)
    return None if file is None else file.find(key)


def unpack_all(data: bytes) -> dict[str, bytes]:
    """Return all records of a shared file's contents, by key; none for other files."""
    found: dict[str, bytes] = {}
    if _is_shared(data):
        end, lines = _read_header(data)
        for key, *numbers in _split(lines):
            if key[0] not in ">=":
                try:
                    start, size = map(int, numbers)
                except ValueError as error:
                    raise NotARecord("its lines cannot be read") from error
                found[key] = data[end + start : end + start + size]
    return found


def size_by_header(data: bytes) -> int:
    """Return the size of a file by its header, which `data` must contain whole if it is shared."""
    end = declared_size(data)
    if not _is_shared(data):
        return end
    last = 0
    for key, *numbers in _split(_read_header(data)[1]):
        if key[0] not in ">=" and len(numbers) == 2 and all(map(str.isdigit, numbers)):
            last = max(last, sum(map(int, numbers)))
    return end + last


def renames_in(data: bytes) -> dict[str, str]:
    """Return the names that the write of this file only renames, with their new names."""
    if not _is_shared(data):
        raise NotARecord("not a file of a write")
    lines = _split(_read_header(data)[1])
    return {line[0][1:]: line[1] for line in lines if line[0][0] == ">" and len(line) == 2}


def content_of(data: bytes, write: str) -> str:
    """Return the name of the content of a file that this write has written."""
    if _is_shared(data):
        for line in _split(_read_header(data)[1]):
            if line[0][0] == "=":
                return line[0][1:]
    return write


def _split(lines: bytes) -> Iterator[list[str]]:
    try:
        for line in lines.decode("ascii").strip("\n").split("\n"):
            if line.startswith(" "):
                raise NotARecord("its lines cannot be read")
            if line:
                yield line.split(" ")
    except ValueError as error:
        raise NotARecord("its lines cannot be read") from error


def _is_shared(data: bytes) -> bool:
    return len(data) >= HEADER_SIZE and data[5] == Kind.SHARED


def _read_header(data: bytes) -> tuple[int, bytes]:
    """The offset of the records, and the lines that give the position of each."""
    end = declared_size(data)
    _, lines = unframe(data[:end])
    return end, lines
