"""A worker is notified at once of tasks that others enqueue, and sends few requests when idle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from omniq import AsyncTaskQueue, AsyncWorkerPool
from omniq.storage import open_storage
from omniq.testing.fault_proxy import FaultProxy
from tests.fleet import fleet_tasks as tasks

pytestmark = pytest.mark.timeout(120)

POLL_INTERVAL = 60.0


@pytest.fixture
async def queue(place_on_server: str) -> AsyncIterator[AsyncTaskQueue]:
    """A queue on a separate connection, like that of another process; the worker is idle."""
    async with (
        AsyncTaskQueue(place_on_server) as queue,
        AsyncWorkerPool(open_storage(place_on_server), 5, POLL_INTERVAL),
    ):
        # When the first task has ended, the worker listens.
        await (await queue.enqueue(tasks.count, "first")).result(timeout=30)
        yield queue


async def test_a_task_that_another_process_enqueues_starts_before_the_next_poll(queue):
    for name in "abc":
        await (await queue.enqueue(tasks.count, name)).result(timeout=30)


async def test_a_delayed_task_of_another_process_starts_when_it_is_due(queue):
    for delay in (0.3, 0.1):
        began = time.monotonic()
        handle = await queue.options(delay=delay).enqueue(tasks.count, "later")
        await handle.result(timeout=30)

        assert time.monotonic() - began >= delay


@pytest.mark.deep
@pytest.mark.timeout(120)
async def test_an_idle_worker_sends_under_two_requests_a_second(place_on_server):
    """With `poll_interval=5` and the default lease, after the start."""
    async with (
        FaultProxy(place_on_server) as proxy,
        AsyncWorkerPool(open_storage(proxy.url), 5, 5.0),
    ):
        await asyncio.sleep(15)
        sent: list[int] = []
        # On a busy machine one request may arrive in parts, and what is sent together otherwise is not. One calm
        # span shows the rate, since nothing makes a worker send less than it does.
        while len(sent) < 4 and (not sent or sent[-1] >= 30):
            before = proxy.counts.requests
            await asyncio.sleep(15)
            sent.append(proxy.counts.requests - before)

    assert min(sent) < 30, sent
