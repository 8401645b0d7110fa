"""Tasks by the text of their error, or by the worker that ran them: those that failed, are retried, or run."""

from __future__ import annotations

from collections.abc import AsyncIterator

from omniq.models import DeadLetter, Task, TaskStatus
from omniq.operations.newest import dead_newest_first, position_of
from omniq.operations.search_query import TaskSearch
from omniq.operations.task_match import TaskPage, matches
from omniq.storage.base import BaseStorage

_MAX_LIVE = 1_000
"""Tasks that run or are retried which are searched, at most: each costs a read."""


async def find_failed_tasks(
    storage: BaseStorage,
    wanted: TaskSearch,
    *,
    limit: int,
    cursor: str | None,
    patience: float,
) -> TaskPage:
    """First the tasks that run or are retried, then the dead letters, latest failure first."""
    clock = storage.clock
    deadline, read = clock.monotonic() + patience, 0
    found: list[Task] = []
    if cursor is None:
        async for task in _live(storage, wanted):
            read += 1
            if matches(task, wanted) and await failed_so(storage, task.id, wanted, task.owner):
                found.append(task)
            if clock.monotonic() >= deadline:
                break
    if wanted.status not in (None, TaskStatus.FAILED):
        return TaskPage(tuple(found), None, False, None, read)
    last: DeadLetter | None = None
    letters = dead_newest_first(storage, func_path=wanted.func_path, before=cursor or "")
    async for letter in letters:
        read, last = read + 1, letter
        if await _matching_letter(storage, letter, wanted):
            dead = await storage.get_dead_task(letter.task_id)
            if dead is not None and matches(dead, wanted):
                found.append(dead)
        if len(found) >= limit or clock.monotonic() >= deadline:
            is_cut = len(found) < limit
            return TaskPage(tuple(found), position_of(letter), is_cut, letter.last_failure, read)
    return TaskPage(tuple(found), None, False, None if last is None else last.last_failure, read)


async def _live(storage: BaseStorage, wanted: TaskSearch) -> AsyncIterator[Task]:
    for status in (TaskStatus.RUNNING, TaskStatus.RETRYING):
        if wanted.status in (None, status):
            scan = await storage.scan_tasks(
                status=status, queue=wanted.queue, func_path=wanted.func_path, limit=_MAX_LIVE
            )
            for task in scan.tasks:
                yield task


async def _matching_letter(storage: BaseStorage, letter: DeadLetter, wanted: TaskSearch) -> bool:
    if wanted.error and wanted.error.lower() not in letter.error_details.lower():
        return False
    return not wanted.worker or await failed_so(storage, letter.task_id, wanted, None)


async def failed_so(
    storage: BaseStorage, task_id: str, wanted: TaskSearch, owner: str | None
) -> bool:
    """Whether an attempt of the task has that error and was made by that worker."""
    if owner is not None and not wanted.error and owner.startswith(wanted.worker):
        return True
    for attempt in await storage.history(task_id):
        error = attempt.error
        text = "" if error is None else f"{error.error_type}: {error.message}\n{error.traceback}"
        if (attempt.owner or "").startswith(wanted.worker) and wanted.error.lower() in text.lower():
            return True
    return False
