"""Random games on two stores with the same calls at the same time: the fast path on one, the rules on the other."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import msgspec

from omniq.models import BreakerRule, Limit
from omniq.outcomes import Failed, Released, Retried, Snoozed, Succeeded
from omniq.storage.base import BaseStorage
from omniq.testing.builders import a_result, a_task, an_error
from omniq.testing.clock import ManualClock

CALLS = 60
LIMITS = [
    Limit(key="a", max_running=1),
    Limit(key="b/%", max_running=2),
    Limit(key="c", max_running=3),
    Limit(key="d", rate=1, per=3),
    Limit(key="e", rate=3, per=5),
    Limit(key="f", rate=150, per=60),
    Limit(key="g", max_running=4),
    Limit(key="g", max_running=4, cost=2),
    Limit(key="g", max_running=4, cost=3),
    Limit(key="h", rate=7, per=4, cost=3),
    Limit(key="h", rate=7, per=4),
]
SPANS = {f"rate:{limit.key}": int(limit.per * 1_000_000) for limit in LIMITS}


class Game:
    """The same random calls on a store with the fast path and on one without."""

    def __init__(self, seed: int, clock: ManualClock, pairs: list[tuple[BaseStorage, BaseStorage]]):
        self.random = random.Random(seed)
        self.clock = clock
        self.pairs = pairs
        self.held: list[list[Any]] = [[] for _ in pairs]
        self.number = 0

    async def play(self):
        for _ in range(CALLS):
            call = self.random.choices(
                [
                    self.enqueue,
                    self.claim,
                    self.record,
                    self.wait,
                    self.pause,
                    self.cancel,
                    self.change,
                ],
                [4, 6, 2, 3, 0.3, 0.5, 0.7],
            )[0]
            await call()
            await self.compare()

    async def enqueue(self):
        tasks = []
        limits = self.limits([0, 1, 1, 1, 2])
        for _ in range(self.random.randint(1, 8)):
            if self.random.random() < 0.3:
                limits = self.limits([0, 1, 1, 2])
            self.number += 1
            options: dict[str, Any] = {}
            if self.random.random() < 0.05:
                options["breakers"] = (BreakerRule(name="x", max_failures=2),)
            if self.random.random() < 0.1:
                options["eta"] = self.clock.now() + timedelta(seconds=self.random.randint(0, 4))
            if self.random.random() < 0.05:
                options["expires"] = self.clock.now() + timedelta(seconds=2)
            tasks.append(
                a_task(
                    f"t{self.number}",
                    func_path=self.random.choice(["m.f", "m.g", "n.f"]),
                    queue=self.random.choice(["default", "other"]),
                    priority=self.random.choice([0, 0, 0, 1]),
                    limits=tuple(limits),
                    **options,
                )
            )
        for storage in self.pairs[0]:
            await storage.enqueue_many(tasks)

    def limits(self, counts):
        found = self.random.sample(LIMITS, self.random.choice(counts))
        return list({limit.key: limit for limit in found}.values())

    async def change(self):
        """Change a limit, or end all changes of it; or pause a function."""
        key = self.random.choice("abcdefgh").replace("b", "b/%")
        size, what = self.random.randint(1, 6), self.random.randrange(5)
        for storage in self.pairs[0]:
            if what == 0 and key in "defh":
                await storage.set_limit(key, rate=(size, 3.0))
            elif what == 0:
                await storage.set_limit(key, max_running=size)
            elif what == 1:
                await storage.hold_limit(key, until=self.clock.now() + timedelta(seconds=size))
            elif what == 2:
                await (storage.pause_function if size < 3 else storage.resume_function)("m.g")
            else:
                await storage.release_limit(key)
                await storage.reset_limit(key)

    async def claim(self):
        owner, outcomes = self.outcomes() if self.random.random() < 0.8 else (0, [])
        await self.record_and_claim(owner, outcomes, self.random.randint(1, 6))

    async def record(self):
        owner, outcomes = self.outcomes()
        await self.record_and_claim(owner, outcomes, 0)

    def outcomes(self):
        owner = self.random.randrange(len(self.pairs))
        held = self.held[owner]
        self.random.shuffle(held)
        ended = [held.pop() for _ in range(self.random.randint(0, len(held)))]
        return owner, [self.outcome(task) for task in ended]

    def outcome(self, task):
        later = self.clock.now() + timedelta(seconds=self.random.randint(0, 3))
        return self.random.choices(
            [
                Succeeded(task.id, task.token, a_result(task)),
                Retried(task.id, task.token, an_error(), later),
                Snoozed(task.id, task.token, later),
                Released(task.id, task.token),
                Failed(task.id, task.token, an_error()),
            ],
            [8, 1, 1, 1, 1],
        )[0]

    async def record_and_claim(self, owner, outcomes, limit):
        queues = self.random.choice([None, None, ["default"]])
        replies = []
        for storage in self.pairs[owner]:
            if limit:
                replies.append(await storage.record_and_reserve(outcomes, limit, queues=queues))
            else:
                replies.append((await storage.record(outcomes), []))
        (recorded, claimed), (expected, expected_tasks) = replies
        assert recorded == expected
        assert [(task.id, task.token) for task in claimed] == [
            (task.id, task.token) for task in expected_tasks
        ]
        self.held[owner] += claimed

    async def wait(self):
        self.clock.advance(self.random.choice([0.0, 0.5, 1.0, 3.0]))

    async def pause(self):
        is_paused = self.random.random() < 0.5
        for storage in self.pairs[0]:
            await (storage.pause_queue if is_paused else storage.resume_queue)("other")

    async def cancel(self):
        if self.number:
            task_id = f"t{self.random.randint(1, self.number)}"
            for storage in self.pairs[0]:
                await storage.cancel(task_id)

    async def compare(self):
        (gates, rows), (expected, expected_rows) = [
            await self.stored(storage) for storage in self.pairs[0]
        ]
        assert gates == expected
        assert rows.keys() == expected_rows.keys()
        for task_id, row in rows.items():
            assert msgspec.structs.asdict(row) == msgspec.structs.asdict(expected_rows[task_id])

    async def stored(self, storage):
        """Every gate, and where each task is."""
        engine = storage._engine
        ids = [f"t{number}" for number in range(1, self.number + 1)]
        records = await engine._read(lambda section: section.load(ids))
        rows = {
            task_id: _without_owner(record.row)
            for task_id, record in records.items()
            if record.is_live
        }
        parked = {row.parked for row in rows.values()}
        gates = {
            key: said
            for key, state in (await engine.gates()).items()
            if any(said := self.said_by(key, state, has_parked=key in parked))
        }
        return gates, rows

    def said_by(self, key, state, *, has_parked):
        """What a state means: not what it has not forgotten yet."""
        limit = SPANS.get(key, 0)
        special = state.special
        if special is not None and special.span:
            limit = special.span
        starts = [start for start in state.starts if start > self.clock.micros() - limit]
        breaker = (state.breaker, state.failures) if state.failures else None
        parked = (state.wake_at, state.has_parked) if has_parked else None
        changed = special and (special.size, special.span, special.held_until, special.extra)
        return state.holders, starts, breaker, parked, changed if any(changed or ()) else None


def _without_owner(row):
    return msgspec.structs.replace(
        row, owner=row.owner and "owner", nonce="", stored_at=0, history=len(row.history)
    )


def use_rules(storage: BaseStorage) -> None:
    """Have the storage record and claim by the rules alone."""
    engine: Any = storage._engine
    engine._by_fast_path = lambda _, *call: engine._by_rules(*call)


async def play(seed: int, new_storage: Callable[[str, ManualClock], BaseStorage]) -> None:
    """Play one game. `new_storage` returns a storage object on one of two stores, by their name."""
    clock = ManualClock()
    async with AsyncExitStack() as stack:

        async def opened(name: str) -> BaseStorage:
            storage = await stack.enter_async_context(new_storage(name, clock))
            if name == "rules":
                use_rules(storage)
            return storage

        pairs = [(await opened("fast"), await opened("rules")) for _ in range(2)]
        await Game(seed, clock, pairs).play()
