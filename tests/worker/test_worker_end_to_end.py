"""What a worker does, end to end on every backend: S002 in docs/reference/requirements.md.

`Worker` is what `omniq worker` runs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from loguru import logger

from omniq import AsyncTaskQueue, Task, TaskFailed, TaskQueue, TaskStatus, log
from omniq.storage import BaseStorage
from omniq.testing.faults import FaultyStorage
from omniq.worker.process.supervisor import Worker
from tests.worker import sample_tasks
from tests.worker.conftest import Store
from tests.worker.recorder import RunRecorder, a_while, blocking_until, until

pytestmark = pytest.mark.on_servers


@pytest.fixture
def caller(store: Store) -> Iterator[TaskQueue]:
    """The caller that enqueues: another process, as far as the worker can see."""
    with TaskQueue(store.another()) as caller:
        yield caller


def a_worker(storage: BaseStorage, **options: Any) -> Worker:
    return Worker(storage, modules=[sample_tasks], **{"poll_interval": 0.05, **options})


def test_start_worker_loop(store: Store) -> None:
    storage = FaultyStorage(store.another())
    worker = a_worker(storage)
    is_open = [storage.is_open]

    with worker:
        is_open.append(storage.is_open)
        polls = storage.calls["reserve"]
        blocking_until(lambda: storage.calls["reserve"] >= polls + 3)

    assert [*is_open, storage.is_open] == [False, True, False]


def test_no_tasks_available(store: Store) -> None:
    storage = FaultyStorage(store.another())
    with a_worker(storage, poll_interval=0.1):
        blocking_until(lambda: storage.calls["reserve"] >= 1)
        began, polls = time.monotonic(), storage.calls["reserve"]
        blocking_until(lambda: storage.calls["reserve"] >= polls + 3)
        took = time.monotonic() - began

    assert took >= 0.19


def test_limit_concurrent_tasks(store: Store, caller: TaskQueue, recorder: RunRecorder) -> None:
    caller.enqueue_many(sample_tasks.hold, ["a", "b", "c"])
    storage = FaultyStorage(store.another())
    with a_worker(storage, max_concurrency=2):
        blocking_until(lambda: recorder.inside == 2)
        polls = storage.calls["reserve"]
        waiting = caller.list_tasks(status=TaskStatus.PENDING)
        asyncio.run(a_while(0.15))

        assert len(waiting) == 1
        assert (recorder.inside, storage.calls["reserve"]) == (2, polls)
        recorder.gate("a").set()
        blocking_until(lambda: recorder.names() == ["a", "b", "c"])
        recorder.open_all()
        recorder.gate("c").set()


def test_execute_async_callable(store: Store, caller: TaskQueue) -> None:
    with a_worker(store.another()):
        handle = caller.enqueue(sample_tasks.add, 2, b=3)

        assert handle.result(30) == 5
    result = caller.get_result(handle.id)
    assert result is not None
    assert (result.status, result.result, result.attempts) == (TaskStatus.SUCCESS, 5, 1)


def test_execute_sync_callable(store: Store, caller: TaskQueue) -> None:
    with a_worker(store.another()):
        handle = caller.enqueue(sample_tasks.add_in_thread, 2, b=3)

        value, thread = handle.result(30)
    assert value == 5
    assert thread != threading.current_thread().name


def test_handle_task_failure(store: Store, caller: TaskQueue) -> None:
    with a_worker(store.another()):
        handle = caller.options(max_retries=0).enqueue(sample_tasks.fail, "no such thing")
        with pytest.raises(TaskFailed, match="no such thing"):
            handle.result(30)

    result = caller.get_result(handle.id)
    assert result is not None
    assert result.status is TaskStatus.FAILED
    assert result.error is not None
    assert result.error.error_type == "ValueError"
    assert "in fail" in (result.error.traceback or "")


async def test_task_retried_after_worker_crash(store: Store) -> None:
    """The crashed worker had claimed the task, and does not renew its lease."""
    crashed = store.another()
    await crashed.open()
    await crashed.enqueue(Task(func_path=f"{sample_tasks.__name__}.add", args=(1,)))
    await crashed.renew(lease=0.2)
    (claimed,) = await crashed.reserve(1)

    async with AsyncTaskQueue(store.another()) as queue:
        async with queue.worker(poll_interval=0.05, lease=1.0):
            assert await queue.handle(claimed.id).result(30) == 1
        task = await queue.get_task(claimed.id)
        assert task is not None
        assert (task.crashes, task.token) == (1, claimed.token + 1)
    await crashed.close()


async def test_stop_worker_with_in_flight_tasks(store: Store, recorder: RunRecorder) -> None:
    async with AsyncTaskQueue(store.another()) as caller:
        worker = a_worker(store.another(), max_concurrency=1)
        worker.start()
        handle = await caller.enqueue(sample_tasks.hold, "held")
        await until(lambda: recorder.inside == 1)
        stopping = asyncio.create_task(asyncio.to_thread(worker.stop))
        late = await caller.enqueue(sample_tasks.note, "late")
        await a_while(0.15)

        assert not stopping.done()
        recorder.gate("held").set()
        await stopping
        assert await handle.status() is TaskStatus.SUCCESS
        assert await late.status() is TaskStatus.PENDING


def test_log_task_lifecycle_events(store: Store, caller: TaskQueue) -> None:
    records: list[Any] = []
    sink = logger.add(lambda message: records.append(message.record), level=0)
    log.enable("DEBUG")
    try:
        with a_worker(store.another()):
            caller.enqueue(sample_tasks.add, 1).result(30)
            failed = caller.options(max_retries=0).enqueue(sample_tasks.fail)
            with pytest.raises(TaskFailed):
                failed.result(30)
    finally:
        log.disable()
        logger.remove(sink)

    levels = {record["extra"]["event"]: record["level"].name for record in records}
    assert levels["task.claimed"] == "DEBUG"
    assert levels["task.started"] == levels["task.succeeded"] == levels["task.failed"] == "INFO"
