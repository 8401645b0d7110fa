"""The live stream and the sampler: many viewers cost the storage as much as one."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from omniq import AsyncTaskQueue
from omniq.dashboard.sampler import INTERVAL, Sampler
from omniq.storage.memory import MemoryStorage
from omniq.testing.clock import ManualClock
from omniq.testing.faults import FaultyStorage
from tests.browser.served import bearer, dashboard_client, served


class CountingStorage(FaultyStorage):
    """Counts reads: each call of a reading method of the storage is one."""

    def __init__(self, inner: MemoryStorage) -> None:
        super().__init__(inner)
        self.reads = 0

    async def _do(self, verbs, step):
        self.reads += "read" in verbs
        return await super()._do(verbs, step)


async def events(client, address, count):
    """The first events of a live stream."""
    found = []
    async with client.stream("GET", f"{address}/api/stream", headers=bearer()) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                found.append(json.loads(line.removeprefix("data:")))
                if len(found) == count:
                    return found
    return found


async def run_ready_tasks() -> None:
    """Let all asyncio tasks run that can, without advancing the clock."""
    for _ in range(50):
        await asyncio.sleep(0)


async def count_reads(watchers: int, snapshots: int) -> int:
    """The reads that a number of snapshots takes, while watchers stream and load pages."""
    clock = ManualClock()
    storage = CountingStorage(MemoryStorage(clock=clock))
    async with AsyncTaskQueue(storage) as queue, dashboard_client(queue) as client:
        await queue.enqueue("shop.say", "x")
        sampler = client.app.state.dashboard.sampler

        async def watch():
            async for _ in sampler.watch():
                pages = [client.get(path, headers=bearer()) for path in ("/", "/queues", "/tasks")]
                await asyncio.gather(*pages)

        watching = [asyncio.create_task(watch()) for _ in range(watchers)]
        await run_ready_tasks()
        storage.reads = 0
        for _ in range(snapshots):
            clock.advance(INTERVAL)
            await run_ready_tasks()
            await queue.enqueue("shop.say", "y")
        reads = storage.reads
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
    return reads


@pytest.mark.timeout(120)
async def test_three_open_dashboards_cost_the_storage_no_more_than_one():
    one, three = await count_reads(1, 10), await count_reads(3, 10)

    assert one > 0
    assert three <= one


@pytest.mark.timeout(120)
async def test_the_stream_sends_changed_counts(queue):
    async with served(queue) as (address, _), httpx.AsyncClient(timeout=20) as client:
        listening = asyncio.create_task(events(client, address, 2))
        while not listening.done():
            await queue.enqueue("shop.say", "x")
            await asyncio.wait((listening,), timeout=0.2)
        first, second = await listening

    assert second["version"] > first["version"]
    assert second["by_status"]["pending"] > first["by_status"]["pending"]


async def test_unchanged_tasks_are_not_read_again():
    clock = ManualClock()
    storage = CountingStorage(MemoryStorage(clock=clock))
    async with AsyncTaskQueue(storage) as queue:
        await queue.enqueue_many("shop.say", [str(number) for number in range(500)])
        sampler = Sampler(storage)
        await sampler.current()
        first, storage.reads = storage.reads, 0
        sampler.invalidate()
        await sampler.current()
        second = storage.reads
        await sampler.close()

    assert second < first
    assert second <= 8


@pytest.mark.timeout(120)
async def test_without_viewers_snapshots_become_rare_and_stop():
    clock = ManualClock()
    storage = CountingStorage(MemoryStorage(clock=clock))
    async with AsyncTaskQueue(storage):
        sampler = Sampler(storage)
        await sampler.current()
        for _ in range(600):
            clock.advance(2)
            await run_ready_tasks()
        storage.reads = 0
        for _ in range(60):
            clock.advance(60)
            await run_ready_tasks()
        await sampler.close()

    assert storage.reads == 0


async def test_snapshots_continue_when_the_storage_is_back():
    clock = ManualClock()
    storage = FaultyStorage(MemoryStorage(clock=clock))
    async with AsyncTaskQueue(storage):
        sampler = Sampler(storage)
        watching = sampler.watch()
        await anext(watching)
        storage.fail("read", times=None)
        failing = asyncio.ensure_future(anext(watching))
        await run_ready_tasks()
        clock.advance(INTERVAL)
        failed, error = await failing, sampler.error
        storage.heal()
        healthy = asyncio.ensure_future(anext(watching))
        await run_ready_tasks()
        clock.advance(INTERVAL)
        snapshot = await healthy
        await watching.aclose()
        await sampler.close()

    assert failed is None
    assert error
    assert snapshot is not None
    assert sampler.error == ""


class BlockedCountStorage(FaultyStorage):
    """A storage whose counts do not return until the test allows it."""

    def __init__(self, inner: MemoryStorage) -> None:
        super().__init__(inner)
        self.may_count = asyncio.Event()

    async def stats(self):
        await self.may_count.wait()
        return await super().stats()


PAGES = ("/", "/tasks", "/queues", "/dead", "/workers", "/schedules", "/storage", "/api/overview")


@pytest.mark.timeout(120)
async def test_no_page_waits_until_all_tasks_are_counted():
    storage = BlockedCountStorage(MemoryStorage())
    async with AsyncTaskQueue(storage) as queue, dashboard_client(queue) as client:
        await queue.enqueue("shop.say", "x")
        answers = [await client.get(path, headers=bearer()) for path in PAGES]
        overview, tasks, queues = (answer.text for answer in answers[:3])

        assert [answer.status_code for answer in answers] == [200] * len(PAGES)
        assert "counting…" in overview
        assert "counting…" in tasks
        assert "shop.say" in tasks
        assert "Counting…" in queues
        assert "Everything looks healthy" not in overview


@pytest.mark.timeout(120)
async def test_a_reload_shows_the_finished_count():
    storage = BlockedCountStorage(MemoryStorage())
    async with AsyncTaskQueue(storage) as queue, dashboard_client(queue) as client:
        await queue.enqueue("shop.say", "x")
        await client.get("/queues", headers=bearer())
        storage.may_count.set()
        client.app.state.dashboard.sampler.invalidate()
        page = (await client.get("/queues", headers=bearer())).text

    assert "ounting…" not in page
    assert "default" in page
