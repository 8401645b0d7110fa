"""Waiting tasks come out in order, and tasks that no longer wait leave nothing behind."""

from __future__ import annotations

from omniq.storage.ready_queue import ClaimFilter, ReadyQueue
from omniq.storage.row_rules import Row, row_of
from omniq.testing.builders import a_task

ALL = ClaimFilter(None, (), True)


def put(ready, number, **options):
    row = row_of(a_task(f"t{number}", **options), b"", now=0, default_ttl=1_000_000, nonce="n")
    row.seq = number
    ready.put(row, 1)


def entries(ready):
    return sum(map(len, (*ready._ready.values(), *ready._suspects.values(), ready._delayed)))


def test_discarded_tasks_leave_nothing_behind_where_no_task_is_ever_taken():
    ready: ReadyQueue[Row] = ReadyQueue()
    put(ready, 0)
    for number in range(1, 5_000):
        put(ready, number)
        ready.discard(f"t{number}")

    assert list(ready.items) == ["t0"]
    assert entries(ready) < 1_100


def test_the_remaining_tasks_keep_their_order_when_stale_entries_are_dropped():
    ready: ReadyQueue[Row] = ReadyQueue()
    for number in range(3_000):
        put(ready, number, priority=number % 7)
    left = [number for number in range(3_000) if number % 5 == 0]
    for number in set(range(3_000)) - set(left):
        ready.discard(f"t{number}")
    put(ready, 5, priority=9)

    taken = []
    while (row := ready.take_next(ALL, (), lambda gate: 1)) is not None:
        taken.append(row.seq)

    others = sorted((n for n in left if n != 5), key=lambda number: (-(number % 7), number))
    assert taken == [5, *others]
