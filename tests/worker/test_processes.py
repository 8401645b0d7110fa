"""Tasks in child processes: when one dies, one attempt fails, and no process or file is leaked."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from omniq import AsyncTaskQueue, TaskCancelled, TaskFailed, TaskStatus
from tests.worker import hostile_tasks as tasks
from tests.worker.recorder import until
from tests.worker.test_timeouts import is_gone

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def queue(memory_queue: AsyncTaskQueue):
    """A queue with a worker that has two slots."""
    async with memory_queue.worker(concurrency=2):
        yield memory_queue


async def run(queue: AsyncTaskQueue, func: Any, *args: Any) -> Any:
    return await (await queue.enqueue(func, *args)).result(timeout=20)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("exit", "exit code 7"),
        ("kill", "signal 9 (SIGKILL)"),
        ("segfault", "signal 11 (SIGSEGV)"),
        ("abort", "signal 6 (SIGABRT)"),
        ("closes its files", "signal 9 (SIGKILL)"),
    ],
)
@pytest.mark.fault("F04")
async def test_a_child_process_that_dies_fails_one_attempt_and_its_error_says_how_it_ended(
    queue, tmp_path, how, cause
):
    sibling = await queue.enqueue(tasks.reports, str(tmp_path / "go"))
    handle = await queue.enqueue(tasks.dies, how)
    result = await queue.get_result(handle.id, timeout=20)
    (tmp_path / "go").touch()

    assert result.error.message == f"worker_process_died: {cause}"
    assert (result.error.error_type, result.attempts) == ("WorkerProcessDied", 1)
    assert await sibling.result(timeout=20) is None
    assert await run(queue, tasks.good_in_a_process, 5) == 5


async def test_a_child_that_dies_between_two_tasks_fails_no_task(queue):
    first = await run(queue, tasks.pid)
    os.kill(first, signal.SIGKILL)
    handle = await queue.enqueue(tasks.pid)
    result = await queue.get_result(handle.id, timeout=20)

    assert (result.status, result.attempts) == (TaskStatus.SUCCESS, 1)
    assert result.result != first


@pytest.mark.fault("F14")
async def test_many_tasks_and_deaths_leave_no_zombie_and_no_open_file(queue):
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    await run(queue, tasks.good_in_a_process, 0)
    await run(queue, tasks.good_in_a_process, 0)
    before = open_files()
    handles = await queue.enqueue_many(tasks.good_in_a_process, range(200))
    assert [await handle.result(timeout=20) for handle in handles] == list(range(200))
    for _ in range(4):
        with pytest.raises(TaskFailed, match="worker_process_died"):
            await run(queue, tasks.dies, "exit")

    # Two children at most, each with a socket and a pipe; none for a child that has died.
    assert open_files() <= before + 2
    await until(lambda: not zombies())


async def test_stopping_the_pool_ends_the_children(memory_queue):
    async with memory_queue.worker():
        child = await run(memory_queue, tasks.pid)
        assert not is_gone(child)

    assert is_gone(child)
    assert not zombies()


@pytest.mark.fault("F84")
async def test_the_output_of_a_task_in_a_child_is_visible(queue, capfd):
    await run(queue, tasks.talks)

    assert capfd.readouterr() == ("said by a child\n", "complained by a child\n")


async def test_a_task_does_not_see_the_keys_of_the_store(queue, monkeypatch):
    monkeypatch.setenv("OMNIQ_URL", "postgresql://me:hidden-word@db/x")
    monkeypatch.setenv("OMNIQ_SIGNING_KEY", "hidden-word")
    monkeypatch.setenv("COLOUR", "green")
    environment = await run(queue, tasks.environment)

    assert "hidden-word" not in str(environment)
    assert environment["COLOUR"] == "green"
    assert environment.get("PYTHONPATH") == os.environ.get("PYTHONPATH")


async def test_a_task_can_terminate_processes_it_has_started(queue):
    assert await run(queue, tasks.terminates_its_own_process) == -signal.SIGTERM


async def test_a_child_leaves_sigint_and_sigterm_to_the_worker(memory_queue, tmp_path):
    async with memory_queue.worker() as pool:
        child = await run(memory_queue, tasks.pid)
        handle = await memory_queue.enqueue(tasks.reports, str(tmp_path / "go"))
        await until(lambda: pool.stats().active_workers == 1)
        os.kill(child, signal.SIGTERM)
        os.kill(child, signal.SIGINT)
        (tmp_path / "go").touch()

        assert await handle.result(timeout=20) is None


async def test_a_child_knows_its_task(queue):
    handle = await queue.options(metadata={"who": "me"}).enqueue(tasks.knows_its_task)
    task = await queue.get_task(handle.id)
    facts = await handle.result(timeout=20)

    assert facts["task_id"] == handle.id
    assert (facts["attempt"], facts["token"], facts["metadata"]) == (1, 1, {"who": "me"})
    # The default of the settings: the task has no timeout.
    assert task.timeout is None
    assert facts["deadline"] - task.created_at >= timedelta(seconds=300)


async def test_progress_of_a_child_process_is_stored(queue, tmp_path):
    handle = await queue.enqueue(tasks.reports, str(tmp_path / "go"))
    while (progress := await handle.progress()) is None:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.01)
    (tmp_path / "go").touch()
    await handle.result(timeout=20)

    assert (progress.fraction, progress.message) == (0.5, "half \\udcff")


@pytest.mark.parametrize(("kind", "attempt"), [("retry", 2), ("snooze", 1)])
async def test_control_exceptions_work_in_a_child_process(queue, kind, attempt):
    assert await run(queue, tasks.signals, kind) == attempt


async def test_an_error_in_a_child_keeps_its_type_category_hint_and_traceback(queue):
    handle = await queue.enqueue(tasks.signals, "permanent")
    with pytest.raises(TaskFailed) as caught:
        await handle.result(timeout=20)

    error = caught.value.error
    assert error is not None
    assert (error.error_type, error.category, error.recovery_hint) == (
        "PermanentError",
        "permanent",
        "give up",
    )
    assert "hostile_tasks.py" in error.traceback


async def test_cancelling_a_running_task_kills_its_process(queue, tmp_path):
    pids = tmp_path / "pids"
    handle = await queue.enqueue(tasks.hangs, str(pids))
    await until(pids.exists, patience=20)
    await handle.cancel()

    with pytest.raises(TaskCancelled):
        await handle.result(timeout=30)
    await until(lambda: all(is_gone(int(pid)) for pid in pids.read_text().split()))


@pytest.mark.fault("F81")
async def test_a_thread_that_a_task_left_running_does_not_affect_other_tasks(memory_queue):
    async with memory_queue.worker(concurrency=1):
        child = await run(memory_queue, tasks.leaves_a_thread_behind)

        assert await run(memory_queue, tasks.pid) == child
    assert is_gone(child)


async def test_a_payload_of_the_largest_size_crosses(queue):
    # A claimed task is slightly larger than it was when its size was checked.
    largest = 1024 * 1024 - 400
    handle = await queue.enqueue(tasks.good_in_a_process, "x" * largest)

    assert len(await handle.result(timeout=20)) == largest


SCRIPT = """
import asyncio, os, sys
from omniq import AsyncTaskQueue, task

@task(executor="process")
def where():
    return [__name__, os.getppid()]

async def main():
    async with AsyncTaskQueue("memory://") as queue, queue.worker():
        print(os.getpid(), await (await queue.enqueue(where)).result(timeout=20))

if __name__ == "__main__":
    asyncio.run(main())
"""


async def test_a_function_of_the_running_script_runs_in_a_process(tmp_path):
    script = tmp_path / "a_script.py"
    script.write_text(SCRIPT)
    process = await asyncio.create_subprocess_exec(
        sys.executable, script, stdout=subprocess.PIPE, cwd=tmp_path
    )
    output, _ = await process.communicate()

    pid = output.split()[0].decode()
    assert output.decode() == f"{pid} ['a_script', {pid}]\n"


PARENT = """
import asyncio, sys
from omniq import AsyncTaskQueue
from tests.worker import hostile_tasks

async def main():
    async with AsyncTaskQueue("memory://") as queue, queue.worker():
        await (await queue.enqueue(hostile_tasks.hangs, sys.argv[1])).result()

asyncio.run(main())
"""


@pytest.mark.fault("F12")
async def test_a_child_never_outlives_its_parent(tmp_path):
    pids = tmp_path / "pids"
    parent = start_parent(pids)
    try:
        await until(pids.exists, patience=20)
    finally:
        parent.kill()
        parent.wait()

    child, grandchild = map(int, pids.read_text().split())
    await until(lambda: is_gone(child) and is_gone(grandchild), patience=3)


def start_parent(pids: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PARENT, pids], cwd=Path(__file__).parents[2])


def zombies() -> list[str]:
    """The children of this process that have ended and were not reaped."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = entry.read_text().rpartition(") ")[2].split()[:2]
        except OSError:
            continue
        if state == "Z" and int(parent) == os.getpid():
            found.append(entry.parent.name)
    return found
