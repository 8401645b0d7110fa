"""The stats of a pool: exact, bounded, and readable from any thread."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from omniq import AsyncTaskQueue, AsyncWorkerPool, PoolStats, TaskFailed, task
from omniq.metrics import Metrics
from omniq.storage.memory import MemoryStorage
from tests.timing import at_most
from tests.worker import sample_tasks
from tests.worker.recorder import RunRecorder, until


@task
async def succeed_or_fail(fails: bool) -> None:
    await asyncio.sleep(random.random() * 0.002)
    if fails:
        raise ValueError("as planned")


@task
async def take(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def test_before_the_start_everything_is_zero(queue: AsyncTaskQueue) -> None:
    assert queue.worker(concurrency=3).stats() == PoolStats(
        workers_count=3,
        active_workers=0,
        queued_tasks=0,
        completed_tasks=0,
        failed_tasks=0,
        average_exec_time=0.0,
    )


async def test_the_stats_of_a_busy_pool_count_what_runs_and_what_waits(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    async with queue.worker(concurrency=2, poll_interval=60) as pool:
        await queue.enqueue_many(sample_tasks.hold, ["held"] * 7)
        await until(lambda: recorder.inside == 2)
        await until(lambda: pool.stats().queued_tasks == 5)
        assert pool.stats().active_workers == 2
        recorder.open_all()
        await until(lambda: pool.stats().completed_tasks == 7)
        await until(lambda: pool.stats().queued_tasks == 0)
        assert pool.stats().active_workers == 0


async def test_submitted_tasks_count_as_queued_at_once() -> None:
    pool = AsyncWorkerPool(MemoryStorage(), concurrency=3)
    for n in range(4):
        await pool.submit(sample_tasks.add, n)
    assert pool.stats().queued_tasks == 4
    await pool.run_until_empty()

    assert pool.stats().completed_tasks == 4


async def test_completed_and_failed_are_exact_under_load(queue: AsyncTaskQueue) -> None:
    calls = [n % 3 == 0 for n in range(300)]
    await queue.options(max_retries=0).enqueue_many(succeed_or_fail, calls)
    pool = queue.worker(concurrency=20)
    await pool.run_until_empty()

    stats = pool.stats()
    assert (stats.completed_tasks, stats.failed_tasks) == (200, 100)
    assert (stats.active_workers, stats.stale_outcomes, stats.retried_runs) == (0, 0, 0)


async def test_a_retried_run_is_not_counted_as_a_failed_task(queue: AsyncTaskQueue) -> None:
    handle = await queue.options(max_retries=2).enqueue(sample_tasks.fail)
    async with queue.worker(base_retry_delay=0.01) as pool:
        with pytest.raises(TaskFailed):
            await handle.result(30)
        await until(lambda: pool.stats().failed_tasks == 1)

    assert (pool.stats().failed_tasks, pool.stats().retried_runs) == (1, 2)


async def test_the_average_is_milliseconds_of_all_runs_good_and_bad(
    memory_queue: AsyncTaskQueue,
) -> None:
    await memory_queue.enqueue_many(take, [0.05] * 4)
    await memory_queue.options(max_retries=0, timeout=0.05).enqueue_many(take, [5.0] * 4)
    pool = memory_queue.worker(concurrency=8)
    await pool.run_until_empty()

    assert 50 <= pool.stats().average_exec_time < at_most(200)


async def test_the_average_is_of_the_newest_hundred_runs(memory_queue: AsyncTaskQueue) -> None:
    await memory_queue.enqueue(take, 0.3)
    await memory_queue.options(priority=-1).enqueue_many(sample_tasks.add, list(range(100)))
    pool = memory_queue.worker()
    await pool.run_until_empty()

    assert pool.stats().average_exec_time < at_most(2.0)


async def test_the_stats_can_be_read_from_another_thread(
    memory_queue: AsyncTaskQueue,
) -> None:
    pool = memory_queue.worker(concurrency=10)
    await memory_queue.enqueue_many(sample_tasks.add, list(range(3000)))
    seen: list[int] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            seen.append(pool.stats().completed_tasks)

    asking = asyncio.create_task(asyncio.to_thread(ask))
    await pool.run_until_empty()
    done.set()
    await asking

    assert seen == sorted(seen)
    assert pool.stats().completed_tasks == 3000


async def test_three_workers_do_ten_trivial_tasks_within_a_tenth_of_a_second(
    recorder: RunRecorder,
) -> None:
    storage = MemoryStorage(max_pending=10)
    async with AsyncWorkerPool(storage, concurrency=3) as pool:
        began = asyncio.get_running_loop().time()
        for n in range(10):
            await pool.submit(sample_tasks.note, f"{n}")
        await until(lambda: pool.stats().completed_tasks == 10)
        assert asyncio.get_running_loop().time() - began < at_most(0.1)

    assert len(recorder.names()) == 10


async def test_metrics_count_by_type_and_keep_no_more_than_a_window(
    memory_queue: AsyncTaskQueue,
) -> None:
    metrics = Metrics(window=5)
    pool = memory_queue.worker(concurrency=2)
    pool.events.subscribe(metrics.observe)
    async with pool:
        for n in range(12):
            await pool.submit(sample_tasks.add, n)
        failed = await memory_queue.options(max_retries=0).enqueue(sample_tasks.fail)
        with pytest.raises(TaskFailed):
            await failed.result(30)
        await until(lambda: pool.stats().completed_tasks == 12)

    numbers = metrics.get_metrics()
    assert set(numbers) == {
        "total_submitted",
        "total_completed",
        "total_failed",
        "queue_high_water",
        "task_durations",
    }
    assert (numbers["total_submitted"], numbers["total_completed"]) == (13, 12)
    assert numbers["total_failed"] == 1
    durations = numbers["task_durations"]["tests.worker.sample_tasks.add"]
    assert durations["count"] == 12
    assert durations["average"] >= 0
    assert "tests.worker.sample_tasks.fail" not in numbers["task_durations"]


def test_metrics_keep_the_highest_queue_and_their_averages_in_milliseconds():
    metrics = Metrics()
    assert metrics.get_metrics()["task_durations"] == {}
    for size in (3, 9, 4):
        metrics.update_queue_size(size)
    metrics.record_submission()
    metrics.record_completion("mail.send", 0.1)
    metrics.record_completion("mail.send", 0.3)
    metrics.record_failure()
    metrics.record_failure("mail.send")

    assert metrics.get_metrics() == {
        "total_submitted": 1,
        "total_completed": 2,
        "total_failed": 2,
        "queue_high_water": 9,
        "task_durations": {"mail.send": {"count": 2, "average": pytest.approx(200.0)}},
    }


def test_metrics_may_be_written_from_many_threads():
    metrics = Metrics()

    def write() -> None:
        for _ in range(2000):
            metrics.record_submission()
            metrics.record_completion("t", 0.001)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    numbers = metrics.get_metrics()
    assert (numbers["total_submitted"], numbers["total_completed"]) == (8000, 8000)


@pytest.mark.deep
@pytest.mark.slow
def test_a_pool_of_three_stays_within_its_memory():
    """In a separate process, compared with the same imports without a pool."""
    script = Path(__file__).parents[2] / "benchmarks" / "pool.py"
    printed = subprocess.run(
        [sys.executable, str(script), "--memory-here", "--tasks", "10000"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    added, grown = (float(number) for number in re.findall(r": ([-\d.]+) MB", printed))

    assert added < 20
    assert grown < 5
