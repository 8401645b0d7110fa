"""Shared file: records of many tasks and documents in one file, which has one name for each of them.

A sync of a file costs the same whether it holds one record or sixty, and so does its removal. The
records of a write are therefore in few files, each linked to the names of all its tasks. Each name is
moved and removed like that of a separate file, and the file system frees the file with its last name.
A record is never changed in place, so a change of one task does not affect the others.

    a header (see `encoding`) of kind SHARED; its payload has a line for each record,
    "<key> <start> <size>", where `start` is counted from the end of that payload,
    and a line ">name target" for each name that the write only renames
    the records, each as it would be in a separate file, with its own checksum
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from omniq.storage.file_next.encoding import (
    HEADER_SIZE,
    Kind,
    NotARecord,
    declared_size,
    frame,
    unframe,
)

_LARGEST = 16_384
"""The maximum sum of the sizes of a file's records: reading one of them reads the whole file."""


def pack(
    records: Iterable[tuple[str, bytes]], renames: Mapping[str, str] | None = None
) -> list[tuple[list[str], bytes]]:
    """The contents of as few files as possible, each with the keys of its records.

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
    return [
        _encode_file(group, renames if number == 0 else None) for number, group in enumerate(groups)
    ]


def _encode_file(
    group: list[tuple[str, bytes]], renames: Mapping[str, str] | None
) -> tuple[list[str], bytes]:
    keys = [key for key, _ in group]
    records = [record for _, record in group]
    if len(records) == 1 and renames is None:
        return keys, records[0]
    lines, start = [], 0
    for key, record in group:
        lines.append(f"\n{key} {start} {len(record)}")
        start += len(record)
    lines += [f"\n>{name} {target}" for name, target in (renames or {}).items()]
    lines.append("\n")
    return keys, frame(Kind.SHARED, "".join(lines).encode()) + b"".join(records)


def unpack_one(data: bytes, key: str) -> bytes:
    """Return the record with that key from a file's contents; all of it if it is not shared."""
    place = find_record(data, key)
    return data if place is None else data[place[0] : place[0] + place[1]]


def find_record(data: bytes, key: str) -> tuple[int, int] | None:
    """The offset and size of a record in a shared file; None if the file is not shared."""
    if not _is_shared(data):
        return None
    end, lines = _read_header(data)
    before = lines.find(f"\n{key} ".encode())
    if before < 0:
        raise NotARecord("the file holds only records of other tasks")
    try:
        line = lines[before + 1 : lines.index(b"\n", before + 1)]
        start, size = map(int, line.split(b" ")[1:])
    except ValueError as error:
        raise NotARecord("its lines cannot be read") from error
    return end + start, size


def unpack_all(data: bytes) -> dict[str, bytes]:
    """Return all records of a shared file's contents, by key; none for other files."""
    found: dict[str, bytes] = {}
    if _is_shared(data):
        end, lines = _read_header(data)
        for key, *numbers in _split(lines):
            if not key.startswith(">"):
                try:
                    start, size = map(int, numbers)
                except ValueError as error:
                    raise NotARecord("its lines cannot be read") from error
                found[key] = data[end + start : end + start + size]
    return found


def renames_in(data: bytes) -> dict[str, str]:
    """Return the names that the write of this file only renames, with their new names."""
    if not _is_shared(data):
        return {}
    _, lines = _read_header(data)
    return {line[0][1:]: line[1] for line in _split(lines) if line[0].startswith(">")}


def _split(lines: bytes) -> Iterator[list[str]]:
    try:
        for line in lines.decode("ascii").strip("\n").split("\n"):
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
