"""What waits, in order, and that nothing is kept of what does not wait any more."""

from __future__ import annotations

from omniq.storage.ready_queue import ReadyQueue, Wanted
from omniq.storage.row_rules import Row, row_of
from omniq.testing.builders import a_task

ALL = Wanted(None, (), True)


def put(ready, number, **options):
    row = row_of(a_task(f"t{number}", **options), b"", now=0, default_ttl=1_000_000, nonce="n")
    row.seq = number
    ready.put(row, 1)


def places(ready):
    return sum(map(len, (*ready._ready.values(), *ready._suspects.values(), ready._delayed)))


def test_what_others_take_leaves_nothing_behind_in_one_who_takes_nothing():
    ready: ReadyQueue[Row] = ReadyQueue()
    put(ready, 0)
    for number in range(1, 5_000):
        put(ready, number)
        ready.discard(f"t{number}")

    assert list(ready.items) == ["t0"]
    assert places(ready) < 1_100


def test_what_is_left_keeps_its_order_when_what_is_gone_is_dropped():
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

    rest = sorted((n for n in left if n != 5), key=lambda number: (-(number % 7), number))
    assert taken == [5, *rest]
