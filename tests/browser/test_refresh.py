"""What keeps a page up to date: parts that have changed, compressed and without the session's token."""

from __future__ import annotations

import asyncio
import re
from random import Random

import pytest

from omniq import AsyncTaskQueue
from omniq.dashboard.sampler import INTERVAL, Point, Sampler
from omniq.storage.memory import MemoryStorage
from omniq.testing.clock import ManualClock
from omniq.testing.faults import FaultyStorage
from tests.browser.served import bearer, dashboard_client, sign_in
from tests.browser.test_live import run_ready_tasks

LIVE_PAGES = (
    "/",
    "/tasks",
    "/dead",
    "/queues",
    "/queues/default",
    "/functions",
    "/functions/shop.say",
    "/workers",
    "/schedules",
    "/limits",
    "/audit",
)


def hashes(text: str) -> dict[str, str]:
    """The live parts of a page by id, with their digests."""
    return dict(re.findall(r'id="([\w-]+)"[^>]* data-live data-hash="(\w+)"', text))


async def refreshed(client, path: str, known: str = ""):
    return await client.get(path, headers={**bearer(), "omniq-parts": known})


@pytest.mark.parametrize("path", LIVE_PAGES)
async def test_every_page_that_says_live_has_live_parts(queue, client, path):
    await queue.enqueue("shop.say", "x")
    await queue.schedules.add("nightly", "shop.say", cron="0 3 * * *")
    text = (await client.get(path, headers=bearer())).text

    assert hashes(text).keys() - {"count-dead", "storage-state"}


async def test_a_refresh_sends_only_parts_that_have_changed(queue, client, dead):
    await queue.enqueue("shop.say", "x")
    whole = await client.get("/queues", headers=bearer())
    before = hashes(whole.text)
    same = await refreshed(client, "/queues", " ".join(before.values()))
    await queue.storage.pause_queue("default")
    client.app.state.dashboard.invalidate()
    changed = await refreshed(client, "/queues", " ".join(before.values()))

    assert hashes(same.text) == before
    assert "default" not in same.text
    assert len(same.text) < len(whole.text) / 4
    assert "paused" in changed.text
    assert 'aria-label="Pages"' in whole.text
    assert 'aria-label="Pages"' not in changed.text
    assert same.headers["content-encoding"] == "gzip"


async def test_an_unchanged_overview_costs_little(queue, client):
    for number in range(30):
        await queue.options(queue=f"q{number}").enqueue("shop.say", "x")
    whole = (await client.get("/", headers=bearer())).text
    known = " ".join(hashes(whole).values())
    async with client.stream("GET", "/", headers={**bearer(), "omniq-parts": known}) as answer:
        sent = b"".join([part async for part in answer.aiter_raw()])

    # Every two seconds: at most 2 kB a second.
    assert len(sent) <= 4_000


async def test_a_refresh_of_an_overview_that_was_open_for_15_minutes_costs_little(queue, client):
    names = [f"q{number}" for number in range(9)]
    for name in names:
        await queue.options(queue=name).enqueue("shop.say", "x")
    await client.get("/", headers=bearer())
    sampler, random = client.app.state.dashboard.sampler, Random(1)
    for number in range(451):
        at = sampler.clock.monotonic() - 2 * (450 - number)
        waiting = {name: random.randrange(200) for name in names}
        sampler.points.append(
            Point(at=at, finished=random.random(), failed=0, waiting=9, by_queue=waiting)
        )
        if number == 449:
            known = " ".join(hashes((await client.get("/", headers=bearer())).text).values())
    async with client.stream("GET", "/", headers={**bearer(), "omniq-parts": known}) as answer:
        sent = b"".join([part async for part in answer.aiter_raw()])

    assert 1_000 < len(sent) <= 3_000


async def test_what_is_compressed_never_has_the_token_of_the_session(queue, client, dead):
    await dead("x")
    token = await sign_in(client)
    for path in ("/", "/queues", "/dead", "/tasks", "/schedules"):
        whole = await client.get(path)
        part = await client.get(path, headers={"omniq-parts": ""})

        assert token in whole.text
        assert "content-encoding" not in whole.headers
        assert part.headers["content-encoding"] == "gzip"
        assert token not in part.text


async def test_a_slow_look_does_not_stop_the_following_ones():
    clock = ManualClock()
    storage = FaultyStorage(MemoryStorage(clock=clock))
    async with AsyncTaskQueue(storage):
        sampler = Sampler(storage)
        await sampler.current()
        storage.delay("read", seconds=5)
        sampler.invalidate()
        slow = asyncio.ensure_future(sampler.current())
        for _ in range(400):
            clock.advance(1)
            await run_ready_tasks()
            if slow.done():
                break
        storage.heal()
        interval = sampler._interval
        await sampler.close()

    assert slow.done()
    assert INTERVAL < interval <= 10


async def test_the_age_of_a_snapshot_grows_until_the_next_one():
    clock = ManualClock()
    async with AsyncTaskQueue(MemoryStorage(clock=clock)) as queue:
        sampler = Sampler(queue.storage)
        await sampler.current()
        ages = [sampler.age]
        clock.advance(4)
        ages.append(sampler.age)
        await sampler.close()

    assert ages == [0, 4]
    assert sampler.stale_after == 3 * INTERVAL


async def test_a_page_with_old_data_says_so_without_javascript():
    clock = ManualClock()
    storage = FaultyStorage(MemoryStorage(clock=clock))
    async with AsyncTaskQueue(storage) as queue, dashboard_client(queue) as client:
        fresh = (await client.get("/queues", headers=bearer())).text
        state = client.app.state.dashboard
        state.sampler._taken_at -= 60
        old = (await client.get("/queues", headers=bearer())).text

    assert "responds slowly" not in fresh
    assert "responds slowly" in old
