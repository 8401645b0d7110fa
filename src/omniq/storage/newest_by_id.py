"""The newest tasks of a storage that sorts tasks by id and stores no order of enqueue.

The ids that omniq makes begin with their time, so these tasks are read backwards by id. Other ids,
made by a schedule or a caller, carry no time, and most of them sort after all the ids of omniq. The
first thousand of those tasks are read and merged into the order by the time of their enqueue.
"""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable

from omniq.clock import encode_id
from omniq.errors import InvalidValue
from omniq.storage.inspection import Scan, ScanQuery, TaskQuery
from omniq.storage.row_rules import Row

# Ids that omniq makes ("time ids") begin with a digit up to 7.
_OTHER_IDS = "8"
_AFTER_TIME_IDS = "8!"
_MAX_OTHERS = 1_000
_LATEST = 2**63

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_DIGITS = str.maketrans(_CROCKFORD, "0123456789abcdefghijklmnopqrstuv")

ReadBackwards = Callable[[str, int], Awaitable[tuple[list[Row], str | None]]]
"""Returns the matching rows before an id, up to a number of rows, highest id first; and the last id
that was read, if reading stopped at its own bound before that number was reached."""

ReadPage = Callable[[TaskQuery], Awaitable[list[Row]]]
"""Returns a page in id order."""

Position = tuple[str, tuple[int, str]]
"""How far the time ids have been read, and how far the others (time of enqueue, id)."""


async def scan_by_id(query: ScanQuery, read_backwards: ReadBackwards, read_page: ReadPage) -> Scan:
    """Return the matching tasks of both kinds of id, newest first."""
    position = _position(query)
    by_time, stopped_at = await read_backwards(position[0], query.limit + 1)
    others = await read_page(
        TaskQuery(
            status=query.status,
            queue=query.queue,
            func_path=query.func_path,
            limit=_MAX_OTHERS,
            after=_OTHER_IDS,
        )
    )
    # A task older than the last id that was read belongs on a later page.
    floor = (_millis(stopped_at) * 1000, "") if stopped_at else (-1, "")
    in_range = [row for row in others if floor <= _age(row) < position[1]]
    in_range.sort(key=_age, reverse=True)
    rows = list(heapq.merge(by_time, in_range, key=_merge_key, reverse=True))
    cursors = []
    for row in rows[: query.limit]:
        position = _position_after(position, row)
        cursors.append(_cursor(position))
    if len(rows) > query.limit:
        return Scan(rows[: query.limit], cursors, _cursor(position))
    if stopped_at is None:
        return Scan(rows, cursors, None)
    return Scan(rows, cursors, _cursor((stopped_at, min(position[1], floor))))


def _position(query: ScanQuery) -> Position:
    if query.cursor is None:
        if query.until is None:
            return _AFTER_TIME_IDS, (_LATEST, "")
        micros = max(0, query.until)
        return encode_id(micros // 1000 + 1, 0), (micros, "")
    try:
        time_id, micros_text, other = query.cursor.split("~")
        return time_id, (int(micros_text), other)
    except ValueError:
        raise InvalidValue("cursor: pass one that an earlier page returned") from None


def _cursor(position: Position) -> str:
    time_id, (micros, other) = position
    return f"{time_id}~{micros}~{other}"


def _position_after(position: Position, row: Row) -> Position:
    time_id, other = position
    return (time_id, _age(row)) if row.id > _OTHER_IDS else (row.id, other)


def _age(row: Row) -> tuple[int, str]:
    return row.created_at, row.id


def _merge_key(row: Row) -> int:
    """A time that decreases along each of the two lists, even if the enqueuers' clocks differed."""
    return row.created_at if row.id > _OTHER_IDS else _millis(row.id) * 1000


def _millis(task_id: str) -> int:
    """Return the time in an id that omniq made; 0 for any other id."""
    if len(task_id) == 26 and set(task_id) <= set(_CROCKFORD):
        return int(task_id.translate(_DIGITS), 32) >> 80
    return 0
