"""Acts on many tasks at once, one atomic step each, and says how far it is.

What was done before an error or an interruption stays done; doing it again does the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from datetime import datetime

import msgspec

from omniq.errors import DuplicateTask, QueueFull
from omniq.models import Task, TaskStatus
from omniq.storage.base import BaseStorage

OnProgress = Callable[[int, int], None]
"""Told how many are done, and of how many."""

_PAGE = 1_000
_SLICES = 20
_AT_ONCE = 32


def silently(done: int, total: int) -> None:
    """For a caller who does not want to know how far it is."""


class BulkReport(msgspec.Struct, frozen=True):
    """What became of each: how many were done, and why others were not (id to reason)."""

    done: int
    refused: dict[str, str]


async def retry_dead(
    storage: BaseStorage,
    ids: Iterable[str],
    *,
    from_start: bool = False,
    on_progress: OnProgress = silently,
) -> BulkReport:
    """Put these dead letters' tasks back in the queue. One that cannot be stays a dead letter."""

    async def retry(task_id: str) -> str | None:
        try:
            done = await storage.retry_dead(task_id, from_start=from_start)
        except (DuplicateTask, QueueFull) as error:
            return str(error)
        return None if done else "not a dead letter"

    return await _each(ids, retry, on_progress)


async def delete_dead(
    storage: BaseStorage, ids: Iterable[str], *, on_progress: OnProgress = silently
) -> BulkReport:
    """Forget these dead letters for good."""

    async def delete(task_id: str) -> str | None:
        return None if await storage.delete_dead(task_id) else "not a dead letter"

    return await _each(ids, delete, on_progress)


async def delete_tasks(
    storage: BaseStorage, ids: Iterable[str], *, on_progress: OnProgress = silently
) -> BulkReport:
    """Forget these tasks for good, each with its dead letter. What waits or runs stays."""

    async def delete(task_id: str) -> str | None:
        # The letter first: between the two steps the task can still be found and deleted again.
        had_letter = await storage.delete_dead(task_id)
        if await storage.delete_task(task_id) or had_letter:
            return None
        known = await storage.get_task(task_id)
        return "no such task on record" if known is None else f"has not ended: {known.status}"

    return await _each(ids, delete, on_progress)


async def cancel_tasks(
    storage: BaseStorage,
    ids: Iterable[str],
    *,
    reason: str = "by request",
    on_progress: OnProgress = silently,
) -> BulkReport:
    """Cancel these tasks: waiting ones never run, running ones are told to stop."""

    async def cancel(task_id: str) -> str | None:
        if await storage.cancel(task_id, reason):
            return None
        known = await storage.get_task(task_id)
        return "no such task on record" if known is None else f"ended already: {known.status}"

    return await _each(ids, cancel, on_progress)


async def purge(
    storage: BaseStorage,
    older_than: datetime,
    *,
    dead: bool = False,
    on_progress: OnProgress = silently,
) -> int:
    """Forget finished tasks that ended before that instant, or dead letters; how many.

    Goes from the oldest on in slices, so that no single step holds a large storage for long.
    """
    forget = storage.purge_dead if dead else storage.purge_results
    oldest = await _oldest(storage, dead)
    if oldest is None or oldest >= older_than:
        on_progress(_SLICES, _SLICES)
        return await forget(older_than)
    count = 0
    for number in range(1, _SLICES + 1):
        count += await forget(oldest + (older_than - oldest) * number / _SLICES)
        on_progress(number, _SLICES)
    return count


async def dead_ids(
    storage: BaseStorage,
    *,
    task_type: str | None = None,
    reason: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> list[str]:
    """The ids of all dead letters in question, as of now: what fails meanwhile is not among them."""
    ids: list[str] = []
    after = ""
    while page := await storage.list_dead(
        task_type=task_type, reason=reason, since=since, until=until, limit=_PAGE, after=after
    ):
        ids += (letter.task_id for letter in page)
        after = ids[-1]
    return ids


async def all_tasks(
    storage: BaseStorage,
    *,
    status: TaskStatus | None = None,
    queue: str | None = None,
    func_path: str | None = None,
    after: str = "",
) -> AsyncIterator[Task]:
    """Every task in question, in id order, a page at a time."""
    while page := await storage.list_tasks(
        status=status, queue=queue, func_path=func_path, limit=_PAGE, after=after
    ):
        for task in page:
            yield task
        after = page[-1].id


async def _each(
    ids: Iterable[str],
    act: Callable[[str], Awaitable[str | None]],
    on_progress: OnProgress,
) -> BulkReport:
    wanted = list(dict.fromkeys(ids))
    refused: dict[str, str] = {}
    for start in range(0, len(wanted), _AT_ONCE):
        # Several at once: a storage makes one durable write of what comes while another is under way.
        some = wanted[start : start + _AT_ONCE]
        said = await asyncio.gather(*(act(task_id) for task_id in some))
        refused |= {task_id: why for task_id, why in zip(some, said, strict=True) if why}
        on_progress(start + len(some), len(wanted))
    return BulkReport(len(wanted) - len(refused), refused)


async def _oldest(storage: BaseStorage, dead: bool) -> datetime | None:
    """An instant before which nothing can be found that would be purged; None when unknown."""
    if dead:
        letters = await storage.list_dead(limit=1)
        return letters[0].first_failure if letters else None
    tasks = await storage.list_tasks(limit=1)
    return tasks[0].created_at if tasks else None
