"""Tasks by filter, one page at a time.

A storage filters by status, queue, function and time; the other conditions are checked here.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from itertools import takewhile

from omniq.errors import InvalidValue, TaskNotFound
from omniq.models import Task
from omniq.operations.failed_tasks import find_failed_tasks
from omniq.operations.search_query import TaskSearch
from omniq.operations.task_match import TaskPage, matches
from omniq.storage.base import BaseStorage

_CHUNK = 1_000
PATIENCE = 2.5
"""Seconds that a search takes at most, about: what it has not read is on the next page."""

_SHORTEST_PREFIX = 6


async def find_tasks(
    storage: BaseStorage,
    wanted: TaskSearch,
    *,
    limit: int,
    cursor: str | None = None,
    patience: float = PATIENCE,
) -> TaskPage:
    """One page of the tasks that match, newest first; with a prefix, in order of id.

    It searches for up to `patience` seconds. Tasks by error or worker are in order of their last failure.
    """
    if wanted.reads_failures:
        return await find_failed_tasks(
            storage, wanted, limit=limit, cursor=cursor, patience=patience
        )
    if wanted.prefix:
        return await _by_prefix(storage, wanted, limit, cursor)
    clock = storage.clock
    deadline, read = clock.monotonic() + patience, 0
    found: list[Task] = []
    reached: datetime | None = None
    while True:
        scan = await storage.scan_tasks(
            status=wanted.status,
            queue=wanted.queue,
            func_path=wanted.func_path,
            limit=_CHUNK if wanted.is_filtered_here else limit - len(found),
            until=wanted.until,
            cursor=cursor,
        )
        for number, task in enumerate(scan.tasks):
            read, reached = read + 1, task.created_at
            if _is_before(task, wanted.since):
                return TaskPage(tuple(found), None, False, wanted.since, read)
            if not matches(task, wanted):
                continue
            found.append(task)
            if len(found) == limit:
                is_last = number == len(scan.tasks) - 1
                following = scan.cursor if is_last else scan.cursors[number]
                return TaskPage(tuple(found), following, False, reached, read)
        cursor = scan.cursor
        if cursor is None:
            return TaskPage(tuple(found), None, False, reached, read)
        if clock.monotonic() >= deadline:
            return TaskPage(tuple(found), cursor, True, reached, read)


async def full_id(storage: BaseStorage, text: str) -> str:
    """The id that begins with the text, if there is exactly one; else the text itself.

    Raises `InvalidValue` when several tasks have that beginning. Less than six characters are too
    little for a beginning, which is `TaskNotFound`: a slip of the keyboard would choose a task.
    """
    if await storage.get_task(text) is not None:
        return text
    listed = {task.id for task in await storage.list_tasks(limit=2, after=text)}
    # A dead letter may be stored for longer than its task.
    listed |= {letter.task_id for letter in await storage.list_dead(limit=2, after=text)}
    found = sorted(task_id for task_id in listed if task_id.startswith(text))
    if found and found[0] != text and len(text) < _SHORTEST_PREFIX:
        hint = f"; for the beginning of an id, give at least {_SHORTEST_PREFIX} characters"
        raise TaskNotFound(text, hint)
    if len(found) > 1:
        raise InvalidValue(
            f"{text}: the beginning of several ids, such as {found[0]} and {found[1]}; give more "
            "characters"
        )
    return found[0] if found else text


async def full_ids(storage: BaseStorage, texts: Iterable[str] | None) -> list[str]:
    """The ids that these texts begin."""
    return [await full_id(storage, text) for text in texts or ()]


async def _by_prefix(
    storage: BaseStorage, wanted: TaskSearch, limit: int, cursor: str | None
) -> TaskPage:
    """One page of the tasks whose id begins with the prefix: they are adjacent in order of id.

    The other conditions are checked here: a storage would fill its page from all later ids.
    """
    exact = None if cursor else await storage.get_task(wanted.prefix)
    listed = await storage.list_tasks(limit=_CHUNK + limit, after=cursor or wanted.prefix)
    with_prefix = list(takewhile(lambda task: task.id.startswith(wanted.prefix), listed))
    matching = [task for task in ([exact] if exact else []) + with_prefix if matches(task, wanted)]
    if len(matching) > limit:
        return TaskPage(tuple(matching[:limit]), matching[limit - 1].id, False)
    is_cut = len(with_prefix) == _CHUNK + limit
    return TaskPage(tuple(matching), with_prefix[-1].id if is_cut else None, is_cut)


def _is_before(task: Task, since: datetime | None) -> bool:
    return since is not None and task.created_at < since
