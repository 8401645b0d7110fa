"""A task of five steps whose worker is killed at random times: completed steps are not repeated (I16)."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from omniq import AsyncTaskQueue, TaskStatus
from tests.faults.shared_stores import SHARED, url_of
from tests.faults.step_worker import STEPS, five_steps

LEASE = 0.6
QUEUES = 4
LATEST_KILL = 0.3
"""Seconds after a claim; about the duration of a run."""
LONGEST_WAIT = 60.0

Effects = list[tuple[int, int]]
"""The steps that a task has recorded, each with the token of its claim."""


class WorkerProcesses:
    """Starts worker processes, one for each queue, and kills them."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.step_worker", url, str(LEASE)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._requesting = asyncio.Lock()
        self._alive: set[int] = set()

    async def start(self, queue: str) -> int:
        async with self._requesting:
            pid = await asyncio.to_thread(self._request, queue)
        self._alive.add(pid)
        return pid

    def kill(self, pid: int) -> None:
        self._alive.discard(pid)
        os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for pid in list(self._alive):
            with suppress(ProcessLookupError):
                self.kill(pid)
        self._process.communicate()

    def _request(self, queue: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{queue}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@pytest.fixture
async def workers(url: str) -> AsyncIterator[WorkerProcesses]:
    workers = WorkerProcesses(url)
    yield workers
    workers.close()


@pytest.fixture(params=SHARED)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(request.param, tmp_path, request)


class KilledQueue:
    """A queue with one worker, which is killed repeatedly."""

    def __init__(
        self, number: int, queue: AsyncTaskQueue, workers: WorkerProcesses, folder: Path
    ) -> None:
        self._name = f"queue{number}"
        self._queue = queue
        self._workers = workers
        self._folder = folder
        self.task_ids: list[str] = []
        self.lost_claims = 0

    async def kill(self, times: int) -> None:
        """Kill the worker that many times during a run; then let another one complete the tasks."""
        crashes = 0
        while crashes < times:
            claims = await self._ensure_task()
            worker = await self._workers.start(self._name)
            if await self._is_claimed_again(claims):
                crashes += claims > 0
                await asyncio.sleep(random.uniform(0, LATEST_KILL))
            self._workers.kill(worker)
        await self._workers.start(self._name)
        for task_id in self.task_ids:
            result = await self._queue.get_result(task_id, timeout=LONGEST_WAIT)
            task = await self._queue.get_task(task_id)
            assert task is not None
            assert result is not None
            self.lost_claims += task.token - 1
            assert (result.status, result.result) == (
                TaskStatus.SUCCESS,
                list(range(1, STEPS + 1)),
            )

    async def _ensure_task(self) -> int:
        """Enqueue a task if there is none; return how often the task was claimed."""
        task = await self._queue.get_task(self.task_ids[-1]) if self.task_ids else None
        if task is not None and not task.status.is_final:
            return task.token
        enqueuer = self._queue.options(queue=self._name)
        handle = await enqueuer.enqueue(five_steps, str(self._folder))
        self.task_ids.append(handle.id)
        return 0

    async def _is_claimed_again(self, before: int) -> bool:
        """Whether the task is claimed again.

        It is not if the previous worker has sent its outcome just before it was killed: the server
        may process that after the worker's death.
        """
        async with asyncio.timeout(LONGEST_WAIT):
            while True:
                task = await self._queue.get_task(self.task_ids[-1])
                assert task is not None
                if task.token > before or task.status.is_final:
                    return task.token > before
                await asyncio.sleep(0.005)

    def effects(self) -> list[Effects]:
        lines = [(self._folder / task_id).read_text().splitlines() for task_id in self.task_ids]
        return [[(int(line.split()[0]), int(line.split()[1])) for line in task] for task in lines]


async def kill_and_check(url: str, workers: WorkerProcesses, folder: Path, kills: int) -> None:
    effects_folder = folder / "effects"
    effects_folder.mkdir()
    async with AsyncTaskQueue(url) as queue:
        killed_queues = [
            KilledQueue(number, queue, workers, effects_folder) for number in range(QUEUES)
        ]
        await asyncio.gather(
            *(killed_queue.kill(kills // QUEUES) for killed_queue in killed_queues)
        )
    for killed_queue in killed_queues:
        for effects in killed_queue.effects():
            check(effects)

    assert sum(killed_queue.lost_claims for killed_queue in killed_queues) >= kills


def check(effects: Effects) -> None:
    """Assert that every step was done, in order, and at most one repeated for each crash."""
    claims = {token for token, _ in effects}
    steps = [step for _, step in effects]

    assert len(set(effects)) == len(effects), f"a step was done twice in one run: {effects}"
    assert steps == sorted(steps), f"a finished step was done again: {effects}"
    assert set(steps) == set(range(1, STEPS + 1)), f"a step was left out: {effects}"
    # Only the step that a crash interrupted is repeated.
    assert len(steps) - STEPS <= len(claims) - 1, f"more was repeated than crashed: {effects}"


@pytest.mark.timeout(120)
async def test_a_step_is_repeated_at_most_once_for_each_crash(url, workers, tmp_path):
    await kill_and_check(url, workers, tmp_path, kills=12)


@pytest.mark.deep
@pytest.mark.timeout(600)
async def test_a_step_is_repeated_at_most_once_for_each_of_200_crashes(url, workers, tmp_path):
    await kill_and_check(url, workers, tmp_path, kills=200)


def test_the_check_detects_each_violation():
    fine = [(1, 1), (1, 2), (2, 2), (2, 3), (3, 4), (3, 5)]

    check(fine)
    for wrong in (
        [*fine, (4, 5), (4, 1)],
        [*fine, (3, 5)],
        fine[:-1],
        [(1, 1), (1, 2), (2, 1), *fine[2:]],
    ):
        with pytest.raises(AssertionError):
            check(wrong)
