"""`MockTask`: a task that waits, calls a function of the test, and stops when it has to."""

from __future__ import annotations

import asyncio

import pytest

from omniq import AsyncTaskQueue, InvalidValue, TaskCancelled, TaskFailed, TaskQueue
from omniq.storage.memory import MemoryStorage
from omniq.testing import MockTask


@pytest.fixture
async def queue():
    async with AsyncTaskQueue(MemoryStorage()) as queue:
        yield queue


async def test_ten_mock_tasks_are_done_by_three_workers(queue):
    completed = []
    mocks = [
        MockTask(f"task-{number}", execute_fn=lambda ctx: completed.append(ctx.task_id))
        for number in range(10)
    ]
    async with queue.worker(concurrency=3):
        for handle in [await mock.enqueue(queue) for mock in mocks]:
            await handle.result(timeout=10)

    assert sorted(completed) == sorted(mock.id for mock in mocks)
    assert [mock.finished for mock in mocks] == [1] * 10


async def test_it_has_its_id_and_type_and_returns_what_the_function_returns(queue):
    async def double(ctx):
        return ctx.attempt * 2

    mock = MockTask("mine", type="report", execute_fn=double)
    async with queue.worker():
        assert await (await mock.enqueue(queue, priority=3)).result(timeout=10) == 2

    task = await queue.get_task("mine")
    assert (task.task_type, task.priority) == ("report", 3)


async def test_it_stops_during_its_delay_when_it_is_cancelled(queue):
    mock = MockTask(execute_delay=60, execute_fn=lambda ctx: pytest.fail("it was not stopped"))
    async with queue.worker():
        handle = await mock.enqueue(queue)
        while not mock.started:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.005)
        await handle.cancel()
        with pytest.raises(TaskCancelled):
            await handle.result(timeout=10)

    assert (mock.started, mock.finished, mock.cancelled) == (1, 0, 1)


async def test_it_may_fail(queue):
    mock = MockTask(execute_fn=lambda ctx: 1 / 0)
    async with queue.worker():
        with pytest.raises(TaskFailed, match="ZeroDivisionError"):
            await (await mock.enqueue(queue, max_retries=0)).result(timeout=10)


def test_it_works_with_a_blocking_queue():
    mock = MockTask(execute_fn=lambda ctx: "done")
    with TaskQueue(MemoryStorage()) as queue, queue.worker():
        assert mock.enqueue(queue).result(timeout=10) == "done"


def test_a_wrong_delay_is_refused():
    with pytest.raises(InvalidValue, match="execute_delay"):
        MockTask(execute_delay=-1)


async def test_its_function_may_stream(queue):
    mock = MockTask(execute_fn=lambda ctx: ctx.stream("said"))
    async with queue.worker():
        handle = await mock.enqueue(queue)

        assert [chunk.value async for chunk in handle.stream()] == ["said"]
