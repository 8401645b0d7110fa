"""The newest tasks and dead letters of a storage that lists them oldest first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from typing import TypeVar

from omniq.clock import encode_id, to_micros
from omniq.errors import InvalidTask
from omniq.models import DeadLetter, Task, TaskStatus
from omniq.storage.base import BaseStorage

T = TypeVar("T")

_SMALL = 200
_MARGIN = 2
_FIRST_SPAN = 2_000
_WIDENING = 8
_MOST_WALKED = 50

# Ids that omniq makes begin with a digit up to 7; others mostly do not, and sort after them.
_OTHERS = "8"
_BEYOND_OWN = "8!"
_MOST_OTHERS = 1_000
_LATEST = 2**63

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_DIGITS = str.maketrans(_CROCKFORD, "0123456789abcdefghijklmnopqrstuv")


async def newest_tasks(
    storage: BaseStorage,
    limit: int,
    *,
    status: TaskStatus | None = None,
    queue: str | None = None,
    func_path: str | None = None,
) -> list[Task]:
    """The newest of the tasks in question, newest first."""
    return await tasks_before(storage, None, limit, status=status, queue=queue, func_path=func_path)


async def tasks_before(
    storage: BaseStorage,
    cursor: str | None,
    limit: int,
    *,
    status: TaskStatus | None = None,
    queue: str | None = None,
    func_path: str | None = None,
) -> list[Task]:
    """A page of the tasks in question, newest first; `past` gives the cursor of the next.

    By the time in the ids that omniq makes: pages of them cover every such task once. Of ids that
    were made otherwise, by a schedule or by hand, the first thousand are looked at.
    """

    async def page(after: str, size: int) -> list[Task]:
        return await storage.list_tasks(
            status=status, queue=queue, func_path=func_path, limit=size, after=after
        )

    own_before, others_before = _place(cursor)
    own = await _newest(storage, page, lambda task: task.id, limit, own_before)
    others = [task for task in await page(_OTHERS, _MOST_OTHERS) if _age(task) < others_before]
    own = sorted(own, key=lambda task: task.id, reverse=True)[:limit]
    return sorted(own + others, key=_age, reverse=True)[:limit]


def past(cursor: str | None, seen: Iterable[Task]) -> str:
    """The cursor that leads on after these tasks of a page, the first ones of it."""
    own_before, others_before = _place(cursor)
    for task in seen:
        if task.id > _OTHERS:
            others_before = min(others_before, _age(task))
        else:
            own_before = min(own_before, task.id)
    return f"{own_before}~{others_before[0]}~{others_before[1]}"


def before(instant: datetime) -> str:
    """The cursor that leads to what was enqueued before that instant."""
    micros = max(0, to_micros(instant))
    return f"{encode_id(micros // 1000 + 1, 0)}~{micros}~"


def _age(task: Task) -> tuple[int, str]:
    return to_micros(task.created_at), task.id


def _place(cursor: str | None) -> tuple[str, tuple[int, str]]:
    """How far the tasks with ids of omniq's own have been read, and how far the others."""
    if cursor is None:
        return _BEYOND_OWN, (_LATEST, "")
    try:
        own, micros, other = cursor.split("~")
        return own, (int(micros), other)
    except ValueError:
        raise InvalidTask("cursor: not one that a page has given") from None


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

    found = await _newest(storage, page, lambda letter: letter.task_id, limit, None)
    return sorted(found, key=lambda letter: letter.last_failure, reverse=True)[:limit]


async def _newest(
    storage: BaseStorage,
    page: Callable[[str, int], Awaitable[list[T]]],
    id_of: Callable[[T], str],
    limit: int,
    before: str | None,
) -> list[T]:
    """The last `limit` by id or a few more, in some pages of bounded size, however many there are."""
    size = limit * _MARGIN + _SMALL

    async def look(after: str) -> tuple[list[T], bool]:
        """What comes after that id, and whether there may be more of it."""
        found = await page(after, size)
        kept = found if before is None else [each for each in found if id_of(each) < before]
        return kept, len(kept) == size

    first, is_cut = await look("")
    if not is_cut:
        return first
    now, span = _millis(storage, before), _FIRST_SPAN
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


def _millis(storage: BaseStorage, task_id: str | None) -> int:
    """The time in an id that omniq made, in milliseconds; now for any other."""
    if task_id is not None and len(task_id) == 26 and set(task_id) <= set(_CROCKFORD):
        return (int(task_id.translate(_DIGITS), 32) >> 80) + 1
    return storage.clock.micros() // 1000
