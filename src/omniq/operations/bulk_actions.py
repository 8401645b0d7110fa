"""Retries, cancels, changes, deletes and purges many tasks: one atomic step per task, with progress.

Steps that completed before an error or an interruption stay done; a second call does the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from datetime import datetime

import msgspec

from omniq.errors import (
    DuplicateTask,
    QueueFull,
    SerializationError,
    TaskNotFound,
    TaskNotWaiting,
)
from omniq.models import Task, TaskStatus, type_of
from omniq.operations.task_changes import change_task
from omniq.storage.base import BaseStorage
from omniq.text.to_json import JsonRecord

OnProgress = Callable[[int, int], None]
"""Called with the number of tasks done, and their total."""

_PAGE = 1_000
_MAX_REFUSED = 1_000
_PURGE_STEPS = 20
_CONCURRENCY = 32


def no_progress(done: int, total: int) -> None:
    """An `OnProgress` that does nothing."""


class BulkReport(JsonRecord, msgspec.Struct, frozen=True):
    """How many tasks were changed, and why the others were not (id to reason).

    `refused` has the first thousand, and `more_refused` counts the others. `stopped`: the caller has
    stopped it between two steps, so there may be more to change.
    """

    done: int
    refused: dict[str, str]
    more_refused: int = 0
    stopped: bool = False

    @property
    def refused_count(self) -> int:
        """How many were refused."""
        return len(self.refused) + self.more_refused

    def plus(self, other: BulkReport) -> BulkReport:
        """Both reports in one."""
        refused = dict(self.refused)
        for task_id, why in other.refused.items():
            if len(refused) < _MAX_REFUSED:
                refused[task_id] = why
        count = self.refused_count + other.refused_count
        return BulkReport(self.done + other.done, refused, count - len(refused))


OnStep = Callable[[BulkReport], bool | None]
"""Called after each step with what is done until then; returns False to stop."""


async def change_in_steps(
    steps: AsyncIterator[Sequence[str]],
    change: Callable[[Sequence[str]], Awaitable[BulkReport]],
    on_step: OnStep | None = None,
) -> BulkReport:
    """Change what is selected, step by step."""
    report = BulkReport(0, {})
    async for ids in steps:
        report = report.plus(await change(ids))
        if on_step is not None and on_step(report) is False:
            return msgspec.structs.replace(report, stopped=True)
    return report


async def retry_dead(
    storage: BaseStorage,
    ids: Iterable[str],
    *,
    from_start: bool = False,
    on_progress: OnProgress = no_progress,
) -> BulkReport:
    """Enqueue the tasks of these dead letters again. One that is refused stays a dead letter."""

    async def retry(task_id: str) -> str | None:
        try:
            done = await storage.retry_dead(task_id, from_start=from_start)
        except (DuplicateTask, QueueFull) as error:
            return str(error)
        return None if done else "not a dead letter"

    return await _each(ids, retry, on_progress)


async def delete_dead(
    storage: BaseStorage, ids: Iterable[str], *, on_progress: OnProgress = no_progress
) -> BulkReport:
    """Delete these dead letters permanently."""

    async def delete(task_id: str) -> str | None:
        return None if await storage.delete_dead(task_id) else "not a dead letter"

    return await _each(ids, delete, on_progress)


async def delete_tasks(
    storage: BaseStorage, ids: Iterable[str], *, on_progress: OnProgress = no_progress
) -> BulkReport:
    """Delete these tasks permanently, each with its dead letter. Live tasks are refused."""

    async def delete(task_id: str) -> str | None:
        # The dead letter first: after a crash in between, the task can be found and deleted again.
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
    on_progress: OnProgress = no_progress,
) -> BulkReport:
    """Cancel these tasks: waiting ones never run, running ones are asked to stop."""

    async def cancel(task_id: str) -> str | None:
        if await storage.cancel(task_id, reason):
            return None
        known = await storage.get_task(task_id)
        return "no such task on record" if known is None else f"ended already: {known.status}"

    return await _each(ids, cancel, on_progress)


async def run_now(
    storage: BaseStorage, ids: Iterable[str], *, on_progress: OnProgress = no_progress
) -> BulkReport:
    """Make these waiting tasks due now. Pauses and limits hold."""

    async def run(task_id: str) -> str | None:
        try:
            await storage.run_task_now(task_id)
        except TaskNotFound:
            return "no such task on record"
        except (TaskNotWaiting, SerializationError) as error:
            return str(error)
        return None

    return await _each(ids, run, on_progress)


async def change_tasks(
    storage: BaseStorage,
    ids: Iterable[str],
    *,
    priority: int | None = None,
    queue: str | None = None,
    eta: datetime | None = None,
    on_progress: OnProgress = no_progress,
) -> BulkReport:
    """Give these waiting tasks another priority, queue or eta."""

    async def change(task_id: str) -> str | None:
        try:
            await change_task(storage, task_id, priority=priority, queue=queue, eta=eta)
        except TaskNotFound:
            return "no such task on record"
        except (TaskNotWaiting, SerializationError) as error:
            return str(error)
        return None

    return await _each(ids, change, on_progress)


async def purge(
    storage: BaseStorage,
    older_than: datetime,
    *,
    dead: bool = False,
    on_progress: OnProgress = no_progress,
) -> int:
    """Delete finished tasks that ended before that instant, or dead letters; return how many.

    Deletes the oldest first in several steps, so that no single step blocks a large storage.
    """
    purge_before = storage.purge_dead if dead else storage.purge_results
    oldest = await _oldest(storage, dead)
    if oldest is None or oldest >= older_than:
        on_progress(_PURGE_STEPS, _PURGE_STEPS)
        return await purge_before(older_than)
    count = 0
    for number in range(1, _PURGE_STEPS + 1):
        count += await purge_before(oldest + (older_than - oldest) * number / _PURGE_STEPS)
        on_progress(number, _PURGE_STEPS)
    return count


async def dead_ids(
    storage: BaseStorage,
    *,
    func_path: str | None = None,
    reason: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    task_type: str | None = None,
) -> list[str]:
    """The ids of all dead letters that match now; tasks that fail later are not included."""
    ids: list[str] = []
    after = ""
    while page := await storage.list_dead(
        func_path=func_path,
        reason=reason,
        since=since,
        until=until,
        limit=_PAGE,
        after=after,
        task_type=task_type,
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
    task_type: str | None = None,
) -> AsyncIterator[Task]:
    """Every task that matches, in order of id, read one page at a time."""
    while page := await storage.list_tasks(
        status=status, queue=queue, func_path=func_path, limit=_PAGE, after=after
    ):
        for task in page:
            if task_type in (None, type_of(task)):
                yield task
        after = page[-1].id


async def _each(
    ids: Iterable[str],
    act: Callable[[str], Awaitable[str | None]],
    on_progress: OnProgress,
) -> BulkReport:
    wanted = list(dict.fromkeys(ids))
    refused: dict[str, str] = {}
    for start in range(0, len(wanted), _CONCURRENCY):
        # Concurrently: a storage combines requests that arrive during a write into the next one.
        batch = wanted[start : start + _CONCURRENCY]
        reasons = await asyncio.gather(*(act(task_id) for task_id in batch))
        refused |= {task_id: why for task_id, why in zip(batch, reasons, strict=True) if why}
        on_progress(start + len(batch), len(wanted))
    return BulkReport(len(wanted) - len(refused), refused)


async def _oldest(storage: BaseStorage, dead: bool) -> datetime | None:
    """An instant before which there is nothing to purge; None when the storage is empty."""
    if dead:
        letters = await storage.list_dead(limit=1)
        return letters[0].first_failure if letters else None
    tasks = await storage.list_tasks(limit=1)
    return tasks[0].created_at if tasks else None
