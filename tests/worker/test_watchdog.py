"""A blocked event loop is reported, with the task and its stack; past the timeout it loses its lease."""

from __future__ import annotations

import asyncio

import pytest

from omniq import Task, WorkerPool
from omniq.events import Event, LoopBlocked, WorkerStuck
from omniq.storage.memory import MemoryStorage
from omniq.tasks.functions import path_of
from tests.worker import hostile_tasks as tasks
from tests.worker.recorder import until
from tests.worker.test_leases import _result

LEASE = 0.5
PATIENCE = 0.1

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def nothing_has_started():
    tasks.starts.clear()


@pytest.fixture
def memory() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
def emitted() -> list[Event]:
    return []


@pytest.fixture
def pool(memory: MemoryStorage, emitted: list[Event]):
    """A pool with a separate event loop, which a test may block."""
    pool = WorkerPool(memory.another(), 1, 0.05, lease=LEASE, loop_patience=PATIENCE)
    pool.events.subscribe(emitted.append)
    with pool:
        yield pool


@pytest.mark.fault("F80")
def test_a_block_is_reported_once_with_the_task_and_its_stack(pool, memory, emitted):
    task_id = pool.submit(tasks.blocks_the_loop, PATIENCE * 6)
    asyncio.run(_result(memory, task_id))

    (event,) = [event for event in emitted if isinstance(event, LoopBlocked)]
    assert (event.id, event.func_path) == (task_id, "tests.worker.hostile_tasks.blocks_the_loop")
    assert "in block\n    time.sleep(seconds)" in event.stack


def test_each_block_is_reported(pool, memory, emitted):
    for _ in range(2):
        asyncio.run(_result(memory, pool.submit(tasks.blocks_the_loop, PATIENCE * 4)))

    assert sum(isinstance(event, LoopBlocked) for event in emitted) == 2


def test_a_block_outside_the_code_of_the_task_is_reported_with_its_stack(pool, memory, emitted):
    asyncio.run(_result(memory, pool.submit(tasks.blocks_the_loop_in_a_subtask, PATIENCE * 6)))

    (event,) = [event for event in emitted if isinstance(event, LoopBlocked)]
    assert (event.id, event.func_path) == ("", "")
    assert "in block\n" in event.stack


def test_a_loop_that_is_not_blocked_is_not_reported(pool, memory, emitted):
    for number in range(100):
        asyncio.run(_result(memory, pool.submit(tasks.good_in_the_loop, number)))

    assert not [event for event in emitted if isinstance(event, LoopBlocked)]


@pytest.mark.parametrize("func", [tasks.blocks_the_loop, tasks.blocks_the_loop_in_a_subtask])
def test_a_loop_blocked_past_its_tasks_timeout_loses_the_lease_and_the_task_runs_elsewhere(
    pool, memory, emitted, func
):
    task = Task(func_path=path_of(func), args=(4 * LEASE,), timeout=0.05, max_retries=0)

    async def enqueue() -> None:
        async with memory.another() as storage:
            await storage.enqueue(task)

    asyncio.run(enqueue())
    asyncio.run(until(lambda: any(isinstance(event, WorkerStuck) for event in emitted)))
    with WorkerPool(memory.another(), 1, 0.05, lease=10) as other:
        asyncio.run(until(lambda: other.stats().active_workers == 1))
        result = asyncio.run(_result(memory, task.id))

    assert result.attempts == 2
    assert pool.stats().completed_tasks == 0


def test_the_pool_continues_when_its_event_loop_is_free_again(pool, memory, emitted):
    first = pool.submit("tests.worker.hostile_tasks.blocks_the_loop", 3 * LEASE)
    asyncio.run(_result(memory, first))
    next_one = pool.submit(tasks.good_in_the_loop, 7)

    assert asyncio.run(_result(memory, next_one)).result == 7
