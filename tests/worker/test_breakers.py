"""A dependency that is down: its tasks are held, not failed, one probe tries at a time, all succeed."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from itertools import pairwise

import pytest

from omniq import AsyncTaskQueue, AsyncWorkerPool, BreakerState, TaskStatus, log
from omniq.events import BreakerClosed, BreakerHalfOpened, BreakerOpened, Event
from omniq.storage.memory import MemoryStorage
from omniq.testing.clock import ManualClock
from tests.worker import guarded_tasks
from tests.worker.conftest import Store
from tests.worker.guarded_tasks import RESET, SERVICE
from tests.worker.stage import Stage, a_while, until

POOLS, CONCURRENCY = 3, 5
PROBES = 3
TASKS = 1000


async def three_pools(
    store: Store, stack: AsyncExitStack
) -> tuple[AsyncTaskQueue, list[AsyncWorkerPool]]:
    pools = []
    for _ in range(POOLS):
        storage = await stack.enter_async_context(store.another())
        queue = AsyncTaskQueue(storage)
        pool = queue.worker(concurrency=CONCURRENCY, poll_interval=0.05, base_retry_delay=0.001)
        pools.append(pool)
    return queue, pools


def breaker_events(pool: AsyncWorkerPool) -> list[Event]:
    told: list[Event] = []
    pool.events.subscribe(
        lambda event: told.append(event) if event.name.startswith("breaker.") else None
    )
    return told


async def outage(store: Store, stage: Stage) -> tuple[list[int], dict[int, int]]:
    """Enqueue while the service is down, bring it back after some probes; values and attempts."""
    async with AsyncExitStack() as stack:
        queue, pools = await three_pools(store, stack)
        handles = await queue.enqueue_many(guarded_tasks.ask, range(TASKS))
        for pool in pools:
            await stack.enter_async_context(pool)
        # Those that were claimed before it opened, and then the probes.
        burst = await until(lambda: opened_after(stage))
        await until(lambda: len(stage.times("refused")) >= burst + PROBES, patience=20)
        stage.gate("service").set()
        values = [await handle.result(timeout=60) for handle in handles]
        results = [await queue.get_result(handle.id) for handle in handles]
        (breaker,) = await queue.breakers()
        assert (breaker.state, breaker.failures) == (BreakerState.CLOSED, 0)
    attempts: dict[int, int] = {}
    for result in results:
        assert result is not None
        attempts[result.attempts] = attempts.get(result.attempts, 0) + 1
    return values, attempts


def opened_after(stage: Stage) -> int:
    """How many runs had failed when the first pause as long as the breaker's began; 0 before it."""
    times = stage.times("refused")
    return next(
        (
            number
            for number, (before, after) in enumerate(pairwise(times), start=1)
            if after - before > RESET * 0.8
        ),
        0,
    )


def check_outage(stage: Stage, values: list[int], attempts: dict[int, int]) -> None:
    refused = stage.times("refused")
    burst = opened_after(stage)
    gaps = [after - before for before, after in pairwise(refused[burst:])]
    spent = sum((runs - 1) * count for runs, count in attempts.items())

    assert values == list(range(TASKS))
    # Every attempt that was spent was spent before it opened, or on one probe an interval.
    assert burst <= SERVICE.max_failures - 1 + POOLS * CONCURRENCY
    assert min(gaps) >= RESET * 0.99
    assert spent == len(refused)
    assert len(stage.times("asked")) == TASKS + len(refused)


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.fault("F90", "F91")
async def test_an_outage_costs_one_probe_an_interval_and_no_task(store, stage):
    values, attempts = await outage(store, stage)

    check_outage(stage, values, attempts)


async def test_the_state_of_a_breaker_and_why_can_be_asked(queue, stage):
    await queue.enqueue_many(guarded_tasks.ask, range(5))
    assert await queue.breakers() == []
    await queue.worker(concurrency=5).run_until_empty()
    (breaker,) = await queue.breakers()

    assert (breaker.name, breaker.state) == ("service", BreakerState.OPEN)
    assert (breaker.failures, breaker.reason) == (3, "ConnectionError")
    assert breaker.opened_at is not None
    assert breaker.probe is None
    assert {task.status for task in await queue.list_tasks()} <= {
        TaskStatus.RETRYING,
        TaskStatus.PENDING,
    }


@pytest.mark.timeout(30)
async def test_a_pool_tells_when_a_breaker_of_its_tasks_opens_and_closes(stage):
    clock = ManualClock()
    async with AsyncTaskQueue(MemoryStorage(clock=clock)) as queue:
        pool = queue.worker(concurrency=3, base_retry_delay=0)
        told = breaker_events(pool)
        await queue.enqueue_many(guarded_tasks.ask, range(5))
        async with pool:
            await advance_until(clock, lambda: told)
            opened = list(told)
            stage.gate("service").set()
            await advance_until(clock, lambda: told[-1] == BreakerClosed(breaker="service"))

    assert opened == [BreakerOpened(breaker="service", failures=3, reason="ConnectionError")]
    assert {type(event) for event in told} <= {BreakerOpened, BreakerHalfOpened, BreakerClosed}


async def test_every_opening_is_told_even_when_the_probe_between_was_not_seen(stage):
    clock = ManualClock()
    async with AsyncTaskQueue(MemoryStorage(clock=clock)) as queue:
        pool = queue.worker(concurrency=3, base_retry_delay=0)
        told = breaker_events(pool)
        await queue.enqueue_many(guarded_tasks.ask, range(20))
        async with pool:
            await advance_until(
                clock, lambda: sum(isinstance(event, BreakerOpened) for event in told) >= 3
            )

    openings = [event.failures for event in told if isinstance(event, BreakerOpened)]
    assert openings == sorted(set(openings))


async def advance_until(clock: ManualClock, condition) -> None:
    async with asyncio.timeout(8):
        while not condition():
            clock.advance(0.25)
            await a_while(0.001)


async def test_a_pool_that_nobody_listens_to_asks_for_no_breakers(stage):
    assert not log.is_enabled()
    clock = ManualClock()
    storage = CountingStorage(clock=clock)
    async with AsyncTaskQueue(storage) as queue:
        await queue.enqueue_many(guarded_tasks.ask, range(5))
        async with queue.worker(concurrency=3, base_retry_delay=0):
            for _ in range(100):
                clock.advance(0.25)
                await a_while(0.001)

    assert storage.asked == 0


class CountingStorage(MemoryStorage):
    asked = 0

    async def gates(self):
        self.asked += 1
        return await super().gates()
