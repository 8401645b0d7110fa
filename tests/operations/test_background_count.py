"""Counting in the background: no caller has to wait for it, and it does not overload a storage."""

from __future__ import annotations

import asyncio

import pytest

from omniq.errors import StorageError
from omniq.operations.background_count import BackgroundCount
from omniq.operations.overview import Monitor
from omniq.storage.memory import MemoryStorage
from omniq.testing.builders import a_task
from omniq.testing.clock import ManualClock
from omniq.testing.faults import FaultyStorage


class SlowStorage(FaultyStorage):
    """Counts only while `may_count` is set, and records how often it was called."""

    def __init__(self, inner: MemoryStorage) -> None:
        super().__init__(inner)
        self.may_count = asyncio.Event()
        self.counts = 0

    async def stats(self):
        self.counts += 1
        await self.may_count.wait()
        return await super().stats()


@pytest.fixture
async def slow(clock: ManualClock):
    async with SlowStorage(MemoryStorage(clock=clock)) as storage:
        await storage.enqueue(a_task("a"))
        yield storage


async def test_a_reader_does_not_wait_for_the_first_count(slow):
    monitor = Monitor(slow)
    first = await monitor.overview(0.001)
    slow.may_count.set()
    second = await monitor.overview(5)
    await monitor.close()

    assert first.counted_at is None
    assert sum(first.by_status.values()) == 0
    assert second.counted_at is not None
    assert sum(second.by_status.values()) == 1
    assert slow.counts == 1


async def test_during_a_count_the_last_one_is_returned(slow, clock):
    slow.may_count.set()
    monitor = Monitor(slow)
    first = await monitor.overview(5)
    slow.may_count.clear()
    monitor.invalidate()
    clock.advance(60)
    second = await monitor.overview(0.001)
    await monitor.close()

    assert second.counted_at == first.counted_at
    assert second.at > first.at


async def test_after_a_slow_count_the_next_one_waits_ten_times_as_long(slow, clock):
    counting = BackgroundCount(slow)
    first = counting.start(force=False)
    await asyncio.sleep(0)
    clock.advance(3)
    slow.may_count.set()
    await counting.wait(first, None)
    clock.advance(29)
    early = counting.start(force=False)
    clock.advance(2)
    late = counting.start(force=False)
    await counting.wait(late, None)

    assert first is not None
    assert early is None
    assert late is not None
    assert slow.counts == 2


async def test_a_change_during_a_count_causes_another_count(slow):
    counting = BackgroundCount(slow)
    first = counting.start(force=False)
    await asyncio.sleep(0)
    counting.invalidate()
    slow.may_count.set()
    await counting.wait(first, None)
    second = counting.start(force=False)
    await counting.wait(second, None)

    assert second is not None
    assert slow.counts == 2


async def test_a_failed_count_raises_in_the_waiting_caller(clock):
    async with FaultyStorage(MemoryStorage(clock=clock)) as storage:
        storage.fail("read", times=None)
        monitor = Monitor(storage)

        with pytest.raises(StorageError):
            await monitor.overview()
