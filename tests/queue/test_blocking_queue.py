"""The queue for blocking code."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from omniq import StorageClosed, StorageError, TaskCancelled, TaskQueue, TaskStatus
from tests.queue import sample_tasks


def test_the_blocking_face_has_the_same_answers() -> None:
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
            queue.handle("a").result(timeout=5)
        assert queue.dead.list() == []
        assert not queue.dead.retry("a")


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


def test_a_waiting_thread_does_not_hold_up_the_others() -> None:
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
def test_a_forked_child_is_told_to_open_its_own() -> None:
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


def test_a_closed_queue_says_so_and_closes_twice() -> None:
    queue = TaskQueue("memory://")
    with queue:
        pass
    queue.close()

    with pytest.raises(StorageClosed):
        queue.enqueue(sample_tasks.plain)


def test_a_process_that_forgets_to_close_ends_quietly(tmp_path: Path) -> None:
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
