"""Tasks by filter, one page at a time.

A storage filters by status, queue, function and time; metadata and id prefix are checked here.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from itertools import takewhile

import msgspec

from omniq.errors import InvalidValue, TaskNotFound
from omniq.models import Task, TaskStatus
from omniq.storage.base import BaseStorage

_CHUNK = 250
_MAX_CHUNKS = 6
_MAX_SCANS = 3
_SHORTEST_PREFIX = 6


class TaskFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which tasks. `since` and `until` bound the time of enqueue, `metadata` maps name to text.

    `prefix` is the beginning of the id.
    """

    status: TaskStatus | None = None
    queue: str | None = None
    func_path: str | None = None
    prefix: str = ""
    since: datetime | None = None
    until: datetime | None = None
    metadata: dict[str, str] = {}


class TaskPage(msgspec.Struct, frozen=True):
    """Some tasks, newest first. `cursor` starts the next page; None: this is the last page.

    `is_cut`: the search stopped early to bound its time, so the page may be short or empty although
    `cursor` leads to more tasks.
    """

    tasks: tuple[Task, ...]
    cursor: str | None
    is_cut: bool


async def find_tasks(
    storage: BaseStorage, wanted: TaskFilter, *, limit: int, cursor: str | None = None
) -> TaskPage:
    """One page of the tasks that match, newest first; with a prefix, in order of id."""
    if wanted.prefix:
        return await _by_prefix(storage, wanted, limit, cursor)
    found: list[Task] = []
    for _ in range(_MAX_CHUNKS if wanted.metadata else _MAX_SCANS):
        scan = await storage.scan_tasks(
            status=wanted.status,
            queue=wanted.queue,
            func_path=wanted.func_path,
            limit=_CHUNK if wanted.metadata else limit - len(found),
            until=wanted.until,
            cursor=cursor,
        )
        for number, task in enumerate(scan.tasks):
            if _is_before(task, wanted.since):
                return TaskPage(tuple(found), None, False)
            if not _matches(task, wanted):
                continue
            found.append(task)
            if len(found) == limit:
                is_last = number == len(scan.tasks) - 1
                return TaskPage(
                    tuple(found), scan.cursor if is_last else scan.cursors[number], False
                )
        cursor = scan.cursor
        if cursor is None:
            break
    return TaskPage(tuple(found), cursor, cursor is not None)


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
    storage: BaseStorage, wanted: TaskFilter, limit: int, cursor: str | None
) -> TaskPage:
    """One page of the tasks whose id begins with the prefix: they are adjacent in order of id.

    The other conditions are checked here: a storage would fill its page from all later ids.
    """
    exact = None if cursor else await storage.get_task(wanted.prefix)
    listed = await storage.list_tasks(limit=_CHUNK + limit, after=cursor or wanted.prefix)
    with_prefix = list(takewhile(lambda task: task.id.startswith(wanted.prefix), listed))
    matching = [task for task in ([exact] if exact else []) + with_prefix if _matches(task, wanted)]
    if len(matching) > limit:
        return TaskPage(tuple(matching[:limit]), matching[limit - 1].id, False)
    is_cut = len(with_prefix) == _CHUNK + limit
    return TaskPage(tuple(matching), with_prefix[-1].id if is_cut else None, is_cut)


def _is_before(task: Task, since: datetime | None) -> bool:
    return since is not None and task.created_at < since


def _matches(task: Task, wanted: TaskFilter) -> bool:
    return (
        (wanted.status is None or task.status is wanted.status)
        and (wanted.queue is None or task.queue == wanted.queue)
        and (wanted.func_path is None or task.func_path == wanted.func_path)
        and (wanted.since is None or task.created_at >= wanted.since)
        and (wanted.until is None or task.created_at < wanted.until)
        and all(_text(task.metadata.get(name)) == text for name, text in wanted.metadata.items())
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)
