"""Waiting rows are read in order, and rows that no longer wait leave nothing behind."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from omniq.models import Runnable
from omniq.storage.backend import Wanted
from omniq.storage.ready_rows import ReadyRows
from omniq.storage.row_rules import row_of
from omniq.testing.builders import a_task

NOW = 10**15
ALL = Wanted(due_by=NOW)


def put(ready: ReadyRows, number: int, **options: Any) -> None:
    row = row_of(a_task(f"t{number}", **options), b"", now=0, default_ttl=1_000_000, nonce="n")
    row.seq = number
    ready.put(row, 1)


def numbers(ready: ReadyRows, wanted: Wanted = ALL, limit: int = 10_000) -> list[int]:
    return [row.seq for row in ready.candidates(wanted, None, limit)]


def entries(ready: ReadyRows) -> int:
    lanes = [
        lane
        for lanes in ready._ready.values()
        for its_lanes in lanes.values()
        for lane in its_lanes.values()
    ]
    return len(ready._delayed) + sum(
        len(lane._sorted) + len(lane._run) + len(lane._heap) for lane in lanes
    )


def test_discarded_rows_leave_nothing_behind_where_none_is_ever_claimed() -> None:
    ready = ReadyRows()
    put(ready, 0)
    assert numbers(ready) == [0]
    for number in range(1, 5_000):
        put(ready, number)
        ready.discard(f"t{number}")

    assert list(ready.rows) == ["t0"]
    assert entries(ready) < 1_100


def test_the_remaining_rows_keep_their_order_when_stale_entries_are_dropped() -> None:
    ready = ReadyRows()
    for number in range(3_000):
        put(ready, number, priority=number % 7)
    assert len(numbers(ready, limit=100)) == 100
    left = [number for number in range(3_000) if number % 5 == 0]
    for number in set(range(3_000)) - set(left):
        ready.discard(f"t{number}")
    put(ready, 5, priority=9)

    others = sorted((n for n in left if n != 5), key=lambda number: (-(number % 7), number))
    assert numbers(ready) == [5, *others]


def test_pages_continue_behind_the_last_row_whatever_is_put_in_between() -> None:
    ready = ReadyRows()
    for number in range(50):
        put(ready, number, func_path=f"m.f{number % 3}")
    first = ready.candidates(ALL, None, 20)
    for row in first[:10]:
        ready.discard(row.id)
    put(ready, 60, func_path="m.f0", priority=1)
    second = ready.candidates(ALL, first[-1].order, 100)

    assert [row.seq for row in first + second] == list(range(50))
    assert numbers(ready) == [60, *range(10, 50)]


def test_only_rows_of_the_wanted_queues_and_functions_are_read() -> None:
    ready = ReadyRows()
    for number in range(12):
        put(ready, number, func_path=f"m{number % 2}.f", queue=f"q{number % 3}")

    one = Runnable(modules=("m1",))
    assert numbers(ready, Wanted(due_by=NOW, runnable=one)) == [1, 3, 5, 7, 9, 11]
    assert numbers(ready, Wanted(due_by=NOW, queues=("q0",))) == [0, 3, 6, 9]
    paused = Wanted(due_by=NOW, paused=frozenset({"q0", "q1"}), runnable=one)
    assert numbers(ready, paused) == [5, 11]


def test_a_delayed_row_is_read_once_it_is_promoted() -> None:
    ready = ReadyRows()
    put(ready, 1)
    late = row_of(a_task("late"), b"", now=0, default_ttl=1, nonce="n")
    late.visible = late.due = late.turn = 100
    late.seq = 2
    ready.put(late, 1)
    assert numbers(ready) == [1]
    assert ready.next_due() == 100
    ready.promote(99)
    assert numbers(ready) == [1]
    ready.promote(100)

    assert numbers(ready) == [1, 2]
    assert ready.next_due() is None


def calls_of(read: Any) -> int:
    """How many functions a call calls."""
    count = 0

    def count_call(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(count_call)
    try:
        read()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    "options",
    [{}, {"paused": frozenset({"q3", "q4"})}, {"queues": ("q5", "q17")}],
    ids=["all", "paused", "queues"],
)
def test_a_read_does_as_much_among_2_000_queues_as_among_twenty(options: dict[str, Any]) -> None:
    wanted, costs = Wanted(due_by=NOW, **options), []
    for queues in (20, 2_000):
        ready = ReadyRows()
        for number in range(queues):
            put(ready, number, queue=f"q{number}")
        assert numbers(ready, wanted, limit=2)
        costs.append(calls_of(lambda ready=ready: numbers(ready, wanted, limit=2)))

    # The order of a set's members decides about a few comparisons.
    assert costs[1] <= 2 * costs[0]


def test_rows_of_queues_that_are_paused_and_resumed_keep_their_order() -> None:
    ready = ReadyRows()
    for number in range(9):
        put(ready, number, queue="abc"[number % 3])
    assert numbers(ready) == list(range(9))
    assert numbers(ready, Wanted(due_by=NOW, paused=frozenset("a"))) == [1, 2, 4, 5, 7, 8]
    put(ready, 9, queue="a")
    put(ready, 10, queue="b")
    ready.discard("t1")
    assert numbers(ready, Wanted(due_by=NOW, paused=frozenset("a"))) == [2, 4, 5, 7, 8, 10]
    assert numbers(ready, Wanted(due_by=NOW, paused=frozenset("bc"))) == [0, 3, 6, 9]

    assert numbers(ready) == [0, *range(2, 11)]
    assert numbers(ready, Wanted(due_by=NOW, queues=("a", "b"), paused=frozenset("b"))) == [
        0,
        3,
        6,
        9,
    ]
