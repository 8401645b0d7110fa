"""Tasks in processes that hold locks, use up memory, or enqueue endlessly."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest

from omniq import AsyncTaskQueue, Settings
from omniq.errors import SettingsError
from omniq.models import TaskStatus
from tests.acceptance.command import wait_until
from tests.faults import fault_tasks
from tests.timing import at_most

CGROUP = Path("/sys/fs/cgroup/memory")
LONELY_USER = 59_482


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.fault("F19")
async def test_a_task_that_holds_the_interpreter_lock_past_its_lease_runs_once(tmp_path):
    # On a busy machine the lease is longer: the worker has to get a processor in time to renew it.
    lease = min(at_most(1.0), 5.0)
    settings = Settings(lease=lease, poll_interval=0.1, durability="os", base_retry_delay=0.0)
    url, runs = f"sqlite:///{tmp_path}/store.db", tmp_path / "runs"
    async with (
        AsyncTaskQueue(url, settings=settings) as queue,
        AsyncTaskQueue(url, settings=settings) as other,
    ):
        handle = await queue.enqueue(fault_tasks.hold_the_interpreter, 3 * lease, str(runs))
        async with queue.worker(), other.worker():
            result = await handle.result(timeout=50)
        task = await queue.get_task(handle.id)

    assert result == "done"
    assert task is not None
    assert (task.token, task.crashes) == (1, 0)
    assert runs.read_text() == "1\n"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.fault("F13")
async def test_children_that_start_while_a_thread_holds_a_lock_do_not_inherit_it(tmp_path):
    ready, until = tmp_path / "ready", tmp_path / "until"
    async with AsyncTaskQueue("memory://") as queue, queue.worker(concurrency=3):
        holding = await queue.enqueue(fault_tasks.hold_a_lock, str(ready), str(until))
        await asyncio.to_thread(wait_until, ready.exists)
        handles = [await queue.enqueue(fault_tasks.take_the_lock, n) for n in range(10)]
        taken = [await handle.result(timeout=40) for handle in handles]
        held_throughout = (await holding.status()) is TaskStatus.RUNNING
        until.touch()
        await holding.result(timeout=30)

    assert held_throughout
    assert taken == list(range(10))


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A control group with little memory."""
    group = CGROUP / f"omniq-{uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(400 << 20))
    except OSError as error:
        pytest.skip(f"no memory control group here: {error}")
    yield group
    with suppress(OSError):
        group.rmdir()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.fault("F05")
def test_a_child_that_runs_out_of_memory_becomes_a_dead_letter_and_affects_no_other_task(
    small_memory,
):
    """In a process of its own: this one may be larger than the task by now, and the kernel would kill it."""
    command = [sys.executable, "-m", "tests.faults.memory_worker", str(small_memory)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    report = json.loads(ended.stdout)

    assert report["fine"] == [1 << 20] * 3
    error_type, message = report["error"]
    assert "signal 9 (SIGKILL)" in message or error_type == "MemoryError"
    assert report["attempts"] == 2
    assert report["is_dead"]


@pytest.mark.fault("F82")
@pytest.mark.parametrize(
    ("limits", "func", "modest", "greedy", "error"),
    [
        ({"child_memory_limit": 2 << 30}, fault_tasks.reserve_memory, 10, 2_000, "MemoryError"),
        ({"child_file_limit": 64}, fault_tasks.open_files, 10, 100, "OSError"),
    ],
    ids=["memory", "files"],
)
async def test_a_task_in_a_child_gets_no_more_than_the_limits(limits, func, modest, greedy, error):
    settings = Settings(**limits)
    async with AsyncTaskQueue("memory://", settings=settings) as queue, queue.worker(concurrency=2):
        too_much = await queue.enqueue(func, greedy)
        fine = await queue.enqueue(func, modest)
        failed = await queue.get_result(too_much.id, timeout=40)
        result = await fine.result(timeout=30)

    assert result in (modest, modest << 20)
    assert failed is not None
    assert failed.error is not None
    assert failed.error.error_type == error


@pytest.mark.fault("F82")
def test_a_process_that_starts_others_endlessly_ends_at_the_limit():
    if os.getuid() != 0:
        pytest.skip("only root can become a user that has no other processes")
    command = [sys.executable, "-m", "tests.faults.limited_process", str(LONELY_USER), "40"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50)

    assert ended.stdout == "started 20, then BlockingIOError"


async def test_a_limit_of_processes_is_refused_for_root():
    if os.getuid() != 0:
        pytest.skip("only root is refused")
    queue = AsyncTaskQueue("memory://", settings=Settings(child_process_limit=100))
    async with queue:
        with pytest.raises(SettingsError, match="run the worker as another user"):
            await queue.worker().start()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.fault("F83")
async def test_a_task_that_enqueues_itself_endlessly_is_bounded_and_other_tasks_run(tmp_path):
    url = f"sqlite:///{tmp_path}/store.db?durability=os&max_pending=20"
    async with AsyncTaskQueue(url) as queue:
        await queue.enqueue(fault_tasks.multiply, url)
        async with queue.worker(concurrency=2):
            while not (letters := await queue.dead.list(1)):
                await queue.storage.wait_for_work(0.05)
            waiting = await queue.storage.count_waiting()
            done = (await queue.stats()).by_status[TaskStatus.SUCCESS]

    assert waiting <= 20
    assert done > 0
    assert "queue full" in letters[0].error_details
