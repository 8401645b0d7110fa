"""Real workers that are killed, or paused past their lease and resumed, by signals (F15 to F17)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from omniq import AsyncTaskQueue, TaskStatus
from tests.faults.worker_process import POLL, work

LEASE = 1.0
"""Seconds. For a worker whose lease is to expire."""

STEADY_LEASE = 3.0
"""Seconds. For a worker that must not lose its lease, however busy the machine is."""

RENEWAL_AGE = 0.5
LONG = 60.0

pytestmark = pytest.mark.timeout(120)


class WorkerProcesses:
    """Worker processes on one SQLite file, and the records that their tasks write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder}/tasks.db?durability=os"
        self.workers: list[subprocess.Popen[str]] = []

    def start(self, lease: float, *, failpoints: str = "") -> subprocess.Popen[str]:
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.worker_process", self.url, str(lease)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMNIQ_FAILPOINTS": failpoints},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.workers.append(worker)
        return worker

    async def ready(self, lease: float, *, failpoints: str = "") -> subprocess.Popen[str]:
        worker = self.start(lease, failpoints=failpoints)
        assert worker.stdout is not None
        assert await asyncio.to_thread(worker.stdout.readline) == "ready\n"
        return worker

    async def paused(self, queue: AsyncTaskQueue, seconds: float, at: str) -> tuple[Any, Any]:
        """A worker that has stopped itself at that place, and the handle of its task.

        Another thread of it may be writing at that instant, and a stopped process holds its locks. Then nobody
        can write before it goes on: it is killed, and the next one tries.
        """
        while True:
            handle = await queue.enqueue(work, str(self.folder), seconds)
            worker = self.start(LEASE, failpoints=at)
            await wait_until(lambda worker=worker: is_stopped(worker))
            if not self.is_locked():
                return worker, handle
            worker.kill()
            await asyncio.to_thread(worker.wait)
            await handle.cancel()

    async def pause(self, worker: subprocess.Popen[str]) -> None:
        """Stop a worker while it holds no lock of the database."""
        worker.send_signal(signal.SIGSTOP)
        while self.is_locked():
            worker.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.02)
            worker.send_signal(signal.SIGSTOP)

    def is_locked(self) -> bool:
        database = sqlite3.connect(self.folder / "tasks.db", timeout=1.0, isolation_level=None)
        try:
            database.execute("BEGIN IMMEDIATE")
            database.execute("ROLLBACK")
        except sqlite3.OperationalError:
            return True
        finally:
            database.close()
        return False

    async def end(self, worker: subprocess.Popen[str]) -> dict[str, Any]:
        """Stop a worker with SIGTERM and return the statistics of its pool."""
        worker.send_signal(signal.SIGTERM)
        output, _ = await asyncio.to_thread(worker.communicate)
        return dict(json.loads(output.splitlines()[-1]))

    async def started(self, task_id: str, token: int) -> dict[str, Any]:
        """Wait until the run with that token has started, and return its record."""
        note = self.folder / f"{task_id}.{token}.started"
        await wait_until(note.exists)
        return read_note(note)

    def runs(self, task_id: str) -> int:
        return len(list(self.folder.glob(f"{task_id}.*.started")))


def read_note(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


async def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        await asyncio.sleep(0.01)


async def wait_until_renewal_is_old(queue: AsyncTaskQueue, pid: int) -> None:
    deadline = time.monotonic() + 20
    age = 0.0
    while age < RENEWAL_AGE:
        assert time.monotonic() < deadline, "the worker never waited that long between renewals"
        (worker,) = [worker for worker in await queue.workers() if worker.pid == pid]
        age = (queue.storage.clock.now() - worker.last_heartbeat).total_seconds()
        await asyncio.sleep(0.01)


def is_stopped(worker: subprocess.Popen[str]) -> bool:
    state = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(") ")[2][0]
    return state == "T"


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[WorkerProcesses]:
    processes = WorkerProcesses(tmp_path)
    yield processes
    for worker in processes.workers:
        worker.kill()
        worker.wait()
        if worker.stdout is not None:
            worker.stdout.close()


@pytest.fixture
async def queue(processes: WorkerProcesses) -> AsyncIterator[AsyncTaskQueue]:
    async with AsyncTaskQueue(processes.url) as queue:
        yield queue


@pytest.mark.fault("F01")
async def test_the_task_of_a_killed_worker_runs_again_when_the_lease_has_expired(processes, queue):
    first = await processes.ready(STEADY_LEASE)
    handle = await queue.enqueue(work, str(processes.folder), LONG)
    started = await processes.started(handle.id, 1)
    await processes.ready(STEADY_LEASE)
    # Some time after its last renewal: a busy machine has that long to start the task again.
    await wait_until_renewal_is_old(queue, first.pid)
    first.kill()
    killed_at = time.monotonic()
    again = await processes.started(handle.id, 2)

    assert again["pid"] != started["pid"]
    assert again["at"] - killed_at <= STEADY_LEASE + POLL + 0.25
    assert await handle.result(timeout=30) == 2


@pytest.mark.fault("F15")
async def test_the_outcome_of_a_worker_paused_past_its_lease_is_refused(processes, queue):
    """F15: the result of the later worker is the stored one."""
    first = await processes.ready(LEASE)
    handle = await queue.enqueue(work, str(processes.folder), 2.0)
    await processes.started(handle.id, 1)
    await processes.pause(first)
    await processes.ready(STEADY_LEASE)
    assert await handle.result(timeout=20) == 2
    stopped_until = time.monotonic() + 3 * LEASE
    await wait_until(lambda: time.monotonic() > stopped_until)
    first.send_signal(signal.SIGCONT)
    next_one = await queue.enqueue(work, str(processes.folder), 0)
    await next_one.result(timeout=20)
    await processes.end(first)

    result = await queue.get_result(handle.id)
    assert (result.status, result.result, processes.runs(handle.id)) == (TaskStatus.SUCCESS, 2, 2)


@pytest.mark.fault("F16")
async def test_an_outcome_paused_while_it_is_recorded_is_refused_and_counted(processes, queue):
    """F16, the shortest window: the outcome is on its way to the store."""
    # The first round trip claims the task; the process pauses at the second, which records.
    first, handle = await processes.paused(queue, 0.05, "record_and_claim.before=stop@2")
    assert await handle.status() is TaskStatus.RUNNING
    await processes.ready(STEADY_LEASE)
    assert await handle.result(timeout=20) == 2
    first.send_signal(signal.SIGCONT)
    counted = await processes.end(first)

    result = await queue.get_result(handle.id)
    assert (result.result, counted["completed_tasks"], counted["stale_outcomes"]) == (2, 0, 1)


@pytest.mark.fault("F17")
async def test_a_worker_paused_while_it_claims_does_not_start_the_task(processes, queue):
    """F17: the claim is stored, and the worker reads the reply when the lease has expired."""
    first, handle = await processes.paused(queue, LONG, "record_and_claim.after=stop@1")
    assert await handle.status() is TaskStatus.RUNNING
    second = await processes.ready(STEADY_LEASE)
    started = await processes.started(handle.id, 2)
    first.send_signal(signal.SIGCONT)
    assert await handle.result(timeout=20) == 2
    next_one = await queue.enqueue(work, str(processes.folder), 0)
    await next_one.result(timeout=20)
    await processes.end(first)

    assert (started["pid"], processes.runs(handle.id)) == (second.pid, 1)


@pytest.mark.fault("F08")
async def test_a_worker_that_receives_sigterm_releases_its_task_without_spending_an_attempt(
    processes, queue
):
    first = await processes.ready(STEADY_LEASE)
    handle = await queue.enqueue(work, str(processes.folder), LONG)
    await processes.started(handle.id, 1)
    await processes.end(first)
    task = await queue.get_task(handle.id)

    assert (task.status, task.attempts) == (TaskStatus.PENDING, 0)
    await processes.ready(STEADY_LEASE)
    assert await handle.result(timeout=30) == 2
