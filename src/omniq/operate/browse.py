"""Looking for tasks: filters that a storage knows, and those that are asked here, a page at a time."""

from __future__ import annotations

from datetime import datetime
from itertools import takewhile

import msgspec

from omniq.models import Task, TaskStatus
from omniq.operate.recent import before, past, tasks_before
from omniq.storage.base import BaseStorage

_CHUNK = 250
_MOST_LOOKED_AT = 2_000


class TaskFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which tasks. `since` and `until` are about the time of enqueue, `metadata` is name to text.

    `prefix` is how the id begins.
    """

    status: TaskStatus | None = None
    queue: str | None = None
    func_path: str | None = None
    prefix: str = ""
    since: datetime | None = None
    until: datetime | None = None
    metadata: dict[str, str] = {}


class TaskPage(msgspec.Struct, frozen=True):
    """Some tasks, the newest first. `cursor` leads to the next page; None: there is no other.

    `looked_at` is how many tasks were looked at for it: a page may be short, even empty, and lead
    on, so that no question takes long.
    """

    tasks: tuple[Task, ...]
    cursor: str | None
    looked_at: int


async def browse(
    storage: BaseStorage, wanted: TaskFilter, *, limit: int, cursor: str | None = None
) -> TaskPage:
    """The tasks in question, a page of them; with a prefix, in order of id."""
    if wanted.prefix:
        return await _by_prefix(storage, wanted, limit, cursor)
    if cursor is None and wanted.until is not None:
        cursor = before(wanted.until)
    found: list[Task] = []
    looked_at = 0
    while looked_at < _MOST_LOOKED_AT:
        size = _CHUNK if _asks_here(wanted) else limit + 1
        some = await tasks_before(
            storage,
            cursor,
            size,
            status=wanted.status,
            queue=wanted.queue,
            func_path=wanted.func_path,
        )
        looked_at += len(some)
        room = limit - len(found)
        fitting = [number for number, task in enumerate(some) if _matches(task, wanted)]
        found += [some[number] for number in fitting[:room]]
        if len(fitting) > room:
            # The cursor stands before the first that did not fit.
            return TaskPage(tuple(found), past(cursor, some[: fitting[room]]), looked_at)
        if len(some) < size or _is_before(some[-1], wanted.since):
            return TaskPage(tuple(found), None, looked_at)
        cursor = past(cursor, some)
    return TaskPage(tuple(found), cursor, looked_at)


async def _by_prefix(
    storage: BaseStorage, wanted: TaskFilter, limit: int, cursor: str | None
) -> TaskPage:
    """Ids are sorted, so those that begin alike stand together."""
    exact = None if cursor else await storage.get_task(wanted.prefix)
    listed = await storage.list_tasks(
        status=wanted.status,
        queue=wanted.queue,
        func_path=wanted.func_path,
        limit=_CHUNK + limit,
        after=cursor or wanted.prefix,
    )
    alike = list(takewhile(lambda task: task.id.startswith(wanted.prefix), listed))
    some = [task for task in ([exact] if exact else []) + alike if _matches(task, wanted)]
    if len(some) > limit:
        return TaskPage(tuple(some[:limit]), some[limit - 1].id, len(listed))
    is_cut = len(alike) == _CHUNK + limit
    return TaskPage(tuple(some), alike[-1].id if is_cut else None, len(listed))


def _asks_here(wanted: TaskFilter) -> bool:
    return bool(wanted.metadata or wanted.since or wanted.until)


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
