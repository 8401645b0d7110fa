"""Live: numbers move, a cut stream is known, and many watchers cost the storage as much as one."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from omniq import AsyncTaskQueue
from omniq.dashboard.sampler import PERIOD, Sampler
from omniq.storage.memory import MemoryStorage
from omniq.testing.clock import ManualClock
from omniq.testing.faults import FaultyStorage
from tests.browser.served import asked, bearer, served


class CountingStorage(FaultyStorage):
    """Counts every read; a read is one call of the store, whatever it reads."""

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


async def settle() -> None:
    """Let everybody run who can, without letting time pass."""
    for _ in range(50):
        await asyncio.sleep(0)


async def looks_cost(watchers: int, looks: int) -> int:
    """How many reads so many looks take while so many watch and ask for pages."""
    clock = ManualClock()
    storage = CountingStorage(MemoryStorage(clock=clock))
    async with AsyncTaskQueue(storage) as queue, asked(queue) as client:
        await queue.enqueue("shop.say", "x")
        sampler = client.app.state.dashboard.sampler

        async def watch():
            async for _ in sampler.watch():
                pages = [client.get(path, headers=bearer()) for path in ("/", "/queues", "/tasks")]
                await asyncio.gather(*pages)

        watching = [asyncio.create_task(watch()) for _ in range(watchers)]
        await settle()
        storage.reads = 0
        for _ in range(looks):
            clock.advance(PERIOD)
            await settle()
            await queue.enqueue("shop.say", "y")
        reads = storage.reads
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
    return reads


@pytest.mark.timeout(60)
async def test_three_open_dashboards_cost_the_storage_no_more_than_one():
    one, three = await looks_cost(1, 10), await looks_cost(3, 10)

    assert one > 0
    assert three <= one


@pytest.mark.timeout(30)
async def test_the_stream_tells_how_the_counts_change(queue):
    async with served(queue) as (address, _), httpx.AsyncClient(timeout=20) as client:
        listening = asyncio.create_task(events(client, address, 2))
        while not listening.done():
            await queue.enqueue("shop.say", "x")
            await asyncio.wait((listening,), timeout=0.2)
        first, second = await listening

    assert second["version"] > first["version"]
    assert second["by_status"]["pending"] > first["by_status"]["pending"]


async def test_an_idle_storage_is_not_asked_for_what_it_has_told():
    clock = ManualClock()
    storage = CountingStorage(MemoryStorage(clock=clock))
    async with AsyncTaskQueue(storage) as queue:
        await queue.enqueue_many("shop.say", [str(number) for number in range(500)])
        sampler = Sampler(storage)
        await sampler.current()
        first, storage.reads = storage.reads, 0
        sampler.expire()
        await sampler.current()
        second = storage.reads
        await sampler.close()

    assert second < first
    assert second <= 8


@pytest.mark.timeout(60)
async def test_when_nobody_watches_the_looks_become_rare_and_end():
    clock = ManualClock()
    storage = CountingStorage(MemoryStorage(clock=clock))
    async with AsyncTaskQueue(storage):
        sampler = Sampler(storage)
        await sampler.current()
        for _ in range(600):
            clock.advance(2)
            await settle()
        storage.reads = 0
        for _ in range(60):
            clock.advance(60)
            await settle()
        await sampler.close()

    assert storage.reads == 0


async def test_a_storage_that_comes_back_is_watched_again():
    clock = ManualClock()
    storage = FaultyStorage(MemoryStorage(clock=clock))
    async with AsyncTaskQueue(storage):
        sampler = Sampler(storage)
        watching = sampler.watch()
        await anext(watching)
        storage.fail("read", times=None)
        troubled = asyncio.ensure_future(anext(watching))
        await settle()
        clock.advance(PERIOD)
        trouble, error = await troubled, sampler.error
        storage.heal()
        well = asyncio.ensure_future(anext(watching))
        await settle()
        clock.advance(PERIOD)
        look = await well
        await watching.aclose()
        await sampler.close()

    assert trouble is None
    assert error
    assert look is not None
    assert sampler.error == ""


class CountedLater(FaultyStorage):
    """A storage so large that nobody has seen the end of a count, until somebody may."""

    def __init__(self, inner: MemoryStorage) -> None:
        super().__init__(inner)
        self.may_count = asyncio.Event()

    async def stats(self):
        await self.may_count.wait()
        return await super().stats()


PAGES = ("/", "/tasks", "/queues", "/dead", "/workers", "/schedules", "/storage", "/api/overview")


@pytest.mark.timeout(30)
async def test_no_page_waits_until_all_tasks_are_counted():
    storage = CountedLater(MemoryStorage())
    async with AsyncTaskQueue(storage) as queue, asked(queue) as client:
        await queue.enqueue("shop.say", "x")
        answers = [await client.get(path, headers=bearer()) for path in PAGES]
        overview, tasks, queues = (answer.text for answer in answers[:3])

        assert [answer.status_code for answer in answers] == [200] * len(PAGES)
        assert "counting…" in overview
        assert "counting…" in tasks
        assert "shop.say" in tasks
        assert "BackgroundCount…" in queues
        assert "All is well" not in overview


@pytest.mark.timeout(30)
async def test_a_reload_shows_what_was_counted_meanwhile():
    storage = CountedLater(MemoryStorage())
    async with AsyncTaskQueue(storage) as queue, asked(queue) as client:
        await queue.enqueue("shop.say", "x")
        await client.get("/queues", headers=bearer())
        storage.may_count.set()
        client.app.state.dashboard.sampler.expire()
        page = (await client.get("/queues", headers=bearer())).text

    assert "ounting…" not in page
    assert "default" in page
