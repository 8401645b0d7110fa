"""Workers are killed between the record of a dead letter and the end of its hook: it is called all the same."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omniq import AsyncTaskQueue, failpoints
from tests.faults import hook_worker
from tests.faults.shared_stores import SHARED, url_of

LEASE = 0.6
LONGEST_WAIT = 30.0

pytestmark = pytest.mark.deep_on("file")


class Workers:
    """Starts worker processes on one store, with failpoints, and kills them at the end."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.processes: list[subprocess.Popen[str]] = []

    async def start(self, points: str = "", allowed: str = "") -> subprocess.Popen[str]:
        return await asyncio.to_thread(self._start, points, [allowed] if allowed else [])

    def _start(self, points: str, arguments: list[str]) -> subprocess.Popen[str]:
        module = "tests.faults.hook_worker"
        process = subprocess.Popen(
            [sys.executable, "-m", module, self._url, str(LEASE), *arguments],
            cwd=Path(__file__).parents[2],
            env={**os.environ, failpoints.VARIABLE: points},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture(params=SHARED)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(request.param, tmp_path, request)


@pytest.fixture
def workers(url: str) -> Iterator[Workers]:
    workers = Workers(url)
    yield workers
    workers.close()


@pytest.fixture
async def queue(url: str) -> AsyncIterator[AsyncTaskQueue]:
    async with AsyncTaskQueue(url) as queue:
        yield queue


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    folder = tmp_path / "calls"
    folder.mkdir()
    return folder


async def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONGEST_WAIT
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def until_dead(queue: AsyncTaskQueue, task_id: str) -> None:
    deadline = time.monotonic() + LONGEST_WAIT
    while await queue.dead.get(task_id) is None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def until_done(queue: AsyncTaskQueue, task_id: str) -> None:
    """Wait until the hook of the dead letter is no longer pending."""
    deadline = time.monotonic() + LONGEST_WAIT
    while await queue.storage.pending_hook(task_id) is not None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def pids_of(calls: Path, task_id: str) -> list[int]:
    return [int(path.name.split(".")[1]) for path in calls.glob(f"{task_id}.*")]


@pytest.mark.fault("F02")
async def test_a_hook_is_called_by_another_worker_if_its_own_was_killed_before(
    queue, workers, calls
):
    first = await workers.start("hook.before=kill")
    handle = await queue.enqueue(hook_worker.fail, str(calls))
    await asyncio.to_thread(first.wait)

    assert await queue.dead.get(handle.id) is not None
    pending = await queue.storage.pending_hook(handle.id)
    assert pending is not None
    assert pids_of(calls, handle.id) == []

    second = await workers.start()
    await until(lambda: pids_of(calls, handle.id))
    await until_done(queue, handle.id)
    assert pids_of(calls, handle.id) == [second.pid]


@pytest.mark.fault("F02")
async def test_a_hook_is_called_if_its_worker_was_killed_as_soon_as_the_death_was_recorded(
    queue, workers, calls
):
    first = await workers.start()
    handle = await queue.enqueue(hook_worker.fail_and_kill_at_the_next_record, str(calls))
    await asyncio.to_thread(first.wait)
    assert pids_of(calls, handle.id) == []

    second = await workers.start()
    await until(lambda: pids_of(calls, handle.id))
    await until_done(queue, handle.id)
    assert pids_of(calls, handle.id) == [second.pid]


@pytest.mark.fault("F02")
async def test_a_hook_is_called_again_if_its_worker_was_killed_before_that_was_recorded(
    queue, workers, calls
):
    first = await workers.start("hook.after=kill")
    handle = await queue.enqueue(hook_worker.fail, str(calls))
    await asyncio.to_thread(first.wait)
    assert pids_of(calls, handle.id) == [first.pid]

    second = await workers.start()
    await until_done(queue, handle.id)
    assert sorted(pids_of(calls, handle.id)) == sorted([first.pid, second.pid])


@pytest.mark.fault("F27")
async def test_a_hook_is_called_for_a_task_that_killed_its_worker_and_that_which_recovered_it(
    queue, workers, calls
):
    first = await workers.start()
    handle = await queue.enqueue(hook_worker.crash, str(calls))
    await asyncio.to_thread(first.wait)
    second = await workers.start("recover.after=kill")
    await asyncio.to_thread(second.wait)

    third = await workers.start()
    await until(lambda: pids_of(calls, handle.id))
    await until_done(queue, handle.id)
    assert pids_of(calls, handle.id) == [third.pid]
    assert [path.suffix for path in calls.iterdir()] == [".WorkerLost"]


async def test_a_worker_without_the_function_leaves_the_hook_to_one_that_has_it(
    queue, workers, calls
):
    first = await workers.start()
    crashed = await queue.enqueue(hook_worker.crash, str(calls))
    await asyncio.to_thread(first.wait)
    await workers.start(allowed="tests.faults.hook_worker.other")
    await until_dead(queue, crashed.id)
    await asyncio.sleep(2 * LEASE)
    pending = await queue.storage.pending_hook(crashed.id)
    assert pending is not None
    assert pending.owner == ""
    assert pids_of(calls, crashed.id) == []

    third = await workers.start()
    await until(lambda: pids_of(calls, crashed.id))
    await until_done(queue, crashed.id)
    assert pids_of(calls, crashed.id) == [third.pid]


async def test_a_task_without_a_hook_leaves_nothing_behind(queue, workers, calls):
    first = await workers.start()
    handle = await queue.enqueue(hook_worker.crash_without_a_hook, str(calls))
    await asyncio.to_thread(first.wait)
    await workers.start()
    await until_dead(queue, handle.id)

    assert await queue.storage.pending_hook(handle.id) is None
    assert await queue.storage.pending_hooks() == ([], "")
