"""The newest tasks of a storage that sorts them by id and keeps no order of enqueue.

The ids that omniq makes begin with their time, so those are read backwards. Ids that were made
otherwise, by a schedule or by hand, mostly sort after them all, and say nothing: of those the first
thousand are read, and stand where they belong by the time of their enqueue.
"""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable

from omniq.clock import encode_id
from omniq.errors import InvalidTask
from omniq.storage.inspection import Scan, ScanQuery, TaskQuery
from omniq.storage.row_rules import Row

# Ids that omniq makes begin with a digit up to 7.
_OTHERS = "8"
_BEYOND_OWN = "8!"
_MOST_OTHERS = 1_000
_LATEST = 2**63

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_DIGITS = str.maketrans(_CROCKFORD, "0123456789abcdefghijklmnopqrstuv")

Back = Callable[[str, int], Awaitable[tuple[list[Row], str | None]]]
"""Rows in question before that id, so many at most, the last id first; and, when it has stopped
before it had so many, the last id that it has looked at."""

Forth = Callable[[TaskQuery], Awaitable[list[Row]]]
"""A page in id order."""

Place = tuple[str, tuple[int, str]]
"""How far the ids of omniq's own have been read, and how far the others (time, id)."""


async def scan_by_id(query: ScanQuery, back: Back, forth: Forth) -> Scan:
    """Both kinds together, the newest first."""
    place = _place(query)
    own, stopped_at = await back(place[0], query.limit + 1)
    others = await forth(
        TaskQuery(
            status=query.status,
            queue=query.queue,
            func_path=query.func_path,
            limit=_MOST_OTHERS,
            after=_OTHERS,
        )
    )
    # What is older than the last id that was looked at belongs on a later page.
    floor = (_millis(stopped_at) * 1000, "") if stopped_at else (-1, "")
    rest = sorted((row for row in others if floor <= _age(row) < place[1]), key=_age, reverse=True)
    rows = list(heapq.merge(own, rest, key=_when, reverse=True))
    marks = []
    for row in rows[: query.limit]:
        place = _past(place, row)
        marks.append(_text(place))
    if len(rows) > query.limit:
        return Scan(rows[: query.limit], marks, _text(place))
    if stopped_at is None:
        return Scan(rows, marks, None)
    return Scan(rows, marks, _text((stopped_at, min(place[1], floor))))


def _place(query: ScanQuery) -> Place:
    if query.cursor is None:
        if query.until is None:
            return _BEYOND_OWN, (_LATEST, "")
        micros = max(0, query.until)
        return encode_id(micros // 1000 + 1, 0), (micros, "")
    try:
        own, micros_text, other = query.cursor.split("~")
        return own, (int(micros_text), other)
    except ValueError:
        raise InvalidTask("cursor: not one that a page has given") from None


def _text(place: Place) -> str:
    own, (micros, other) = place
    return f"{own}~{micros}~{other}"


def _past(place: Place, row: Row) -> Place:
    own, other = place
    return (own, _age(row)) if row.id > _OTHERS else (row.id, other)


def _age(row: Row) -> tuple[int, str]:
    return row.created_at, row.id


def _when(row: Row) -> int:
    """Falls along each of the two lists, whatever the clocks of those who enqueued said."""
    return row.created_at if row.id > _OTHERS else _millis(row.id) * 1000


def _millis(task_id: str) -> int:
    """The time in an id that omniq made; 0 for any other."""
    if len(task_id) == 26 and set(task_id) <= set(_CROCKFORD):
        return int(task_id.translate(_DIGITS), 32) >> 80
    return 0
