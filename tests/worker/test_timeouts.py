"""A timeout stops async code and processes; a thread is abandoned and counted (F78)."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from omniq import TaskFailed, TaskStatus
from omniq.events import Event, WorkerRecycling
from tests.timing import at_most
from tests.worker import hostile_tasks as tasks
from tests.worker.recorder import until


@pytest.fixture(autouse=True)
def gate():
    """Closed when a test starts; the tasks it held continue at the end."""
    tasks.gate.clear()
    tasks.seen.clear()
    yield tasks.gate
    tasks.gate.set()


def is_gone(pid: int) -> bool:
    """Whether the process has ended. One that was not reaped yet counts."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


@pytest.mark.fault("F78")
async def test_an_async_task_is_stopped_at_its_timeout(memory_queue):
    async with memory_queue.worker():
        handle = await memory_queue.options(timeout=0.05, max_retries=0).enqueue(
            tasks.waits_for_cancel
        )
        with pytest.raises(TaskFailed, match=r"TaskTimeout: the task was stopped after 0\.\d+ s"):
            await handle.result(timeout=30)

    assert tasks.stopped.is_set()


@pytest.mark.timeout(120)
@pytest.mark.fault("F78")
async def test_a_process_and_what_it_has_started_are_killed_at_the_timeout(memory_queue, tmp_path):
    pids = tmp_path / "pids"
    async with memory_queue.worker():
        handle = await memory_queue.options(timeout=2, max_retries=0).enqueue(
            tasks.hangs, str(pids)
        )
        with pytest.raises(TaskFailed, match="TaskTimeout"):
            await handle.result(timeout=20)
        child, grandchild = map(int, pids.read_text().split())
        await until(lambda: is_gone(child) and is_gone(grandchild))


async def test_the_start_of_a_child_counts_towards_the_timeout(memory_queue):
    async with memory_queue.worker():
        handle = await memory_queue.options(timeout=0.01, max_retries=0).enqueue(tasks.pid)
        with pytest.raises(TaskFailed, match="TaskTimeout"):
            await handle.result(timeout=30)


async def test_a_thread_past_its_timeout_frees_its_slot_at_once_and_is_counted(memory_queue, gate):
    async with memory_queue.worker(concurrency=1, max_leaked_threads=2) as pool:
        hung = await memory_queue.options(timeout=0.05, max_retries=0).enqueue(
            tasks.holds_its_thread
        )
        with pytest.raises(TaskFailed, match="TaskTimeout"):
            await hung.result(timeout=30)
        next_one = await memory_queue.enqueue(tasks.good_in_a_thread, 7)

        assert await next_one.result(timeout=30) == 7
        assert pool.stats().leaked_threads == 1
        gate.set()
        await until(lambda: pool.stats().leaked_threads == 0)

    assert (hung.id, True) in tasks.seen


async def test_an_abandoned_thread_ends_with_its_call(memory_queue, gate):
    async with memory_queue.worker(concurrency=1):
        hung = await memory_queue.options(timeout=0.05, max_retries=0).enqueue(
            tasks.holds_its_thread
        )
        await memory_queue.get_result(hung.id, timeout=30)
        thread = [each for each in threading.enumerate() if each.name == "omniq-task"][-1]
        gate.set()

        await until(lambda: not thread.is_alive())


@pytest.mark.fault("F78")
async def test_after_too_many_leaked_threads_the_worker_requests_a_replacement_and_stops_claiming(
    memory_queue, gate
):
    emitted: list[Event] = []
    async with memory_queue.worker(concurrency=2, poll_interval=0.05) as pool:
        pool.events.subscribe(emitted.append)
        for _ in range(2):
            assert not pool.recycle_requested
            hung = await memory_queue.options(timeout=0.05, max_retries=0).enqueue(
                tasks.holds_its_thread
            )
            await memory_queue.get_result(hung.id, timeout=30)
        waiting = await memory_queue.enqueue(tasks.good_in_the_loop, 1)

        assert pool.recycle_requested
        assert [
            event.leaked_threads for event in emitted if isinstance(event, WorkerRecycling)
        ] == [2]
        assert await memory_queue.get_result(waiting.id, timeout=0.2) is None
        assert await waiting.status() is TaskStatus.PENDING
        gate.set()
        assert await waiting.result(timeout=30) == 1
        assert not pool.recycle_requested


async def test_a_worker_that_requests_a_replacement_stops_although_tasks_wait(memory_queue):
    async with memory_queue.worker(concurrency=1) as pool:
        hung = await memory_queue.options(timeout=0.05, max_retries=0).enqueue(
            tasks.holds_its_thread
        )
        await memory_queue.get_result(hung.id, timeout=30)
        waiting = await memory_queue.enqueue(tasks.good_in_the_loop, 1)
        await asyncio.wait_for(pool.stop(), at_most(2.0))

    assert await waiting.status() is TaskStatus.PENDING


async def test_threads_are_reused_for_the_next_call(memory_queue):
    before = threading.active_count()
    async with memory_queue.worker(concurrency=3):
        handles = await memory_queue.enqueue_many(tasks.good_in_a_thread, range(300))
        assert [await handle.result(timeout=30) for handle in handles] == list(range(300))
        during = threading.active_count()

    # The heartbeat, and one thread per slot.
    assert during - before <= 1 + 3
    await until(lambda: threading.active_count() <= before)
