"""The shares of keys over random arrivals, weights, costs, cancellations, retries and several owners."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from omniq.models import FairShare, Task
from omniq.outcomes import Released, Retried, Succeeded
from omniq.storage.base import BaseStorage
from omniq.testing.builders import a_result, a_task, an_error
from omniq.testing.clock import ManualClock
from omniq.testing.contract._suite import ContractPart, OpenAnother, promise

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 4.0}
COSTS = {"a": 1.0, "b": 1.0, "c": 0.25, "d": 3.0}
OWNERS = 4

Action = tuple[str, object]
"""What happens, and to how many tasks, of which key, or in groups of which keys and sizes."""


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


class Play:
    """Actions on one store, by owners that take turns; the shares are checked after each claim."""

    def __init__(self, owners: Sequence[BaseStorage], clock: ManualClock) -> None:
        self._owners = owners
        self._clock = clock
        self._service = Service()
        self._keys: dict[str, str] = {}
        self._number = 0

    async def run(self, actions: Sequence[Action]) -> None:
        for at, action in enumerate(actions):
            self._clock.advance(0.001)
            await self._do(self._owners[at % len(self._owners)], action)
            self._service.follow()

    async def _do(self, owner: BaseStorage, action: Action) -> None:
        match action:
            case "enqueue", list(groups):
                tasks = [self._new_task(key) for key, size in groups for _ in range(size)]
                await owner.enqueue_many(tasks)
            case "claim", int(size):
                for _ in range(size):
                    for task in await self._claim(owner, 1):
                        del self._keys[task.id]
                        await owner.record([Succeeded(task.id, task.token, a_result(task))])
            case "retry", int(size):
                for task in await self._claim(owner, size):
                    self._service.waiting[self._keys[task.id]] += 1
                    error = Retried(task.id, task.token, an_error(), self._clock.now())
                    await owner.record([error])
            case "release", int(size):
                tasks = await owner.reserve(size)
                for task in tasks:
                    key = self._keys[task.id]
                    self._service.released[key] += COSTS[key] / WEIGHTS[key]
                await owner.record([Released(task.id, task.token) for task in tasks])
            case "cancel", str(key):
                # Of every second task, so that there are turns between those that are given back.
                for task_id in [each for each, its in self._keys.items() if its == key][::2]:
                    assert await owner.cancel(task_id)
                    del self._keys[task_id]
                    self._service.waiting[key] -= 1
                self._service.cancelled.add(key)

    def _new_task(self, key: str) -> Task:
        self._number += 1
        fair = FairShare(key=key, weight=WEIGHTS[key], cost=COSTS[key])
        task = a_task(f"{key}{self._number}", fair=fair)
        self._keys[task.id] = key
        self._service.waiting[key] += 1
        return task

    async def _claim(self, owner: BaseStorage, size: int) -> list[Task]:
        """Claim some tasks, in their order."""
        claimed = []
        for _ in range(size):
            self._service.follow()
            for task in await owner.reserve(1):
                key = self._keys[task.id]
                self._service.given[key] += COSTS[key] / WEIGHTS[key]
                self._service.check()
                self._service.waiting[key] -= 1
                claimed.append(task)
        return claimed


def some_actions(seed: int, count: int) -> Iterator[Action]:
    """Random actions, of which more enqueue than claim at first, and the other way round later."""
    draw = random.Random(seed)
    for number in range(count):
        if draw.random() < 0.5 - 0.4 * number / count:
            keys = draw.sample("abcd", draw.randint(1, 4))
            yield "enqueue", [(key, draw.randint(1, 8)) for key in keys]
        else:
            what = draw.choice(("claim", "claim", "claim", "retry", "release", "cancel"))
            yield what, draw.choice("abcd") if what == "cancel" else draw.randint(1, 5)


class ShareContract(ContractPart):
    """C14, over what happens to a busy queue."""

    @promise("C14")
    async def test_keys_that_wait_throughout_get_their_shares_whatever_happens(
        self, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        owners = [await open_another() for _ in range(OWNERS)]

        await Play(owners, clock).run(list(some_actions(seed=5, count=40)))

    @promise("C14")
    async def test_a_task_that_takes_two_free_turns_is_not_ahead_of_its_share(
        self, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        actions: list[Action] = [
            ("enqueue", [("c", 1), ("a", 1)]),
            ("enqueue", [("d", 3), ("c", 2)]),
            ("claim", 4),
            ("cancel", "d"),
            ("enqueue", [("b", 1), ("a", 1)]),
            ("enqueue", [("d", 1)]),
            ("cancel", "c"),
            ("retry", 2),
            ("claim", 2),
        ]
        await Play([await open_another()], clock).run(actions)
