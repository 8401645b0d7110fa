"""The replies of scripts to readers, as the models that callers receive."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from omniq.errors import SerializationError, StorageCorrupt
from omniq.models import DeadLetter, QueueStats, Schedule, TaskStatus, WorkerInfo
from omniq.serialization import Serializer, encode_internal, internal_decoder
from omniq.storage.inspection import DeadQuery, ScanQuery, TaskQuery, queue_stats
from omniq.storage.redis.encoding import (
    STATUS_LETTERS,
    STATUSES,
    PlaceSlices,
    decode_dead_letter,
    instant_of,
    stored_rows,
)
from omniq.storage.row_rules import Row

RunScript = Callable[..., Awaitable[Any]]
"""Runs a script by its name."""

_PAGE_SIZE = 500
"""Records that one call reads, at most."""

_PLACES_PER_CALL = 1_000
"""Places that one call checks, at most."""

_decode_info = internal_decoder(WorkerInfo)
_decode_schedule = internal_decoder(tuple[Schedule, bytes])


def hash_fields(reply: Any) -> Mapping[str, bytes]:
    """Fields and values of a hash, in either protocol."""
    if isinstance(reply, dict):
        return {field.decode(): value for field, value in reply.items()}
    return {field.decode(): value for field, value in zip(reply[::2], reply[1::2], strict=True)}


# Tasks


async def list_rows(run: RunScript, query: TaskQuery) -> list[Row]:
    """A page of tasks in id order, read in parts."""
    rows: list[Row] = []
    after: str | None = query.after
    while len(rows) < query.limit and after is not None:
        part, after = await _read_part(run, query, after, query.limit - len(rows))
        rows += part
    return rows


async def read_backwards(
    run: RunScript, query: ScanQuery, before: str, limit: int
) -> tuple[list[Row], str | None]:
    """Rows before that id, the last one first; and the id at which it had to stop."""
    rows: list[Row] = []
    reached: str | None = before
    size = min(query.max_scanned, _PLACES_PER_CALL)
    for _ in range(0, query.max_scanned, size):
        assert reached is not None
        part, reached = await _read_part(
            run, query, reached, limit - len(rows), is_reversed=True, max_places=size
        )
        rows += part
        if reached is None or len(rows) == limit:
            return rows, None
    return rows, reached


async def _read_part(
    run: RunScript,
    query: TaskQuery | ScanQuery,
    after: str,
    limit: int,
    *,
    is_reversed: bool = False,
    max_places: int = _PLACES_PER_CALL,
) -> tuple[list[Row], str | None]:
    """Rows after an id, and the id to continue after; None at the end."""
    cursor, *reply = await run(
        "list_tasks",
        after,
        min(limit, _PAGE_SIZE),
        "" if query.status is None else STATUS_LETTERS[query.status],
        query.queue or "",
        query.func_path or "",
        int(is_reversed),
        max_places,
    )
    return [stored.row for stored in stored_rows(reply)], cursor.decode() or None


def parse_held(reply: Sequence[bytes]) -> tuple[dict[str, int], frozenset[str]]:
    """Ids and tokens of the tasks that an owner holds, and the ids of those that were cancelled."""
    held: dict[str, int] = {}
    cancelled: set[str] = set()
    for task_id, place in zip(reply[::2], reply[1::2], strict=True):
        if place:
            core = place.split(b"/", 2)[1]
            held[task_id.decode()] = int(core[PlaceSlices.TOKEN])
            if core[PlaceSlices.CANCEL_REQUESTED] == b"1":
                cancelled.add(task_id.decode())
    return held, frozenset(cancelled)


def parse_workers(
    infos: list[bytes | None], held_members: list[bytes], paused_owners: Iterable[bytes]
) -> list[WorkerInfo]:
    """Workers with a lease in id order, each with the ids of the tasks it holds."""
    running: dict[str, list[str]] = {}
    for member in held_members:
        owner, _, task_id = member.decode().split("/", 2)
        running.setdefault(owner, []).append(task_id)
    paused = {owner.decode() for owner in paused_owners}
    found = sorted((_decode_info(info) for info in infos if info), key=lambda info: info.id)
    return [
        msgspec.structs.replace(
            info, running=tuple(sorted(running.get(info.id, ()))), paused=info.id in paused
        )
        for info in found
    ]


def parse_count(count: bytes) -> int:
    """The value of a counter."""
    try:
        return int(count)
    except ValueError as error:
        raise StorageCorrupt("a counter in Redis is damaged") from error


def parse_stats(reply: list[Any]) -> QueueStats:
    """The counters of a store."""
    now, counters, finished, dead, first_due = reply
    by_status = dict.fromkeys(TaskStatus, 0)
    by_queue: dict[str, int] = {}
    for name, count in hash_fields(counters).items():
        queue, _, letter = name.rpartition("/")
        by_status[STATUSES[letter]] += parse_count(count)
        by_queue[queue] = by_queue.get(queue, 0) + parse_count(count)
    for letter, count in zip("sfc", finished, strict=True):
        by_status[STATUSES[letter]] = count
    oldest = {queue: instant_of(due.decode()) for queue, due in hash_fields(first_due).items()}
    return queue_stats(by_status, by_queue, oldest, now=int(now), dead=dead)


# Dead letters


async def list_dead(run: RunScript, query: DeadQuery) -> list[DeadLetter]:
    """A page of dead letters in id order."""
    found: list[DeadLetter] = []
    after = query.after
    while len(found) < query.limit:
        page = await _read_dead(run, after)
        found += [
            letter
            for letter in page
            if query.func_path in (None, letter.func_path)
            and query.reason in (None, letter.failure_reason)
        ]
        if len(page) < _PAGE_SIZE:
            break
        after = page[-1].task_id
    return found[: query.limit]


async def purge_dead(run: RunScript, before: str) -> int:
    """Delete dead letters whose last failure was before that stamp; returns how many."""
    purged, after = 0, ""
    while True:
        page = [letter.task_id for letter in await _read_dead(run, after)]
        if page:
            purged += await run("delete_dead", page, before)
        if len(page) < _PAGE_SIZE:
            return purged
        after = page[-1]


async def _read_dead(run: RunScript, after: str) -> list[DeadLetter]:
    encoded = await run("list_dead", after, _PAGE_SIZE)
    return [decode_dead_letter(each) for each in encoded if each]


# Schedules


def encode_schedule(schedule: Schedule, serializer: Serializer) -> bytes:
    """A schedule to store; its version is stored in front of it."""
    # Only the serializer encodes the values of the user.
    bare = msgspec.structs.replace(schedule.task, args=(), kwargs={}, metadata={})
    body = serializer.encode_task(schedule.task)
    return encode_internal((msgspec.structs.replace(schedule, task=bare), body))


def decode_schedules(encoded: Mapping[str, bytes], serializer: Serializer) -> list[Schedule]:
    """All schedules in id order. One that cannot be read must not hold up the others."""
    found = []
    for schedule_id in sorted(encoded):
        with suppress(SerializationError):
            found.append(decode_schedule(encoded[schedule_id], serializer))
    return found


def decode_schedule(encoded: bytes, serializer: Serializer) -> Schedule:
    """A schedule that was stored as `version/nonce/schedule`."""
    try:
        version, _, rest = encoded.split(b"/", 2)
        number = int(version)
    except ValueError as error:
        raise SerializationError(f"not a schedule: {error}") from error
    schedule, body = _decode_schedule(rest)
    return msgspec.structs.replace(schedule, task=serializer.decode_task(body), version=number)
