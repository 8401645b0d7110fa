"""A paused worker claims nothing, finishes what it runs, and claims again when it is resumed."""

from __future__ import annotations

import pytest

from omniq import AsyncTaskQueue, AsyncWorkerPool, InvalidTask, InvalidValue
from omniq.storage.memory import MemoryStorage
from tests.worker import sample_tasks as tasks
from tests.worker.recorder import RECORDER, until

pytestmark = pytest.mark.timeout(120)

LEASE = 1.5


@pytest.fixture(autouse=True)
def clear_recorder():
    RECORDER.clear()
    yield
    RECORDER.open_all()


async def renewed(memory: MemoryStorage, worker: str) -> None:
    """Wait for two more renewals: after the second, the worker knows that it is paused or resumed."""
    renewals = set()

    async def count_renewals() -> int:
        for info in await memory.workers():
            if info.id == worker:
                renewals.add(info.last_heartbeat)
        return len(renewals)

    while await count_renewals() < 3:
        await memory.clock.sleep(0.01)


async def test_a_paused_worker_ends_what_it_runs_and_claims_nothing_until_it_is_resumed():
    memory = MemoryStorage()
    async with AsyncTaskQueue(memory) as queue:
        storage = memory.another()
        pool = AsyncWorkerPool(storage, 4, 0.05, 0.01, lease=LEASE)
        async with storage, pool:
            running = await queue.enqueue(tasks.hold, "first")
            await until(lambda: RECORDER.names() == ["first"])
            await memory.pause_worker(storage.owner)
            await renewed(memory, storage.owner)
            waiting = await queue.enqueue(tasks.note, "second")
            RECORDER.gate("first").set()
            await running.result(timeout=30)
            await renewed(memory, storage.owner)
            ran_while_paused = RECORDER.names()
            await memory.resume_worker(storage.owner)
            await waiting.result(timeout=30)

    assert ran_while_paused == ["first"]
    assert RECORDER.names() == ["first", "second"]


async def test_while_one_worker_is_paused_another_claims_the_tasks():
    memory = MemoryStorage()
    async with AsyncTaskQueue(memory) as queue:
        first, second = memory.another(), memory.another()
        pools = [AsyncWorkerPool(each, 4, 0.05, 0.01, lease=LEASE) for each in (first, second)]
        async with first, second, pools[0], pools[1]:
            await memory.pause_worker(first.owner)
            await renewed(memory, first.owner)
            handles = [await queue.enqueue(tasks.note, str(number)) for number in range(20)]
            for handle in handles:
                await handle.result(timeout=30)
            stats = [pool.stats() for pool in pools]

    assert [each.completed_tasks for each in stats] == [0, 20]


async def test_a_paused_worker_can_be_stopped():
    memory = MemoryStorage()
    async with AsyncTaskQueue(memory) as queue:
        storage = memory.another()
        async with storage, AsyncWorkerPool(storage, 1, 0.05, 0.01, lease=LEASE):
            await memory.pause_worker(storage.owner)
            await renewed(memory, storage.owner)
            await queue.enqueue(tasks.note, "never")

        assert RECORDER.names() == []
        assert await memory.workers() == []


async def test_a_function_that_is_paused_for_a_time_holds_no_other_and_runs_when_it_is_resumed():
    async with AsyncTaskQueue(MemoryStorage()) as queue:
        await queue.functions.pause(tasks.note, reason="no notes", until=3_600)
        waiting = await queue.enqueue(tasks.note, "paused")
        other = await queue.enqueue(tasks.add, 1, 2)
        async with queue.worker(allow=[tasks.__name__]):
            assert await other.result(timeout=30) == 3
            ran_while_paused = RECORDER.names()
            (pause,) = await queue.functions.paused()
            await queue.functions.resume(tasks.note)
            await waiting.result(timeout=30)

    assert ran_while_paused == []
    assert pause.reason == "no notes"
    assert pause.until is not None
    assert RECORDER.names() == ["paused"]


async def test_a_pause_with_a_wrong_end_or_function_is_refused():
    async with AsyncTaskQueue(MemoryStorage()) as queue:
        with pytest.raises(InvalidValue, match="until"):
            await queue.functions.pause(tasks.note, until=-1)
        with pytest.raises(InvalidTask, match="expected a dotted path"):
            await queue.functions.pause("no path")

        assert await queue.functions.paused() == []
