"""Limits are exact across processes, also while workers are killed and replaced."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from omniq import AsyncTaskQueue
from tests.faults.limited_worker import AT_ONCE, RATE, Run, runs_in, work
from tests.faults.limits import most_at_once, most_within
from tests.faults.shared_stores import SHARED, url_of

WORKERS = 3


class Fleet:
    """Worker processes, and when each of them was killed."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.workers: list[subprocess.Popen[str]] = []
        self.killed: dict[int, float] = {}

    def start(self) -> None:
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.limited_worker", self.url],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.workers.append(worker)

    def kill(self, worker: subprocess.Popen[str]) -> None:
        self.workers.remove(worker)
        worker.kill()
        worker.wait()
        self.killed[worker.pid] = time.monotonic()
        if worker.stdout is not None:
            worker.stdout.close()


@pytest.fixture(params=SHARED)
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(url_of(request.param, tmp_path, request))
    yield fleet
    for worker in list(fleet.workers):
        fleet.kill(worker)


async def wait_until(condition: Callable[[], bool], patience: float = 150) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        await asyncio.sleep(0.005)


def interrupt_one(fleet: Fleet, folder: Path) -> bool:
    """Kill a worker in the middle of a run; returns False if none is running a task."""
    for worker in list(fleet.workers):
        # Paused before the check: a run that is unfinished then cannot finish before the kill.
        worker.send_signal(signal.SIGSTOP)
        if any(run.ended is None and run.pid == worker.pid for run in runs_in(folder)):
            fleet.kill(worker)
            return True
        worker.send_signal(signal.SIGCONT)
    return False


async def wait_until_started(folder: Path, count: int) -> None:
    await wait_until(lambda: sum(1 for _ in runs_in(folder)) >= count)


async def run_all(fleet: Fleet, folder: Path, tasks: int, kills: int) -> list[Run]:
    """Run that many tasks, kill that many workers during a run, and return all runs."""
    async with AsyncTaskQueue(fleet.url) as queue:
        calls = [(work, (str(folder), number)) for number in range(tasks)]
        handles = await queue.enqueue_many(calls)
        for _ in range(WORKERS):
            fleet.start()
        for number in range(1, kills + 1):
            await wait_until_started(folder, tasks * number // (kills + 2))
            await wait_until(lambda: interrupt_one(fleet, folder))
            fleet.start()
        values = [await handle.result(timeout=150) for handle in handles]
    assert values == list(range(tasks))
    return list(runs_in(folder))


def check(fleet: Fleet, runs: list[Run], tasks: int) -> None:
    # A run without an end ended with its process.
    spans = [(run.began, run.ended or fleet.killed[run.pid]) for run in runs]
    starts = sorted(run.claimed for run in runs)

    assert len({run.task_id for run in runs}) == tasks
    assert any(run.ended is None for run in runs)
    assert most_at_once(spans) <= AT_ONCE
    assert most_within(starts, timedelta(seconds=1)) <= RATE
    # The limit was reached, so slowness is not what bounded the runs.
    assert most_at_once(spans) == AT_ONCE


@pytest.mark.deep_on("file")
@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_limits_are_exact_while_a_worker_is_killed(fleet, tmp_path):
    runs = await run_all(fleet, tmp_path, tasks=120, kills=1)

    check(fleet, runs, 120)


@pytest.mark.deep
@pytest.mark.timeout(600)
async def test_limits_are_exact_for_a_thousand_tasks_while_workers_are_killed(fleet, tmp_path):
    runs = await run_all(fleet, tmp_path, tasks=1000, kills=6)

    check(fleet, runs, 1000)
