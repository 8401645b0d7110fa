"""What readers ask: replies of scripts to the models that callers get."""

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
    instant_of,
    kept_rows,
    read_letter,
)
from omniq.storage.row_rules import Row

Run = Callable[..., Awaitable[Any]]
"""Runs a script by its name."""

_PAGE = 500
"""Records that one call reads, at most."""

_LOOKED_AT = 1_000
"""Places that one call looks at, at most."""

_decode_info = internal_decoder(WorkerInfo)
_decode_schedule = internal_decoder(tuple[Schedule, bytes])


def pairs(reply: Any) -> Mapping[str, bytes]:
    """Fields and values of a hash, in either protocol."""
    if isinstance(reply, dict):
        return {field.decode(): value for field, value in reply.items()}
    return {field.decode(): value for field, value in zip(reply[::2], reply[1::2], strict=True)}


# Tasks


async def list_rows(run: Run, query: TaskQuery) -> list[Row]:
    """A page of tasks in id order, read in parts."""
    rows: list[Row] = []
    after: str | None = query.after
    while len(rows) < query.limit and after is not None:
        some, after = await _part(run, query, after, query.limit - len(rows))
        rows += some
    return rows


async def read_back(
    run: Run, query: ScanQuery, before: str, limit: int
) -> tuple[list[Row], str | None]:
    """Rows before that id, the last one first; and the id at which it had to stop."""
    rows: list[Row] = []
    place: str | None = before
    size = min(query.max_scanned, _LOOKED_AT)
    for _ in range(0, query.max_scanned, size):
        assert place is not None
        some, place = await _part(
            run, query, place, limit - len(rows), is_back=True, looked_at=size
        )
        rows += some
        if place is None or len(rows) == limit:
            return rows, None
    return rows, place


async def _part(
    run: Run,
    query: TaskQuery | ScanQuery,
    place: str,
    limit: int,
    *,
    is_back: bool = False,
    looked_at: int = _LOOKED_AT,
) -> tuple[list[Row], str | None]:
    """Rows from a place on, and where to go on; None at the end."""
    cursor, *reply = await run(
        "page",
        place,
        min(limit, _PAGE),
        "" if query.status is None else STATUS_LETTERS[query.status],
        query.queue or "",
        query.func_path or "",
        int(is_back),
        looked_at,
    )
    return [kept.row for kept in kept_rows(reply)], cursor.decode() or None


def held_of(reply: Sequence[bytes]) -> tuple[dict[str, int], frozenset[str]]:
    """Task ids to tokens of what an owner holds, and which of it was cancelled."""
    held: dict[str, int] = {}
    cancelled: set[str] = set()
    for task_id, place in zip(reply[::2], reply[1::2], strict=True):
        if place:
            core = place.split(b"/", 2)[1]
            held[task_id.decode()] = int(core[60:])
            if core[58:59] == b"1":
                cancelled.add(task_id.decode())
    return held, frozenset(cancelled)


def workers_of(
    infos: list[bytes | None], members: list[bytes], resting: Iterable[bytes]
) -> list[WorkerInfo]:
    """Workers with a lease in id order, each with the ids of what it holds."""
    running: dict[str, list[str]] = {}
    for member in members:
        owner, _, task_id = member.decode().split("/", 2)
        running.setdefault(owner, []).append(task_id)
    paused = {owner.decode() for owner in resting}
    found = sorted((_decode_info(info) for info in infos if info), key=lambda info: info.id)
    return [
        msgspec.structs.replace(
            info, running=tuple(sorted(running.get(info.id, ()))), paused=info.id in paused
        )
        for info in found
    ]


def number_of(count: bytes) -> int:
    """A counter."""
    try:
        return int(count)
    except ValueError as error:
        raise StorageCorrupt("a counter in Redis is damaged") from error


def stats_of(reply: list[Any]) -> QueueStats:
    """The counters of a store."""
    now, counters, kept, dead, firsts = reply
    by_status = dict.fromkeys(TaskStatus, 0)
    by_queue: dict[str, int] = {}
    for name, count in pairs(counters).items():
        queue, _, letter = name.rpartition("/")
        by_status[STATUSES[letter]] += number_of(count)
        by_queue[queue] = by_queue.get(queue, 0) + number_of(count)
    for letter, count in zip("sfc", kept, strict=True):
        by_status[STATUSES[letter]] = count
    oldest = {queue: instant_of(due.decode()) for queue, due in pairs(firsts).items()}
    return queue_stats(by_status, by_queue, oldest, now=int(now), dead=dead)


# Dead letters


async def list_dead(run: Run, query: DeadQuery) -> list[DeadLetter]:
    """A page of dead letters in id order."""
    found: list[DeadLetter] = []
    after = query.after
    while len(found) < query.limit:
        page = [read_letter(grave) for grave in await run("letters", after, _PAGE) if grave]
        found += [
            letter
            for letter in page
            if query.task_type in (None, letter.task_type)
            and query.reason in (None, letter.failure_reason)
        ]
        if len(page) < _PAGE:
            break
        after = page[-1].task_id
    return found[: query.limit]


async def purge_dead(run: Run, before: str) -> int:
    """Forget dead letters whose last failure was before that stamp; how many."""
    purged, after = 0, ""
    while True:
        page = [read_letter(grave).task_id for grave in await run("letters", after, _PAGE) if grave]
        if page:
            purged += await run("bury", page, before)
        if len(page) < _PAGE:
            return purged
        after = page[-1]


# Schedules


def encode_schedule(schedule: Schedule, serializer: Serializer) -> bytes:
    """A schedule to keep; its version is kept before it."""
    # What the user passes along is the serializer's business alone.
    bare = msgspec.structs.replace(schedule.task, args=(), kwargs={}, metadata={})
    body = serializer.encode_task(schedule.task)
    return encode_internal((msgspec.structs.replace(schedule, task=bare), body))


def decode_schedules(kept: Mapping[str, bytes], serializer: Serializer) -> list[Schedule]:
    """All schedules in id order. One that cannot be read must not hold up the others."""
    found = []
    for schedule_id in sorted(kept):
        with suppress(SerializationError):
            found.append(decode_schedule(kept[schedule_id], serializer))
    return found


def decode_schedule(kept: bytes, serializer: Serializer) -> Schedule:
    """A schedule that was kept as `version/nonce/schedule`."""
    try:
        version, _, encoded = kept.split(b"/", 2)
        number = int(version)
    except ValueError as error:
        raise SerializationError(f"not a schedule: {error}") from error
    schedule, body = _decode_schedule(encoded)
    return msgspec.structs.replace(schedule, task=serializer.decode_task(body), version=number)
