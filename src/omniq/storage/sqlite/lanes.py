"""Lanes: the ready tasks of one function, or of one queue and function, in claim order.

A claim reads the first tasks of the lanes that it asks for, and merges them. What others can run, or
waits in other queues, is in other lanes.
"""

from __future__ import annotations

from functools import cache, lru_cache
from itertools import chain
from typing import Any

import msgspec

from omniq.models import Runnable
from omniq.storage.backend import READY, SUSPECT, Order, Wanted
from omniq.storage.row_rules import Row
from omniq.storage.sqlite import tables
from omniq.storage.sqlite.connection import StatementRunner, statement

_Lane = tuple[int, str, int]
"""Place, queue ("" in claims from all queues), and number of the function."""

_BEGIN: Order = (-(2**63), -(2**63), 0)

_PASSED_OVER = 20
"""Tasks of paused queues that a claim from all queues reads, before it looks for the other queues."""

AFTER_ALL = "\U0010ffff"
"""A text behind all others."""


def first_rows(db: StatementRunner, wanted: Wanted, after: Order | None, limit: int) -> list[Row]:
    """The first ready rows that `wanted` accepts, in claim order, behind `after`."""
    if wanted.queues is None and wanted.paused:
        # Without a look at each queue, unless many tasks of the paused ones stand before all others.
        size = limit + _PASSED_OVER
        everywhere = msgspec.structs.replace(wanted, paused=frozenset())
        rows = first_rows(db, everywhere, after, size)
        found = [row for row in rows if row.queue not in wanted.paused]
        if len(found) >= limit or len(rows) < size:
            return found[:limit]
    if _is_by_queue(wanted):
        db.execute(statement("ready_by_queue"))
    begin = _BEGIN
    if after is not None:
        begin = (tables.rank(-after[0]), *after[1:])
    lanes = ready_lanes(db, wanted)
    if not lanes:
        return []
    if len(lanes) == 1:
        return _rows_of(db, wanted, lanes[0], begin, limit)
    seqs = _first_seqs(db, wanted, dict.fromkeys(lanes, begin), limit)
    return tables.read_rows(
        db, tables.rows_statement("live_rows"), {"seqs": tables.json_text(seqs)}
    )


def _rows_of(
    db: StatementRunner, wanted: Wanted, lane: _Lane, begin: Order, limit: int
) -> list[Row]:
    """The first rows of one lane, read together, because a worker often has one."""
    names = ("place", "queue", "func", "rank", "turn", "seq", "due_by", "limit")
    parameters = dict(zip(names, (*lane, *begin, wanted.due_by, limit), strict=True))
    return tables.read_rows(db, _statement("lane_rows", _is_by_queue(wanted)), parameters)


def _first_seqs(
    db: StatementRunner, wanted: Wanted, unread: dict[_Lane, Order], limit: int
) -> list[int]:
    """The first rows of the lanes, each read behind its position."""
    sql = _statement("positions", _is_by_queue(wanted))
    size = 2 + limit // len(unread)
    found: list[Order] = []
    while unread:
        lanes = [(*lane, *behind) for lane, behind in unread.items()]
        parameters = {"lanes": tables.json_text(lanes), "due_by": wanted.due_by, "limit": size}
        read: list[list[Order]] = [[] for _ in lanes]
        for rank, turn, seq, lane in tables.read_array(db, sql, parameters):
            read[lane].append((rank, turn, seq))
        found = sorted(chain(found, *read))[:limit]
        # A lane of which there is more, and whose next row may be among the first.
        unread = {
            lane[:3]: last
            for lane, rows in zip(lanes, read, strict=True)
            if len(rows) == size and ((last := max(rows)) < found[-1] or len(found) < limit)
        }
        size *= 2
    return [seq for _, _, seq in found]


def _is_by_queue(wanted: Wanted) -> bool:
    return wanted.queues is not None or bool(wanted.paused)


def ready_lanes(db: StatementRunner, wanted: Wanted) -> list[_Lane]:
    """The lanes in which rows are ready that `wanted` accepts."""
    by_queue = _is_by_queue(wanted)
    queues: Any = [""]
    if by_queue:
        queues = (
            tables.read_array(db, statement("queues")) if wanted.queues is None else wanted.queues
        )
        queues = [queue for queue in dict.fromkeys(queues) if queue not in wanted.paused]
    parameters = {
        "places": tables.json_text([READY, SUSPECT] if wanted.suspects else [READY]),
        "queues": tables.json_text(queues),
        "ranges": _ranges(wanted.runnable),
    }
    found = tables.read_array(db, _statement("lanes", by_queue), parameters)
    runnable = wanted.runnable
    return [
        (place, queue, func)
        for place, queue, func, path in dict.fromkeys(map(tuple, found))
        if runnable is None or runnable.accepts(path)
    ]


@lru_cache(maxsize=16)
def _ranges(runnable: Runnable | None) -> str:
    """The ranges of function paths in which the functions are, as JSON: the end of each by its beginning."""
    if runnable is None or runnable.modules is None:
        return tables.json_text({"": AFTER_ALL})
    # A slash follows the dot.
    modules = {f"{module}.": f"{module}/" for module in runnable.modules}
    names = {name: f"{name}\x01" for name in runnable.names}
    return tables.json_text(modules | names)


@cache
def _statement(name: str, by_queue: bool) -> str:
    return (
        tables.rows_statement(name)
        .replace("{queue}", "head.queue" if by_queue else "''")
        .replace("{index}", "omniq_ready_by_queue" if by_queue else "omniq_ready")
    )
