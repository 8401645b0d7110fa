"""A worker hears from others at once of what they enqueue, and sends little while there is nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from omniq import AsyncTaskQueue, AsyncWorkerPool
from omniq.storage import open_storage
from omniq.testing.fault_proxy import FaultProxy
from tests.fleet import fleet_tasks as tasks

pytestmark = pytest.mark.timeout(30)

POLL_INTERVAL = 60.0


@pytest.fixture
async def queue(place_on_server: str) -> AsyncIterator[AsyncTaskQueue]:
    """The queue of another process, as far as the worker can tell; the worker is idle."""
    async with (
        AsyncTaskQueue(place_on_server) as queue,
        AsyncWorkerPool(open_storage(place_on_server), 5, POLL_INTERVAL),
    ):
        # The first one shows that the worker has begun to listen, or found it before.
        await (await queue.enqueue(tasks.count, "first")).result(timeout=10)
        yield queue


async def test_what_others_enqueue_starts_long_before_a_poll(queue):
    for name in "abc":
        await (await queue.enqueue(tasks.count, name)).result(timeout=10)


async def test_what_others_enqueue_for_later_starts_when_it_is_due_and_not_a_poll_later(queue):
    for delay in (0.3, 0.1):
        began = time.monotonic()
        handle = await queue.options(delay=delay).enqueue(tasks.count, "later")
        await handle.result(timeout=10)

        assert time.monotonic() - began >= delay


@pytest.mark.deep
@pytest.mark.timeout(90)
async def test_an_idle_worker_sends_under_two_requests_a_second(place_on_server):
    """At `poll_interval=5` and the default lease, when everything has been done once."""
    async with (
        FaultProxy(place_on_server) as proxy,
        AsyncWorkerPool(open_storage(proxy.url), 5, 5.0),
    ):
        await asyncio.sleep(15)
        before = proxy.counts.requests
        await asyncio.sleep(30)

        assert proxy.counts.requests - before < 60
