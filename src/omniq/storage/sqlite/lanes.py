"""Lanes: the ready tasks of one function, or of one queue and function, in claim order.

A claim reads the first tasks of the lanes that it asks for, and merges them. What others can run, or
waits in other queues, is in other lanes.
"""

from __future__ import annotations

from functools import cache
from operator import attrgetter
from typing import Any

from omniq.storage.backend import READY, SUSPECT, Order, Wanted
from omniq.storage.row_rules import Row
from omniq.storage.sqlite import tables
from omniq.storage.sqlite.connection import StatementRunner, statement
from omniq.storage.types import Runnable

_Lane = tuple[int, str, str]
"""Place, queue ("" in claims from all queues), and function."""

_BEGIN: Order = (1 - 2**63, -(2**63), 0)
AFTER_ALL = "\U0010ffff"
"""A text behind all others."""

_order = attrgetter("order")


def first_rows(db: StatementRunner, wanted: Wanted, after: Order | None, limit: int) -> list[Row]:
    """The first ready rows that `wanted` accepts, in claim order, behind `after`."""
    by_queue = _is_by_queue(wanted)
    if by_queue:
        db.execute(statement("ready_by_queue"))
    lanes = ready_lanes(db, wanted)
    size = limit if len(lanes) == 1 else max(2, 2 * limit // max(1, len(lanes)))
    unread = dict.fromkeys(lanes, after or _BEGIN)
    rows: list[Row] = []
    while unread:
        rows += _read(db, unread, wanted.due_by, size, by_queue=by_queue)
        rows.sort(key=_order)
        last = _BEGIN if len(rows) < limit else rows[limit - 1].order
        unread = {
            lane: behind
            for lane, behind in _ends(rows, unread, size, by_queue=by_queue).items()
            if len(rows) < limit or behind < last
        }
        size *= 2
    return rows[:limit]


def _read(
    db: StatementRunner, lanes: dict[_Lane, Order], due_by: int, size: int, *, by_queue: bool
) -> list[Row]:
    positions = [
        [*lane, tables.rank(-rank), turn, seq] for lane, (rank, turn, seq) in lanes.items()
    ]
    parameters = {"lanes": tables.json_text(positions), "due_by": due_by, "limit": size}
    return tables.read_rows(db, _statement("first_in_lanes", by_queue), parameters)


def _ends(
    rows: list[Row], read: dict[_Lane, Order], size: int, *, by_queue: bool
) -> dict[_Lane, Order]:
    """The position of the last row of each lane of which there may be more rows."""
    counts = dict.fromkeys(read, 0)
    ends: dict[_Lane, Order] = {}
    for row in rows:
        place = SUSPECT if row.crashes else READY
        lane = (place, row.queue if by_queue else "", row.func_path)
        if lane in counts and row.order > read[lane]:
            counts[lane] += 1
            ends[lane] = row.order
    return {lane: end for lane, end in ends.items() if counts[lane] == size}


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
        "ranges": tables.json_text(_ranges(wanted.runnable)),
    }
    found = tables.read_array(db, _statement("lanes", by_queue), parameters)
    runnable = wanted.runnable
    return [
        (place, queue, func_path)
        for place, queue, func_path in dict.fromkeys(map(tuple, found))
        if runnable is None or runnable.accepts(func_path)
    ]


def _ranges(runnable: Runnable | None) -> list[tuple[str, str]]:
    """The ranges of function paths in which the functions are."""
    if runnable is None or runnable.modules is None:
        return [("", AFTER_ALL)]
    # A slash follows the dot.
    modules = [(f"{module}.", f"{module}/") for module in runnable.modules]
    return modules + [(name, f"{name}\x01") for name in runnable.names]


@cache
def _statement(name: str, by_queue: bool) -> str:
    table = "head" if name == "first_in_lanes" else "next"
    return (
        tables.rows_statement(name)
        .replace("{queue}", f"{table}.queue" if by_queue else "''")
        .replace("{index}", "omniq_ready_by_queue" if by_queue else "omniq_ready")
    )
