"""Records of many tasks in one file, which then has a name for each of them.

A file that is forced to the disk costs the same whether it holds one record or sixty, and so does
its removal. What a batch writes therefore goes into few files, each linked to the names of all its
tasks; a name is moved and removed like that of a file of its own, and the file goes with its last
name. Records are never changed in place, so that nobody sees the others in it.

    a record's header (see `records`) of kind GATHERED; its payload has a line for each record,
    "<id> <start> <size>", where `start` is counted from the end of that payload
    the records, each as it would be in a file of its own, with its own checksum
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from omniq.storage.file.encoding import HEADER_SIZE, Kind, NotARecord, declared_size, frame, unframe

_LARGEST = 16_384
"""Bytes that records of one file may have together: each of its names reads all of it."""


def gather(records: Iterable[tuple[str, bytes]]) -> Iterator[tuple[list[str], bytes]]:
    """The contents of as few files as will do, each with the ids of the tasks that are in it."""
    together: list[tuple[str, bytes]] = []
    size = 0
    for task_id, record in records:
        if together and size + len(record) > _LARGEST:
            yield _file(together)
            together, size = [], 0
        together.append((task_id, record))
        size += len(record)
    if together:
        yield _file(together)


def _file(together: list[tuple[str, bytes]]) -> tuple[list[str], bytes]:
    ids = [task_id for task_id, _ in together]
    records = [record for _, record in together]
    if len(records) == 1:
        return ids, records[0]
    lines, start = [], 0
    for task_id, record in together:
        lines.append(f"\n{task_id} {start} {len(record)}")
        start += len(record)
    lines.append("\n")
    return ids, frame(Kind.GATHERED, "".join(lines).encode()) + b"".join(records)


def pick(data: bytes, task_id: str) -> bytes:
    """The record of that task out of a file's contents; all of them if it is a file of its own."""
    if not _is_gathered(data):
        return data
    end, lines = _head(data)
    before = lines.find(f"\n{task_id} ".encode())
    if before < 0:
        raise NotARecord("it holds records of other tasks only")
    try:
        line = lines[before + 1 : lines.index(b"\n", before + 1)]
        start, size = map(int, line.split(b" ")[1:])
    except ValueError as error:
        raise NotARecord("its lines cannot be read") from error
    return data[end + start : end + start + size]


def split(data: bytes) -> dict[str, bytes]:
    """The records of all tasks in a file's contents, by id; none if it is a file of its own."""
    if not _is_gathered(data):
        return {}
    end, lines = _head(data)
    found: dict[str, bytes] = {}
    try:
        for line in lines.decode("ascii").strip("\n").split("\n"):
            task_id, start, size = line.split(" ")
            found[task_id] = data[end + int(start) : end + int(start) + int(size)]
    except ValueError as error:
        raise NotARecord("its lines cannot be read") from error
    return found


def _is_gathered(data: bytes) -> bool:
    return len(data) >= HEADER_SIZE and data[5] == Kind.GATHERED


def _head(data: bytes) -> tuple[int, bytes]:
    """Where the records begin, and the lines that say where each of them is."""
    end = declared_size(data)
    _, lines = unframe(data[:end])
    return end, lines
