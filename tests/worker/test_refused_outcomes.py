"""What a pool does about outcomes that the store refuses: none is forgotten, and none holds up the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from omniq import AsyncTaskQueue, AsyncWorkerPool, StorageError, TaskStatus
from omniq.events import ChoreFailed, Event
from omniq.outcomes import Failed, Outcome, Released, Succeeded
from omniq.storage.memory import MemoryStorage
from tests.worker import hostile_tasks as tasks
from tests.worker.recorder import until

LEASE = 0.9

pytestmark = pytest.mark.timeout(120)


class Picky(MemoryStorage):
    """Refuses calls with outcomes that a test names, as a server refuses a statement."""

    refuses: Callable[[Outcome], bool] = staticmethod(lambda outcome: False)
    error: Exception = StorageError("the server: value too long")

    async def record_and_reserve(
        self, outcomes: Sequence[Outcome], *arguments: Any, **options: Any
    ) -> Any:
        if any(map(self.refuses, outcomes)):
            raise self.error
        return await super().record_and_reserve(outcomes, *arguments, **options)


@pytest.fixture
async def storage():
    async with Picky() as storage:
        yield storage


@pytest.fixture
async def queue(storage: Picky):
    return AsyncTaskQueue(storage)


def a_pool(storage: Picky) -> AsyncWorkerPool:
    return AsyncWorkerPool(storage, 2, 0.05, 0.01, lease=LEASE)


async def keep_busy(queue: AsyncTaskQueue, until_done: Callable[[], Any]) -> None:
    """Run other tasks until it is done: their outcomes are recorded."""
    while not await until_done():
        other = await queue.enqueue(tasks.good_in_the_loop, 1)
        assert await other.result(timeout=20) == 1
        await asyncio.sleep(0.02)


async def test_an_outcome_that_is_refused_alone_while_others_are_recorded_is_unrecordable(
    storage, queue
):
    bad = await queue.enqueue(tasks.good_in_the_loop, 7)
    storage.refuses = lambda each: isinstance(each, Succeeded) and each.task_id == bad.id
    async with a_pool(storage):
        await keep_busy(queue, lambda: is_status(bad, TaskStatus.FAILED))
        letter = await queue.dead.get(bad.id)

    assert letter.failure_reason == "unrecordable"
    assert "value too long" in letter.error_details
    assert storage.claims == {}


async def test_a_task_is_released_when_neither_its_outcome_nor_its_failure_can_be_recorded(
    storage, queue
):
    runs = len(tasks.starts)
    bad = await queue.enqueue(tasks.good_in_the_loop, 7)
    refused: list[Outcome] = []

    def refuses(each: Outcome) -> bool:
        if each.task_id != bad.id or isinstance(each, Released) or each.token > 1:
            return False
        refused.append(each)
        return True

    storage.refuses = refuses
    async with a_pool(storage):
        await keep_busy(queue, lambda: is_status(bad, TaskStatus.SUCCESS))
        result = await queue.get_result(bad.id)

    assert result.result == 7
    assert {type(each) for each in refused} == {Succeeded, Failed}
    assert len(tasks.starts) == runs


async def test_a_task_that_runs_at_most_once_is_not_released_but_ends(storage, queue):
    bad = await queue.options(max_crashes=0).enqueue(tasks.good_in_the_loop, 7)

    def refuses(each: Outcome) -> bool:
        reason = each.reason if isinstance(each, Failed) else ""
        return each.task_id == bad.id and reason != "crashed"

    storage.refuses = refuses
    async with a_pool(storage):
        await keep_busy(queue, lambda: is_status(bad, TaskStatus.FAILED))
        letter = await queue.dead.get(bad.id)

    assert letter.failure_reason == "crashed"


@pytest.mark.parametrize("error", [StorageError("away"), IndexError("an odd reply")])
async def test_an_outcome_is_sent_again_for_as_long_as_no_other_is_recorded(storage, queue, error):
    storage.error = error
    storage.refuses = lambda each: True
    task = await queue.enqueue(tasks.good_in_the_loop, 7)
    emitted: list[Event] = []
    pool = a_pool(storage)
    pool.events.subscribe(emitted.append, kinds=(ChoreFailed,))
    async with pool:
        # Longer than it takes to record them one by one, and to try each of them again.
        await until(
            lambda: sum("record task" in getattr(event, "chore", "") for event in emitted) > 3
        )
        assert await task.status() is TaskStatus.RUNNING
        storage.refuses = lambda each: False

        assert await task.result(timeout=20) == 7
        assert pool.stats().failed_tasks == 0


async def test_an_outcome_that_is_still_refused_at_the_stop_is_released_with_the_lease(
    storage, queue
):
    bad = await queue.enqueue(tasks.good_in_the_loop, 7)
    storage.refuses = lambda each: each.task_id == bad.id
    pool = a_pool(storage)
    await pool.start()
    await keep_busy(queue, lambda: has_refused(pool))
    await pool.stop(timeout=10)

    assert await bad.status() is TaskStatus.PENDING


async def is_status(task: Any, status: TaskStatus) -> bool:
    return await task.status() is status


async def has_refused(pool: AsyncWorkerPool) -> bool:
    return pool.stats().completed_tasks > 20
