"""Shares of keys over random arrivals, weights, costs, cancellations, delays and four owners."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omniq.models import FairShare
from omniq.outcomes import Released, Succeeded
from omniq.storage.base import BaseStorage
from omniq.storage.fairness import Turns, give_back, take
from omniq.storage.memory import MemoryStorage
from omniq.testing.builders import a_result, a_task
from omniq.testing.clock import ManualClock

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 4.0}
COSTS = {"a": 1.0, "b": 1.0, "c": 0.25, "d": 3.0}
OWNERS = 4


@dataclass
class Service:
    """What each key has been given while it had tasks waiting, as cost by weight."""

    waiting: Counter[str] = field(default_factory=Counter)
    begun: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    given: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WEIGHTS, 0.0))
    cancelled: set[str] = field(default_factory=set)
    """Keys that may get less than their share: what they have not cancelled stands where it stood."""
    released: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WEIGHTS, 0.0))
    """Turns that were given before, of tasks that did not run then."""

    def follow(self) -> None:
        """Begin to compare the keys that have begun to wait, and no more those that have nothing waiting."""
        both = {
            (one, other)
            for one in WEIGHTS
            for other in WEIGHTS
            if one < other and self.waiting[one] and self.waiting[other]
        }
        self.begun = {pair: self.begun.get(pair, self._given(pair)) for pair in both}

    def _given(self, pair: tuple[str, str]) -> tuple[float, float]:
        return self.given[pair[0]], self.given[pair[1]]

    def check(self) -> None:
        for (one, other), (first, second) in self.begun.items():
            ahead = (self.given[one] - first) - (self.given[other] - second)
            most = COSTS[one] / WEIGHTS[one] + COSTS[other] / WEIGHTS[other]
            first_most, second_most = most + self.released[one], most + self.released[other]
            assert ahead <= first_most + 1e-6 or other in self.cancelled, (one, other, ahead, most)
            assert -ahead <= second_most + 1e-6 or one in self.cancelled, (one, other, ahead, most)


ARRIVALS = st.tuples(
    st.just("enqueue"), st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 12)), max_size=4)
)
STEPS = st.one_of(
    ARRIVALS,
    st.tuples(st.just("claim"), st.integers(1, 9)),
    st.tuples(st.just("claim"), st.integers(1, 9)),
    st.tuples(st.just("cancel"), st.sampled_from("abcd")),
    st.tuples(st.just("release"), st.integers(1, 3)),
)


async def _play(steps: list[tuple[str, object]]) -> None:
    clock = ManualClock()
    first = MemoryStorage(clock=clock)
    owners: list[BaseStorage] = [first, *(first.another() for _ in range(OWNERS - 1))]
    for owner in owners:
        await owner.open()
    service, names, number = Service(), dict[str, str](), 0
    for at, (action, value) in enumerate(steps):
        owner = owners[at % OWNERS]
        clock.advance(0.001)
        match action, value:
            case "enqueue", list(groups):
                tasks = []
                for key, size in groups:
                    fair = FairShare(key=key, weight=WEIGHTS[key], cost=COSTS[key])
                    for _ in range(size):
                        number += 1
                        tasks.append(a_task(f"{key}{number}", fair=fair))
                        names[tasks[-1].id] = key
                        service.waiting[key] += 1
                await owner.enqueue_many(tasks)
            case "claim", int(size):
                for _ in range(size):
                    service.follow()
                    for task in await owner.reserve(1):
                        key = names.pop(task.id)
                        service.given[key] += COSTS[key] / WEIGHTS[key]
                        service.check()
                        service.waiting[key] -= 1
                        await owner.record([Succeeded(task.id, task.token, a_result(task))])
            case "release", int(size):
                tasks = await owner.reserve(size)
                for task in tasks:
                    key = names[task.id]
                    service.released[key] += COSTS[key] / WEIGHTS[key]
                await owner.record([Released(task.id, task.token) for task in tasks])
            case "cancel", str(key):
                # Of every second task, so that there are turns between those that are given back.
                for task_id in [each for each, its in names.items() if its == key][::2]:
                    assert await owner.cancel(task_id)
                    del names[task_id]
                    service.waiting[key] -= 1
                service.cancelled.add(key)
        service.follow()
    for owner in owners:
        await owner.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEPS, max_size=25))
def test_keys_that_wait_get_shares_that_differ_by_no_more_than_a_task(steps):
    asyncio.run(_play(steps))


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
