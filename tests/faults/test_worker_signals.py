"""Real workers, real signals: killed, stopped past their lease and resumed (F15 to F17)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
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
LONG = 60.0

pytestmark = pytest.mark.timeout(40)


class Yard:
    """Worker processes on one SQLite file, and what their tasks have written down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder}/tasks.db?durability=os"
        self.workers: list[subprocess.Popen[str]] = []

    def start(self, *, failpoints: str = "") -> subprocess.Popen[str]:
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.worker_process", self.url, str(LEASE)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMNIQ_FAILPOINTS": failpoints},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.workers.append(worker)
        return worker

    async def ready(self, *, failpoints: str = "") -> subprocess.Popen[str]:
        worker = self.start(failpoints=failpoints)
        assert worker.stdout is not None
        assert await asyncio.to_thread(worker.stdout.readline) == "ready\n"
        return worker

    async def end(self, worker: subprocess.Popen[str]) -> dict[str, Any]:
        """Stop a worker politely; what its pool has counted."""
        worker.send_signal(signal.SIGTERM)
        output, _ = await asyncio.to_thread(worker.communicate)
        return dict(json.loads(output.splitlines()[-1]))

    async def begun(self, task_id: str, token: int) -> dict[str, Any]:
        """What the run with that token has written down, once it has."""
        note = self.folder / f"{task_id}.{token}.begun"
        await when(note.exists)
        return note_in(note)

    def runs(self, task_id: str) -> int:
        return len(list(self.folder.glob(f"{task_id}.*.begun")))


def note_in(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


async def when(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.01)


def is_stopped(worker: subprocess.Popen[str]) -> bool:
    state = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(") ")[2][0]
    return state == "T"


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    yard = Yard(tmp_path)
    yield yard
    for worker in yard.workers:
        worker.kill()
        worker.wait()
        if worker.stdout is not None:
            worker.stdout.close()


@pytest.fixture
async def queue(yard: Yard) -> AsyncIterator[AsyncTaskQueue]:
    async with AsyncTaskQueue(yard.url) as queue:
        yield queue


@pytest.mark.fault("F01")
async def test_what_a_killed_worker_ran_is_begun_again_when_its_lease_has_ended(yard, queue):
    first = await yard.ready()
    handle = await queue.enqueue(work, str(yard.folder), LONG)
    begun = await yard.begun(handle.id, 1)
    await yard.ready()
    first.kill()
    killed_at = time.monotonic()
    again = await yard.begun(handle.id, 2)

    assert again["pid"] != begun["pid"]
    assert again["at"] - killed_at <= LEASE + POLL + 0.25
    assert await handle.result(timeout=5) == 2


@pytest.mark.fault("F15")
async def test_a_worker_that_was_stopped_past_its_lease_is_refused_when_it_resumes(yard, queue):
    """F15: the successor's result stands."""
    first = await yard.ready()
    handle = await queue.enqueue(work, str(yard.folder), 0.5)
    await yard.begun(handle.id, 1)
    first.send_signal(signal.SIGSTOP)
    await yard.ready()
    assert await handle.result(timeout=20) == 2
    stopped_until = time.monotonic() + 3 * LEASE
    await when(lambda: time.monotonic() > stopped_until)
    first.send_signal(signal.SIGCONT)
    next_one = await queue.enqueue(work, str(yard.folder), 0)
    await next_one.result(timeout=20)
    await yard.end(first)

    result = await queue.get_result(handle.id)
    assert (result.status, result.result, yard.runs(handle.id)) == (TaskStatus.SUCCESS, 2, 2)


@pytest.mark.fault("F16")
async def test_a_worker_that_was_stopped_while_it_recorded_is_refused_and_counts_it(yard, queue):
    """F16, the sharpest window: the outcome is on its way to the store."""
    handle = await queue.enqueue(work, str(yard.folder), 0.05)
    # The first turn claims the task; the second, with its outcome, is where the process stops.
    first = await yard.ready(failpoints="record_and_claim.before=stop@2")
    await when(lambda: is_stopped(first))
    assert await handle.status() is TaskStatus.RUNNING
    await yard.ready()
    assert await handle.result(timeout=20) == 2
    first.send_signal(signal.SIGCONT)
    counted = await yard.end(first)

    result = await queue.get_result(handle.id)
    assert (result.result, counted["completed_tasks"], counted["stale_outcomes"]) == (2, 0, 1)


@pytest.mark.fault("F17")
async def test_a_worker_that_was_stopped_while_it_claimed_does_not_begin_the_task(yard, queue):
    """F17: the claim is written, and its reply is read when the lease has run out."""
    handle = await queue.enqueue(work, str(yard.folder), LONG)
    first = yard.start(failpoints="record_and_claim.after=stop@1")
    await when(lambda: is_stopped(first))
    assert await handle.status() is TaskStatus.RUNNING
    second = await yard.ready()
    begun = await yard.begun(handle.id, 2)
    first.send_signal(signal.SIGCONT)
    assert await handle.result(timeout=20) == 2
    next_one = await queue.enqueue(work, str(yard.folder), 0)
    await next_one.result(timeout=20)
    await yard.end(first)

    assert (begun["pid"], yard.runs(handle.id)) == (second.pid, 1)


@pytest.mark.fault("F08")
async def test_a_worker_told_to_end_gives_its_task_back_uncharged(yard, queue):
    first = await yard.ready()
    handle = await queue.enqueue(work, str(yard.folder), LONG)
    await yard.begun(handle.id, 1)
    await yard.end(first)
    task = await queue.get_task(handle.id)

    assert (task.status, task.attempts) == (TaskStatus.PENDING, 0)
    await yard.ready()
    assert await handle.result(timeout=5) == 2
