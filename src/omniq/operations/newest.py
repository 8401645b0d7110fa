"""The newest tasks and dead letters of a storage that lists them oldest first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import TypeVar

from omniq.clock import encode_id
from omniq.models import DeadLetter, Task, TaskStatus
from omniq.storage.base import BaseStorage

T = TypeVar("T")

_SMALL = 200
_MARGIN = 2
_FIRST_SPAN = 2_000
_WIDENING = 8
_MOST_WALKED = 50


async def newest_tasks(
    storage: BaseStorage,
    limit: int,
    *,
    status: TaskStatus | None = None,
    queue: str | None = None,
    func_path: str | None = None,
) -> list[Task]:
    """The newest of the tasks in question, newest first; however long it takes to find them."""
    found: list[Task] = []
    cursor: str | None = None
    while len(found) < limit:
        scan = await storage.scan_tasks(
            status=status,
            queue=queue,
            func_path=func_path,
            limit=limit - len(found),
            cursor=cursor,
        )
        found += scan.tasks
        cursor = scan.cursor
        if cursor is None:
            break
    return found


async def newest_dead(
    storage: BaseStorage,
    limit: int,
    *,
    task_type: str | None = None,
    reason: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> list[DeadLetter]:
    """The dead letters of the newest tasks, the latest failure first."""

    async def page(after: str, size: int) -> list[DeadLetter]:
        return await storage.list_dead(
            task_type=task_type, reason=reason, since=since, until=until, limit=size, after=after
        )

    found = await _newest(storage, page, lambda letter: letter.task_id, limit)
    return sorted(found, key=lambda letter: letter.last_failure, reverse=True)[:limit]


async def _newest(
    storage: BaseStorage,
    page: Callable[[str, int], Awaitable[list[T]]],
    id_of: Callable[[T], str],
    limit: int,
) -> list[T]:
    """The last `limit` by id or a few more, in some pages of bounded size, however many there are."""
    size = limit * _MARGIN + _SMALL

    async def look(after: str) -> tuple[list[T], bool]:
        """What comes after that id, and whether there may be more of it."""
        found = await page(after, size)
        return found, len(found) == size

    first, is_cut = await look("")
    if not is_cut:
        return first
    now, span = storage.clock.micros() // 1000, _FIRST_SPAN
    found, is_cut = await look(encode_id(now - span, 0))
    while len(found) < limit:
        span *= _WIDENING
        if span > now:
            # Only ids of one's own that sort before all others.
            return first
        found, is_cut = await look(encode_id(now - span, 0))
    # After `early` there are enough, after `late` there may be too few: narrow it down until what
    # comes after `early` fits into one page.
    early, late = now - span, now - span // _WIDENING
    while is_cut and late - early > 1:
        middle = (early + late) // 2
        closer, is_closer_cut = await look(encode_id(middle, 0))
        if len(closer) >= limit:
            early, found, is_cut = middle, closer, is_closer_cut
        else:
            late = middle
    # One call can enqueue thousands within a millisecond: go through them.
    for _ in range(_MOST_WALKED):
        if not is_cut:
            break
        more, is_cut = await look(id_of(found[-1]))
        found = (found + more)[-size:]
    return found
