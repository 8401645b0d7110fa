"""Waiting: wake-ups end a wait early, and polling finds everything without them."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from omniq.models import TaskStatus
from omniq.outcomes import Retried
from omniq.storage.base import BaseStorage
from omniq.testing.builders import a_result, a_task, an_error
from omniq.testing.clock import ManualClock
from omniq.testing.contract._suite import ContractPart, OpenAnother, claim_one, ids, promise

_T = TypeVar("_T")

DEADLINE = 5.0
"""Seconds of real time that a test waits before it fails."""


async def _within_deadline(waiter: asyncio.Task[_T]) -> _T:
    return await asyncio.wait_for(waiter, DEADLINE)


async def _advance_until_done(clock: ManualClock, waiter: asyncio.Task[_T]) -> _T:
    """Advance the clock until the waiter is done."""
    async with asyncio.timeout(DEADLINE):
        while not waiter.done():
            clock.advance(0.5)
            await asyncio.sleep(0)
    return waiter.result()


class WaitingContract(ContractPart):
    """W1 to W4. The clock stands still unless a test moves it, so only a wake-up can end a wait."""

    @promise("W1")
    async def test_an_enqueue_ends_the_wait_for_work(self, storage: BaseStorage) -> None:
        waiter = asyncio.create_task(storage.wait_for_work(3600))
        async with asyncio.timeout(DEADLINE):
            while not waiter.done():
                await storage.enqueue(a_task())
                await asyncio.sleep(0)

        assert waiter.result() is None

    @promise("W2")
    async def test_the_wait_for_work_ends_after_its_timeout(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        waiter = asyncio.create_task(storage.wait_for_work(5))
        await _advance_until_done(clock, waiter)

        assert await storage.reserve(1) == []

    @promise("W2")
    async def test_a_poll_without_a_wait_finds_tasks_of_other_owners(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        other = await open_another()
        await other.enqueue(a_task("a"))

        assert ids(await storage.reserve(1)) == ["a"]

    async def test_a_wait_of_0_seconds_returns(self, storage: BaseStorage) -> None:
        await storage.wait_for_work(0)

    @promise("W4", "W3")
    async def test_an_outcome_ends_the_wait_for_its_result(self, storage: BaseStorage) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        waiter = asyncio.create_task(storage.wait_for_result("a"))
        await asyncio.sleep(0)
        await storage.mark_done("a", a_result(task, 42))
        result = await _within_deadline(waiter)

        assert result is not None
        assert result.result == 42

    @promise("W4")
    async def test_a_cancellation_ends_the_wait_for_the_result(self, storage: BaseStorage) -> None:
        await storage.enqueue(a_task("a"))
        waiter = asyncio.create_task(storage.wait_for_result("a"))
        await asyncio.sleep(0)
        await storage.cancel("a")
        result = await _within_deadline(waiter)

        assert result is not None
        assert result.status is TaskStatus.CANCELLED

    @promise("W3", "Q4")
    async def test_a_result_that_is_not_final_does_not_end_the_wait(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        waiter = asyncio.create_task(storage.wait_for_result("a"))
        await storage.record([Retried("a", task.token, an_error(), clock.now())])
        for _ in range(20):
            clock.advance(0.5)
            await asyncio.sleep(0)
        assert not waiter.done()
        await storage.mark_done("a", a_result(await claim_one(storage), "final"))
        result = await _advance_until_done(clock, waiter)

        assert result is not None
        assert (result.status, result.result) == (TaskStatus.SUCCESS, "final")

    @promise("W2", "W3")
    async def test_an_outcome_of_another_owner_is_found_by_polling(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await storage.enqueue(a_task("a"))
        waiter = asyncio.create_task(storage.wait_for_result("a", timeout=3600))
        await asyncio.sleep(0)
        await other.mark_done("a", a_result(await claim_one(other), 1))
        result = await _advance_until_done(clock, waiter)

        assert result is not None
        assert result.result == 1

    @promise("W3")
    async def test_the_wait_for_a_result_returns_none_after_its_timeout(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        waiter = asyncio.create_task(storage.wait_for_result("a", timeout=5))

        assert await _advance_until_done(clock, waiter) is None
        assert await storage.wait_for_result("a", timeout=0) is None

    async def test_the_wait_for_the_result_of_an_unknown_task_returns_at_once(
        self, storage: BaseStorage
    ) -> None:
        assert await storage.wait_for_result("unknown") is None

    async def test_a_stored_result_is_returned_at_once(self, storage: BaseStorage) -> None:
        await storage.enqueue(a_task("a"))
        await storage.mark_done("a", a_result(await claim_one(storage), 1))
        result = await storage.wait_for_result("a", timeout=0)

        assert result is not None
        assert result.result == 1
