"""A wait for work ends when a rate limit admits the next task."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from omniq.models import Limit
from omniq.storage.base import BaseStorage
from omniq.testing.builders import some_tasks
from omniq.testing.clock import ManualClock

SECOND = timedelta(seconds=1)


class RateWakeupTests:
    async def begin_to_listen(self, storage: BaseStorage) -> None:
        """Prepare the storage, if its first wait for work is not like the others."""

    async def test_the_wait_for_work_ends_when_a_rate_admits_the_next_task(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await self.begin_to_listen(storage)
        limit = Limit(key="k", rate=1, per=10)
        await storage.enqueue_many(some_tasks(["first", "second"], limits=(limit,)))
        assert [task.id for task in await storage.reserve(2)] == ["first"]

        waiter = asyncio.create_task(storage.wait_for_work(3600))
        await _advance(clock, 9)
        assert not waiter.done()
        await _advance(clock, 2)
        async with asyncio.timeout(10):
            await waiter

        assert [task.id for task in await storage.reserve(2)] == ["second"]


async def _advance(clock: ManualClock, seconds: int) -> None:
    for _ in range(seconds):
        await asyncio.sleep(0.01)
        clock.advance(SECOND)
    await asyncio.sleep(0.01)
