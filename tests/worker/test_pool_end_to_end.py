"""What a pool does, end to end on every backend: S001 in docs/reference/requirements.md."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

from omniq import AsyncTaskQueue, AsyncWorkerPool, TaskQueue, TaskStatus, WorkerPool
from omniq.testing.faults import FaultyStorage
from tests.timing import at_most
from tests.worker import sample_tasks
from tests.worker.conftest import Store
from tests.worker.recorder import RunRecorder, a_while, blocking_until, until


async def test_process_tasks_up_to_concurrency_limit(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    handles = await queue.enqueue_many(sample_tasks.hold, [f"task {n}" for n in range(12)])
    async with queue.worker(concurrency=3) as pool:
        for opened in range(3, 13):
            await until(lambda opened=opened: len(recorder.names()) >= opened)  # type: ignore[misc]
            held = await queue.storage.held_by(queue.storage.owner)
            assert (recorder.inside, len(held), pool.stats().active_workers) == (3, 3, 3)
            recorder.gate(recorder.names()[opened - 3]).set()
            if opened == 12:
                recorder.open_all()
        assert [await handle.result(30) for handle in handles] == [f"task {n}" for n in range(12)]

    assert recorder.most_inside == 3


async def test_periodic_polling_when_idle(store: Store) -> None:
    async with FaultyStorage(store.another()) as storage:
        async with AsyncWorkerPool(storage, poll_interval=0.1):
            await until(lambda: storage.calls["reserve"] >= 2)
            began = asyncio.get_running_loop().time()
            polls = storage.calls["reserve"]
            await until(lambda: storage.calls["reserve"] >= polls + 3)
            took = asyncio.get_running_loop().time() - began
        polls_at_stop = storage.calls["reserve"]
        await a_while(0.15)

        assert 0.19 <= took < at_most(1.0)
        assert storage.calls["reserve"] == polls_at_stop


async def test_execute_async_callable(queue: AsyncTaskQueue) -> None:
    async with queue.worker():
        handle = await queue.enqueue(sample_tasks.add, 2, b=3)
        where = await queue.enqueue(sample_tasks.name_of_thread)

        assert await handle.result(30) == 5
        assert await where.result(30) == threading.current_thread().name


async def test_execute_sync_callable_in_thread(queue: AsyncTaskQueue) -> None:
    async with queue.worker():
        handle = await queue.enqueue(sample_tasks.add_in_thread, 2, b=3)

        value, thread = await handle.result(30)
        assert value == 5
        assert thread != threading.current_thread().name


async def test_retry_with_exponential_backoff(queue: AsyncTaskQueue) -> None:
    handle = await queue.options(max_retries=3).enqueue(sample_tasks.fail)
    delays = []
    for attempts in range(1, 4):
        await queue.worker(base_retry_delay=60.0).run_until_empty()
        task = await queue.get_task(handle.id)
        result = await queue.get_result(handle.id)
        assert task is not None
        assert result is not None
        assert result.finished_at is not None
        assert (task.status, task.attempts) == (TaskStatus.RETRYING, attempts)
        delays.append((task.eta - result.finished_at).total_seconds())  # type: ignore[operator]
        claimed = await queue.storage.dequeue(task.eta)  # type: ignore[arg-type]
        assert claimed is not None
        await queue.storage.reschedule(handle.id, queue.storage.clock.now())
    await queue.worker(base_retry_delay=60.0).run_until_empty()

    for delay, base in zip(delays, (60.0, 120.0, 240.0), strict=True):
        assert base - 1 <= delay <= 1.1 * base
    task = await queue.get_task(handle.id)
    assert task is not None
    assert (task.status, task.attempts) == (TaskStatus.FAILED, 4)


async def test_reschedule_interval_task_on_success(store: Store) -> None:
    async with AsyncTaskQueue(store.another()) as queue:
        handle = await queue.options(interval=60).enqueue(sample_tasks.add, 1)
        await queue.worker().run_until_empty()
        result = await queue.get_result(handle.id)

    async with AsyncTaskQueue(store.another()) as reopened:
        task = await reopened.get_task(handle.id)
        assert task is not None
        assert task.status is TaskStatus.PENDING
        assert result is not None
        assert result.finished_at is not None
        assert task.eta == result.finished_at + timedelta(seconds=60)


def test_start_and_stop_workers_from_sync_code(store: Store, recorder: RunRecorder) -> None:
    with TaskQueue(store.another()) as queue:
        pool = WorkerPool(store.another(), concurrency=2)
        threads = threading.active_count()
        pool.start()
        running = [pool.running]
        assert threading.active_count() > threads

        handle = queue.enqueue(sample_tasks.hold, "held")
        blocking_until(lambda: "held" in recorder.names())
        threading.Timer(0.1, recorder.gate("held").set).start()
        pool.stop()

        assert [*running, pool.running] == [True, False]
        assert recorder.inside == 0
        assert handle.result(30) == "held"
        late = queue.enqueue(sample_tasks.add, 1)
        assert late.status() is TaskStatus.PENDING
