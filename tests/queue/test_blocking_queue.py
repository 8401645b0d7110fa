"""The queue for blocking code."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from omniq import (
    AsyncTaskHandle,
    AsyncTaskQueue,
    AsyncWorkerPool,
    StorageClosed,
    StorageError,
    TaskCancelled,
    TaskHandle,
    TaskQueue,
    TaskStatus,
    WorkerPool,
)
from omniq.queue.blocking_operators import Breakers, Limits, Queues, Workers
from omniq.queue.blocking_queue import DeadLetters
from omniq.queue.dead_letters import AsyncDeadLetters
from omniq.queue.operators import AsyncBreakers, AsyncLimits, AsyncQueues, AsyncWorkers
from omniq.scheduling.schedules import AsyncSchedules, Schedules
from tests.queue import sample_tasks

FACES = [
    (AsyncTaskQueue, TaskQueue),
    (AsyncTaskHandle, TaskHandle),
    (AsyncDeadLetters, DeadLetters),
    (AsyncSchedules, Schedules),
    (AsyncQueues, Queues),
    (AsyncWorkers, Workers),
    (AsyncBreakers, Breakers),
    (AsyncLimits, Limits),
    (AsyncWorkerPool, WorkerPool),
]


def public_methods(face: type) -> dict[str, Callable[..., object]]:
    return {
        name: method
        for name, method in inspect.getmembers(face, inspect.isfunction)
        if not name.startswith("_")
    }


@pytest.mark.parametrize(("async_face", "face"), FACES)
def test_every_async_method_has_a_blocking_form_with_the_same_parameters(
    async_face: type, face: type
) -> None:
    blocking = public_methods(face)

    for name, method in public_methods(async_face).items():
        assert not inspect.iscoroutinefunction(blocking[name])
        assert blocking[name].__name__ == name
        assert inspect.getdoc(blocking[name])
        expected = inspect.signature(method).parameters.values()
        actual = inspect.signature(blocking[name]).parameters.values()
        assert [(each.name, each.kind, each.default) for each in actual] == [
            (each.name, each.kind, each.default) for each in expected
        ]


def test_the_blocking_queue_returns_the_same_as_the_async_queue() -> None:
    with TaskQueue("memory://") as queue:
        handle = queue.options(task_id="a", priority=3).enqueue(sample_tasks.send, "x")
        more = queue.enqueue_many(sample_tasks.plain, [1, 2])

        assert handle.status() is TaskStatus.PENDING
        assert [task.id for task in queue.list_tasks()] == [more[0].id, more[1].id, "a"]
        assert queue.stats().by_status[TaskStatus.PENDING] == 3
        assert queue.workers() == []
        assert queue.get_result("a") is None
        assert handle.progress() is None
        assert handle.cancel()
        with pytest.raises(TaskCancelled):
            queue.handle("a").result(timeout=30)
        assert queue.dead.list() == []
        assert not queue.dead.retry("a")


def test_handles_of_the_same_task_are_equal() -> None:
    with TaskQueue("memory://") as queue, TaskQueue("memory://") as elsewhere:
        handle = queue.enqueue(sample_tasks.plain)

        assert handle == queue.handle(handle.id)
        assert {handle, queue.handle(handle.id)} == {handle}
        assert handle != elsewhere.handle(handle.id)
        assert queue.flow("nightly") == queue.flow("nightly") != queue.flow("weekly")


@pytest.mark.fault("F97")
def test_it_works_inside_a_running_loop() -> None:
    async def main(queue: TaskQueue) -> str:
        return queue.enqueue(sample_tasks.plain).id

    with TaskQueue("memory://") as queue:
        task_id = asyncio.run(main(queue))

        assert queue.get_task(task_id) is not None


def test_it_works_from_many_threads_at_once() -> None:
    with TaskQueue("memory://") as queue, ThreadPoolExecutor(8) as pool:
        handles = list(pool.map(lambda n: queue.enqueue(sample_tasks.plain, n), range(200)))

        assert len({handle.id for handle in handles}) == 200
        assert queue.stats().by_status[TaskStatus.PENDING] == 200


def test_a_waiting_thread_does_not_block_other_threads() -> None:
    with TaskQueue("memory://") as queue:
        handle = queue.enqueue(sample_tasks.plain)
        outcome: list[type[BaseException]] = []

        def wait() -> None:
            try:
                handle.result(timeout=60)
            except TaskCancelled as error:
                outcome.append(type(error))

        waiter = threading.Thread(target=wait)
        waiter.start()
        queue.cancel(handle.id)
        waiter.join()

        assert outcome == [TaskCancelled]


@pytest.mark.fault("F97")
def test_a_forked_child_gets_an_error_that_says_to_open_a_new_queue() -> None:
    with TaskQueue("memory://") as queue:
        queue.enqueue(sample_tasks.plain)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                queue.enqueue(sample_tasks.plain)
            except StorageError as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.waitpid(child, 0)

        assert b"open a new queue in the child" in os.read(read, 1000)
        os.close(read)
        os.close(write)


def test_a_closed_queue_raises_storage_closed_and_may_be_closed_twice() -> None:
    queue = TaskQueue("memory://")
    with queue:
        pass
    queue.close()

    with pytest.raises(StorageClosed):
        queue.enqueue(sample_tasks.plain)


def test_a_process_that_does_not_close_its_queue_ends_without_output(tmp_path: Path) -> None:
    script = "from omniq import TaskQueue\nq = TaskQueue('memory://')\nq.open()\nq.enqueue('m.f')\n"

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        cwd=tmp_path,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("url", ["file://{folder}/store", "sqlite:///{folder}/store.db"])
def test_a_queue_that_is_dropped_without_being_closed_leaves_no_thread_and_no_open_file(
    url: str, tmp_path: Path
) -> None:
    def count() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def use_and_drop() -> tuple[int, int]:
        queue = TaskQueue(url.format(folder=tmp_path))
        queue.open()
        queue.enqueue(sample_tasks.plain)
        queue.stats()
        return count()

    gc.collect()
    before = count()
    during = use_and_drop()
    assert during > before
    for _ in range(1_000):
        gc.collect()
        if count() == before:
            break
        threading.Event().wait(0.01)

    assert count() == before
