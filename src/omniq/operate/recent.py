"""The newest tasks and dead letters of a storage that lists them oldest first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
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


async def newest_tasks(
    storage: BaseStorage,
    limit: int,
    *,
    status: TaskStatus | None = None,
    queue: str | None = None,
    func_path: str | None = None,
) -> list[Task]:
    """The newest of the tasks in question, newest first.

    By the time in the ids that omniq makes. Ids of one's own count as new if they sort after those;
    where there are many of them, not the newest may be found.
    """

    async def page(after: str, size: int) -> Sequence[Task]:
        return await storage.list_tasks(
            status=status, queue=queue, func_path=func_path, limit=size, after=after
        )

    found = await _newest(storage, page, limit)
    return sorted(found, key=lambda task: (task.created_at, task.id), reverse=True)[:limit]


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

    async def page(after: str, size: int) -> Sequence[DeadLetter]:
        return await storage.list_dead(
            task_type=task_type, reason=reason, since=since, until=until, limit=size, after=after
        )

    found = await _newest(storage, page, limit)
    return sorted(found, key=lambda letter: letter.last_failure, reverse=True)[:limit]


async def _newest(
    storage: BaseStorage, page: Callable[[str, int], Awaitable[Sequence[T]]], limit: int
) -> Sequence[T]:
    """The last `limit` by id or a few more, in some pages of bounded size, however many there are."""
    size = limit * _MARGIN + _SMALL
    first = await page("", size)
    if len(first) < size:
        return first
    now, span = storage.clock.micros() // 1000, _FIRST_SPAN
    while len(found := await page(encode_id(now - span, 0), size)) < limit:
        span *= _WIDENING
        if span > now:
            # Only ids of one's own that sort before all others.
            return first
    # After `early` there are enough, after `late` there may be too few: narrow it down until what
    # comes after `early` fits into one page.
    early, late = now - span, now - span // _WIDENING
    while len(found) == size and late - early > 1:
        middle = (early + late) // 2
        closer = await page(encode_id(middle, 0), size)
        if len(closer) >= limit:
            early, found = middle, closer
        else:
            late = middle
    return found
