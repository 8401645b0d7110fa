"""A dependency that is down: its tasks wait and do not fail, one probe runs at a time, all succeed."""

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
from tests.worker.recorder import RunRecorder, a_while, until

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
    emitted: list[Event] = []
    pool.events.subscribe(
        lambda event: emitted.append(event) if event.name.startswith("breaker.") else None
    )
    return emitted


async def outage(store: Store, recorder: RunRecorder) -> tuple[list[int], dict[int, int]]:
    """Enqueue while the service is down, start it after some probes; returns values and attempts."""
    async with AsyncExitStack() as stack:
        queue, pools = await three_pools(store, stack)
        handles = await queue.enqueue_many(guarded_tasks.ask, range(TASKS))
        for pool in pools:
            await stack.enter_async_context(pool)
        # The tasks that were claimed before the breaker opened, and then the probes.
        burst = await until(lambda: opened_after(recorder))
        await until(lambda: len(recorder.times("refused")) >= burst + PROBES, patience=20)
        recorder.gate("service").set()
        values = [await handle.result(timeout=60) for handle in handles]
        results = [await queue.get_result(handle.id) for handle in handles]
        (breaker,) = await queue.breakers()
        assert (breaker.state, breaker.failures) == (BreakerState.CLOSED, 0)
    attempts: dict[int, int] = {}
    for result in results:
        assert result is not None
        attempts[result.attempts] = attempts.get(result.attempts, 0) + 1
    return values, attempts


def opened_after(recorder: RunRecorder) -> int:
    """How many runs had failed before the first pause as long as the breaker's; 0 without one."""
    times = recorder.times("refused")
    return next(
        (
            number
            for number, (before, after) in enumerate(pairwise(times), start=1)
            if after - before > RESET * 0.8
        ),
        0,
    )


def check_outage(recorder: RunRecorder, values: list[int], attempts: dict[int, int]) -> None:
    refused = recorder.times("refused")
    burst = opened_after(recorder)
    gaps = [after - before for before, after in pairwise(refused[burst:])]
    spent = sum((runs - 1) * count for runs, count in attempts.items())

    assert values == list(range(TASKS))
    # Attempts were used only before the breaker opened, and by one probe per interval.
    assert burst <= SERVICE.max_failures - 1 + POOLS * CONCURRENCY
    assert min(gaps) >= RESET * 0.99
    assert spent == len(refused)
    assert len(recorder.times("called")) == TASKS + len(refused)


@pytest.mark.deep_on("file", "sqlite")
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.fault("F90", "F91")
async def test_during_an_outage_a_breaker_lets_one_probe_per_interval_through_and_loses_no_task(
    store, recorder
):
    values, attempts = await outage(store, recorder)

    check_outage(recorder, values, attempts)


async def test_the_state_of_a_breaker_and_its_reason_can_be_read(queue, recorder):
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


@pytest.mark.timeout(120)
async def test_a_pool_reports_when_a_breaker_of_its_tasks_opens_and_closes(recorder):
    clock = ManualClock()
    async with AsyncTaskQueue(MemoryStorage(clock=clock)) as queue:
        pool = queue.worker(concurrency=3, base_retry_delay=0)
        emitted = breaker_events(pool)
        await queue.enqueue_many(guarded_tasks.ask_with_long_pauses, range(5))
        async with pool:
            await advance_until(clock, lambda: emitted)
            opened = list(emitted)
            recorder.gate("service").set()
            await advance_until(clock, lambda: emitted[-1] == BreakerClosed(breaker="service"))

    assert opened == [BreakerOpened(breaker="service", failures=3, reason="ConnectionError")]
    assert {type(event) for event in emitted} <= {BreakerOpened, BreakerHalfOpened, BreakerClosed}


async def test_every_opening_of_a_breaker_is_reported_even_if_its_probe_was_not_seen(recorder):
    clock = ManualClock()
    async with AsyncTaskQueue(MemoryStorage(clock=clock)) as queue:
        pool = queue.worker(concurrency=3, base_retry_delay=0)
        emitted = breaker_events(pool)
        await queue.enqueue_many(guarded_tasks.ask, range(20))
        async with pool:
            await advance_until(
                clock, lambda: sum(isinstance(event, BreakerOpened) for event in emitted) >= 3
            )

    openings = [event.failures for event in emitted if isinstance(event, BreakerOpened)]
    assert openings == sorted(set(openings))


async def advance_until(clock: ManualClock, condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            clock.advance(0.25)
            await a_while(0.001)


async def test_a_pool_without_listeners_does_not_read_breakers(recorder):
    assert not log.is_enabled()
    clock = ManualClock()
    storage = CountingStorage(clock=clock)
    async with AsyncTaskQueue(storage) as queue:
        await queue.enqueue_many(guarded_tasks.ask, range(5))
        async with queue.worker(concurrency=3, base_retry_delay=0):
            for _ in range(100):
                clock.advance(0.25)
                await a_while(0.001)

    assert storage.reads == 0


class CountingStorage(MemoryStorage):
    reads = 0

    async def gates(self):
        self.reads += 1
        return await super().gates()
