"""Shares of keys over random arrivals, weights, costs, cancellations, retries and four owners."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omniq.storage.base import BaseStorage
from omniq.storage.fairness import Turns, give_back, take
from omniq.storage.memory import MemoryStorage
from omniq.testing.clock import ManualClock
from omniq.testing.contract.shares import OWNERS, Action, Play

ARRIVALS = st.tuples(
    st.just("enqueue"), st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 12)), max_size=4)
)
STEPS = st.one_of(
    ARRIVALS,
    st.tuples(st.just("claim"), st.integers(1, 9)),
    st.tuples(st.just("claim"), st.integers(1, 9)),
    st.tuples(st.just("cancel"), st.sampled_from("abcd")),
    st.tuples(st.just("release"), st.integers(1, 3)),
    st.tuples(st.just("retry"), st.integers(1, 3)),
)


async def _play(actions: list[Action]) -> None:
    clock = ManualClock()
    first = MemoryStorage(clock=clock)
    async with AsyncExitStack() as stack:
        owners: list[BaseStorage] = [first, *(first.another() for _ in range(OWNERS - 1))]
        for owner in owners:
            await stack.enter_async_context(owner)
        await Play(owners, clock).run(actions)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEPS, max_size=25))
def test_keys_that_wait_get_shares_that_differ_by_no_more_than_a_task(actions):
    asyncio.run(_play(actions))


def test_a_task_that_takes_two_free_stretches_does_not_run_beside_the_turn_between_them():
    turns, begin = take(Turns(0, 225, ((75, 150),)), 100, 75)
    assert (turns.end, turns.free, begin) == (250, (), 175)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("taketakegive"), st.integers(1, 5), st.integers(0, 9)),
        max_size=120,
    )
)
def test_what_is_free_stays_apart_in_order_and_before_the_end(calls):
    turns, front, taken = Turns(0, 0), 0, []
    for number, (letter, step, other) in enumerate(calls):
        if letter in "take":
            turns, begin = take(turns, front, step)
            taken.append((begin, step))
            assert begin >= front
        elif taken:
            begin, step = taken.pop(other % len(taken))
            turns = give_back(turns, begin, step)
        if number % 7 == 6:
            # The front passes some of them: those that have begun are over.
            front += other // 3
            taken = [each for each in taken if each[0] >= front]
        free = turns.free
        assert all(start < stop for start, stop in free)
        assert all(free[at][1] < free[at + 1][0] for at in range(len(free) - 1))
        assert not free or free[-1][1] < turns.end


def test_a_key_with_many_cancelled_tasks_remembers_few_stretches_and_never_earlier_ones():
    turns, begins = Turns(0, 0), []
    for _ in range(1_000):
        turns, begin = take(turns, 0, 10)
        begins.append(begin)
    for begin in begins[::2]:
        turns = give_back(turns, begin, 10)

    assert len(turns.free) <= 100
    assert sum(stop - start for start, stop in turns.free) == 5_000
    for instant in range(0, 10_000, 500):
        # As much is free up to each instant as was given back up to it, at most.
        free = sum(min(stop, instant) - start for start, stop in turns.free if start < instant)
        assert free <= instant // 2


@pytest.mark.parametrize("cancelled", [1, 50, 199])
def test_cancelling_before_the_front_gains_nothing(cancelled):
    turns = Turns(0, 0)
    for _ in range(200):
        turns, _ = take(turns, 0, 1)
    for begin in range(cancelled):
        turns = give_back(turns, begin, 1)

    _, begin = take(turns, 199, 1)
    assert begin == 200
