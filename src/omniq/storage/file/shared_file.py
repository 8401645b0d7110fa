"""Shared file: records of many tasks in one file, which has one name for each task.

A sync of a file costs the same whether it holds one record or sixty, and so does its removal. The
records of a batch are therefore written to few files, each linked to the names of all its tasks.
Each name is moved and removed like that of a separate file, and the file system frees the file with
its last name. A record is never changed in place, so a change of one task does not affect the
others.

    a header (see `encoding`) of kind SHARED; its payload has a line for each record,
    "<id> <start> <size>", where `start` is counted from the end of that payload
    the records, each as it would be in a separate file, with its own checksum
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from omniq.storage.file.encoding import HEADER_SIZE, Kind, NotARecord, declared_size, frame, unframe

_LARGEST = 16_384
"""The maximum sum of the sizes of a file's records: reading one of them reads the whole file."""


def pack(records: Iterable[tuple[str, bytes]]) -> Iterator[tuple[list[str], bytes]]:
    """Yield the contents of as few files as possible, each with the ids of its tasks."""
    group: list[tuple[str, bytes]] = []
    size = 0
    for task_id, record in records:
        if group and size + len(record) > _LARGEST:
            yield _encode_file(group)
            group, size = [], 0
        group.append((task_id, record))
        size += len(record)
    if group:
        yield _encode_file(group)


def _encode_file(group: list[tuple[str, bytes]]) -> tuple[list[str], bytes]:
    ids = [task_id for task_id, _ in group]
    records = [record for _, record in group]
    if len(records) == 1:
        return ids, records[0]
    lines, start = [], 0
    for task_id, record in group:
        lines.append(f"\n{task_id} {start} {len(record)}")
        start += len(record)
    lines.append("\n")
    return ids, frame(Kind.SHARED, "".join(lines).encode()) + b"".join(records)


def unpack_one(data: bytes, task_id: str) -> bytes:
    """Return the record of that task from a file's contents; all of it if it is not shared."""
    if not _is_shared(data):
        return data
    end, lines = _read_header(data)
    before = lines.find(f"\n{task_id} ".encode())
    if before < 0:
        raise NotARecord("the file holds only records of other tasks")
    try:
        line = lines[before + 1 : lines.index(b"\n", before + 1)]
        start, size = map(int, line.split(b" ")[1:])
    except ValueError as error:
        raise NotARecord("its lines cannot be read") from error
    return data[end + start : end + start + size]


def unpack_all(data: bytes) -> dict[str, bytes]:
    """Return the records of all tasks in a shared file's contents, by id; none for other files."""
    if not _is_shared(data):
        return {}
    end, lines = _read_header(data)
    found: dict[str, bytes] = {}
    try:
        for line in lines.decode("ascii").strip("\n").split("\n"):
            task_id, start, size = line.split(" ")
            found[task_id] = data[end + int(start) : end + int(start) + int(size)]
    except ValueError as error:
        raise NotARecord("its lines cannot be read") from error
    return found


def _is_shared(data: bytes) -> bool:
    return len(data) >= HEADER_SIZE and data[5] == Kind.SHARED


def _read_header(data: bytes) -> tuple[int, bytes]:
    """The offset of the records, and the lines that give the position of each."""
    end = declared_size(data)
    _, lines = unframe(data[:end])
    return end, lines
