"""What a pool does about outcomes that the store refuses: none is forgotten, and none holds up the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from omniq import AsyncTaskQueue, AsyncWorkerPool, StorageError, TaskFailed, TaskStatus
from omniq.errors import SerializationError, StoreWentBack
from omniq.events import Event, LeaseLoss, StoreRestored, TaskDead, TaskSucceeded, WorkerProblem
from omniq.outcomes import Failed, Outcome, Released, Succeeded
from omniq.storage.memory import MemoryStorage
from omniq.storage.types import Capabilities
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


def a_pool(storage: MemoryStorage) -> AsyncWorkerPool:
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


async def test_a_success_whose_replies_are_lost_is_not_reported_as_a_failure(queue, storage):
    """The store has recorded it at the first try: nothing else may be recorded in its place."""
    mute = await queue.enqueue(tasks.good_in_the_loop, 7)
    emitted: list[Event] = []
    record = storage._engine.record_and_claim

    async def record_without_reply(owner: str, outcomes: Any, claim: Any) -> Any:
        reply = await record(owner, outcomes, claim)
        if any(isinstance(each, Succeeded) and each.task_id == mute.id for each in outcomes):
            raise StorageError("the reply was lost")
        return reply

    storage._engine.record_and_claim = record_without_reply
    pool = a_pool(storage)
    pool.events.subscribe(emitted.append, kinds=(TaskDead, TaskSucceeded))

    def is_reported() -> bool:
        return any(getattr(event, "id", "") == mute.id for event in emitted)

    async with pool:
        await keep_busy(queue, lambda: asyncio.sleep(0, is_reported()))

    (event,) = [event for event in emitted if getattr(event, "id", "") == mute.id]
    assert isinstance(event, TaskSucceeded)
    assert storage.claims == {}


async def test_a_task_is_released_when_neither_its_outcome_nor_its_failure_can_be_recorded(
    storage, queue
):
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
        result, task = await queue.get_result(bad.id), await queue.get_task(bad.id)

    assert (result.result, result.attempts, task.token) == (7, 1, 2)
    assert {type(each) for each in refused} == {Succeeded, Failed}


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
    pool.events.subscribe(emitted.append, kinds=(WorkerProblem,))
    async with pool:
        # Longer than it takes to record them one by one, and to try each of them again.
        await until(
            lambda: sum("record task" in getattr(event, "activity", "") for event in emitted) > 3
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


async def test_an_outcome_that_was_not_sent_fails_without_a_renewal():
    """No other try could help, so the failure does not wait until the store is known to answer."""

    class WithoutHeartbeat(Picky):
        error = SerializationError("no such type")

        async def renew(self, **options: Any) -> Any:
            if self._is_sibling:
                raise StorageError("away")
            return await super().renew(**options)

    async with WithoutHeartbeat() as storage:
        queue = AsyncTaskQueue(storage)
        storage.refuses = lambda each: isinstance(each, Succeeded)
        async with queue.worker():
            bad = await queue.enqueue(tasks.good_in_the_loop, 7)
            with pytest.raises(TaskFailed, match="no such type"):
                await bad.result(timeout=20)


class OnlySingly(MemoryStorage):
    """Refuses all batches, and takes long to record a single outcome, beside other calls."""

    takes = 2 * LEASE
    loses_lease = False

    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(super().capabilities, reach="fleet")

    async def record_and_reserve(
        self, outcomes: Sequence[Outcome], *arguments: Any, **options: Any
    ) -> Any:
        if any(not isinstance(each, Released) for each in outcomes):
            raise StorageError("the server: no batch")
        return await super().record_and_reserve(outcomes, *arguments, **options)

    async def record(self, outcomes: Sequence[Outcome]) -> list[bool]:
        await asyncio.sleep(self.takes)
        if self.loses_lease:
            self.loses_lease = False
            owner = self.owner
            self._change_owner(owner)
            raise StoreWentBack(owner, 1, is_repeated=False)
        recorded, _ = await super().record_and_reserve(outcomes, 0)
        return recorded


async def test_an_outcome_is_not_released_while_it_is_recorded_alone():
    """Renewals go on meanwhile, and find a claim of which no run and no waiting outcome is left."""
    async with OnlySingly() as storage:
        queue = AsyncTaskQueue(storage)
        async with a_pool(storage) as pool:
            handle = await queue.enqueue(tasks.good_in_the_loop, 7)
            assert await handle.result(timeout=30) == 7
            task = await queue.get_task(handle.id)
            assert task is not None
            stats = pool.stats()

    assert task.token == 1
    assert (stats.completed_tasks, stats.stale_outcomes) == (1, 0)


async def test_a_lease_that_is_lost_while_an_outcome_is_recorded_alone_stops_the_runs():
    tasks.starts.clear()
    tasks.stopped.clear()
    emitted: list[Event] = []
    async with OnlySingly() as storage:
        storage.takes, storage.loses_lease = 0.0, True
        queue = AsyncTaskQueue(storage)
        pool = a_pool(storage)
        pool.events.subscribe(emitted.append, kinds=(WorkerProblem, LeaseLoss, StoreRestored))
        async with pool:
            await queue.enqueue(tasks.waits_for_cancel)
            await until(lambda: tasks.starts)
            await queue.enqueue(tasks.good_in_the_loop, 7)
            await until(tasks.stopped.is_set)

    kinds = [type(event) for event in emitted if not isinstance(event, WorkerProblem)]
    assert kinds == [StoreRestored, LeaseLoss]


async def is_status(task: Any, status: TaskStatus) -> bool:
    return await task.status() is status


async def has_refused(pool: AsyncWorkerPool) -> bool:
    return pool.stats().completed_tasks > 20
