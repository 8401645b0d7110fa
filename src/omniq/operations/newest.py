"""The newest tasks and dead letters of a storage that lists them oldest first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import TypeVar

from omniq.clock import encode_id
from omniq.models import DeadLetter, Task, TaskStatus, type_of
from omniq.storage.base import BaseStorage

T = TypeVar("T")

_MIN_PAGE = 200
_MARGIN = 2
_FIRST_SPAN = 2_000
_WIDENING = 8
_MAX_PAGES = 50


async def newest_tasks(
    storage: BaseStorage,
    limit: int,
    *,
    status: TaskStatus | None = None,
    queue: str | None = None,
    func_path: str | None = None,
    task_type: str | None = None,
) -> list[Task]:
    """The newest tasks that match, newest first. Scans until `limit` are found, however long it takes."""
    found: list[Task] = []
    cursor: str | None = None
    while len(found) < limit:
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
    """The dead letters of the newest tasks, latest failure first."""

    async def page(after: str, size: int) -> list[DeadLetter]:
        return await storage.list_dead(
            func_path=func_path,
            reason=reason,
            since=since,
            until=until,
            limit=size,
            after=after,
            task_type=task_type,
        )

    found = await _newest(storage, page, lambda letter: letter.task_id, limit)
    return sorted(found, key=lambda letter: letter.last_failure, reverse=True)[:limit]


async def _newest(
    storage: BaseStorage,
    page: Callable[[str, int], Awaitable[list[T]]],
    id_of: Callable[[T], str],
    limit: int,
) -> list[T]:
    """The last `limit` items by id, or a few more, in a few pages of bounded size.

    Ids begin with a timestamp, so a time is found by bisection, after which enough items follow.
    """
    size = limit * _MARGIN + _MIN_PAGE

    async def read_after(after: str) -> tuple[list[T], bool]:
        """The items after that id, and whether there may be more."""
        found = await page(after, size)
        return found, len(found) == size

    first, is_cut = await read_after("")
    if not is_cut:
        return first
    now, span = storage.clock.micros() // 1000, _FIRST_SPAN
    found, is_cut = await read_after(encode_id(now - span, 0))
    while len(found) < limit:
        span *= _WIDENING
        if span > now:
            # The ids were chosen by the application and sort before all generated ones.
            return first
        found, is_cut = await read_after(encode_id(now - span, 0))
    # Enough items follow `early`, perhaps too few follow `late`: bisect until all items after
    # `early` fit into one page.
    early, late = now - span, now - span // _WIDENING
    while is_cut and late - early > 1:
        middle = (early + late) // 2
        closer, is_closer_cut = await read_after(encode_id(middle, 0))
        if len(closer) >= limit:
            early, found, is_cut = middle, closer, is_closer_cut
        else:
            late = middle
    # One call can enqueue thousands of tasks within a millisecond: page through them.
    for _ in range(_MAX_PAGES):
        if not is_cut:
            break
        more, is_cut = await read_after(id_of(found[-1]))
        found = (found + more)[-size:]
    return found
