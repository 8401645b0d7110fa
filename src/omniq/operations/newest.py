"""The newest tasks, and the dead letters that failed last."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from omniq.clock import from_micros, to_micros
from omniq.errors import InvalidValue
from omniq.models import DeadLetter, Task, TaskStatus, type_of
from omniq.storage.base import BaseStorage

T = TypeVar("T")

_MIN_PAGE = 200
_DEAD_PAGE = 500
_FIRST_DEAD_SPAN, _SHORTEST_SPAN = timedelta(minutes=10), timedelta(microseconds=1)
_EARLIEST = datetime(1970, 1, 2, tzinfo=UTC)
_AHEAD = timedelta(days=1)
"""The clocks of the workers that recorded failures may be ahead."""


async def newest_tasks(
    storage: BaseStorage,
    limit: int,
    *,
    status: TaskStatus | None = None,
    queue: str | None = None,
    func_path: str | None = None,
    task_type: str | None = None,
    max_scans: int | None = None,
) -> list[Task]:
    """The newest tasks that match, newest first.

    Scans until `limit` are found, however long it takes, or until it has made `max_scans` scans, each of a
    bounded number of records.
    """
    found: list[Task] = []
    cursor: str | None = None
    scans = 0
    while len(found) < limit and (max_scans is None or scans < max_scans):
        scans += 1
        scan = await storage.scan_tasks(
            status=status,
            queue=queue,
            func_path=func_path,
            limit=limit - len(found) if task_type is None else _MIN_PAGE,
            cursor=cursor,
        )
        found += [task for task in scan.tasks if task_type in (None, type_of(task))]
        cursor = scan.cursor
        if cursor is None:
            break
    return found[:limit]


async def newest_dead(
    storage: BaseStorage,
    limit: int,
    *,
    func_path: str | None = None,
    reason: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    task_type: str | None = None,
) -> list[DeadLetter]:
    """The dead letters that failed last, latest failure first."""
    letters = dead_newest_first(
        storage, func_path=func_path, reason=reason, since=since, until=until, task_type=task_type
    )
    return [letter async for letter in take(letters, limit)]


async def take(items: AsyncIterator[T], limit: int) -> AsyncIterator[T]:
    """The first `limit` items."""
    if limit <= 0:
        return
    async for item in items:
        yield item
        limit -= 1
        if not limit:
            return


async def dead_newest_first(
    storage: BaseStorage,
    *,
    func_path: str | None = None,
    reason: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    task_type: str | None = None,
    before: str = "",
) -> AsyncIterator[DeadLetter]:
    """Dead letters, latest failure first, read in pages: a storage lists those of a time in order of id.

    `before` is `position_of` the last letter of the previous page.
    """

    async def page(first: datetime, end: datetime, after: str = "") -> list[DeadLetter]:
        return await storage.list_dead(
            func_path=func_path,
            reason=reason,
            since=first,
            until=end,
            limit=_DEAD_PAGE,
            after=after,
            task_type=task_type,
        )

    earliest = since or _EARLIEST
    end = until or storage.clock.now() + _AHEAD
    if before:
        # Others may have failed at the same time.
        end = min(end, _instant_of(before) + _SHORTEST_SPAN)
    span = _FIRST_DEAD_SPAN
    while end > earliest:
        first = max(earliest, end - min(span, end - earliest))
        found = await page(first, end)
        if len(found) == _DEAD_PAGE and end - first > _SHORTEST_SPAN:
            span = max((end - first) / 8, _SHORTEST_SPAN)
            continue
        while len(found) % _DEAD_PAGE == 0 and found:
            # Very many failed in the same microsecond.
            more = await page(first, end, found[-1].task_id)
            found += more
            if not more:
                break
        for letter in sorted(found, key=position_of, reverse=True):
            if not before or position_of(letter) < before:
                yield letter
        end = first
        span *= 8 if len(found) < _DEAD_PAGE // 8 else 1


def position_of(letter: DeadLetter) -> str:
    """A text that sorts dead letters by the time of the last failure, then by id."""
    return f"{to_micros(letter.last_failure):016d}-{letter.task_id}"


def _instant_of(position: str) -> datetime:
    digits = position.partition("-")[0]
    if not (digits.isascii() and digits.isdecimal() and len(digits) == 16):
        raise InvalidValue("after: pass one that an earlier page returned")
    return from_micros(int(digits))
