"""The clock of a server is set while workers run: no worker loses its tasks, and a dead one does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest

from omniq import AsyncTaskQueue, AsyncWorkerPool
from omniq.clock import SystemClock
from omniq.events import Event, TasksGivenBack
from omniq.storage.base import BaseStorage
from tests.fleet import fleet_tasks as tasks
from tests.worker.recorder import until

LEASE = 2.0
HOUR = 3_600_000_000

pytestmark = pytest.mark.timeout(120)


class ServerClock(SystemClock):
    """Passed to a storage, it is used as the clock of the server, which a test sets."""

    ahead = 0

    def micros(self) -> int:
        return super().micros() + self.ahead

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.micros() / 1_000_000, UTC)


class Fleet:
    """Workers of one Redis store, whose clock can be set."""

    def __init__(self, url: str) -> None:
        from omniq.storage.redis import RedisStorage

        self.clock = ServerClock()
        self._url, _, self._prefix = url.partition("?prefix=")
        self._kind = RedisStorage
        self.emitted: list[Event] = []

    def storage(self) -> BaseStorage:
        return self._kind(self._url, prefix=self._prefix, clock=self.clock)

    def worker(self, storage: BaseStorage) -> AsyncWorkerPool:
        pool = AsyncWorkerPool(storage, 2, 0.05, 0.01, lease=LEASE)
        pool.events.subscribe(self.emitted.append, kinds=(TasksGivenBack,))
        return pool


@pytest.fixture
async def fleet(redis_url: str) -> Fleet:
    pytest.importorskip("omniq.storage.redis")
    tasks.counts.clear()
    return Fleet(redis_url)


@asynccontextmanager
async def running(*pools: AsyncWorkerPool) -> AsyncIterator[None]:
    for pool in pools:
        await pool.start()
    try:
        yield
    finally:
        for pool in pools:
            await pool.stop(cancel_in_flight=True)


@pytest.mark.parametrize(
    "ahead",
    [pytest.param(HOUR, marks=pytest.mark.deep), int(LEASE * 800_000)],
    ids=["an hour", "less than a lease"],
)
async def test_a_clock_that_jumps_ahead_costs_no_worker_its_tasks(fleet: Fleet, ahead: int):
    pools = [fleet.worker(fleet.storage()) for _ in range(2)]
    async with AsyncTaskQueue(fleet.storage()) as queue, running(*pools):
        handles = [await queue.enqueue(tasks.count_after, "jump", 1.5 * LEASE) for _ in range(4)]
        await until(lambda: sum(pool.stats().active_workers for pool in pools) == 4)
        # A recovery of each has seen the clock before.
        await asyncio.sleep(0.3)
        fleet.clock.ahead = ahead
        for handle in handles:
            await handle.result(timeout=60)
        results = [await queue.get_result(handle.id) for handle in handles]

    assert tasks.counts["jump"] == 4
    assert {result.attempts for result in results if result} == {1}
    assert fleet.emitted == []


async def test_after_a_clock_was_set_back_the_tasks_of_a_dead_worker_are_taken(fleet: Fleet):
    async with AsyncTaskQueue(fleet.storage()) as queue, fleet.storage() as dead:
        handle = await queue.enqueue(tasks.count_after, "back", 0.01)
        await dead.renew(lease=LEASE)
        assert await dead.reserve(1)
        fleet.clock.ahead = -HOUR
        async with running(fleet.worker(fleet.storage())):
            await handle.result(timeout=20 * LEASE)

    assert tasks.counts["back"] == 1
    assert [getattr(event, "count", None) for event in fleet.emitted] == [1]


async def test_a_lease_that_is_valid_for_an_hour_and_not_renewed_ends_on_postgresql(postgres_url):
    pytest.importorskip("omniq.storage.postgres")
    import asyncpg

    tasks.counts.clear()
    async with AsyncTaskQueue(postgres_url) as queue, AsyncTaskQueue(postgres_url) as other:
        handle = await queue.enqueue(tasks.count_after, "overdue", 0.01)
        owner = other.storage.owner
        assert await other.storage.reserve(1)
        schema = postgres_url.partition("schema=")[2].partition("&")[0] or "omniq"
        connection = await asyncpg.connect(postgres_url.partition("?")[0])
        await connection.execute(
            f"UPDATE {schema}.leases SET until = until + $1, length = 1000000 WHERE owner = $2",
            HOUR,
            owner,
        )
        await connection.close()
        async with queue.worker(lease=LEASE, poll_interval=0.05):
            await handle.result(timeout=30)

    assert tasks.counts["overdue"] == 1
