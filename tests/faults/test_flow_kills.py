"""Workers that are killed in the middle of releases: no callback is lost, and none runs that was recorded (I21 to I26)."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from omniq import AsyncTaskQueue, Flow, TaskStatus
from tests.faults import flow_worker
from tests.faults.flow_worker import MEMBERS
from tests.faults.shared_stores import SHARED, url_of

LEASE = 0.6
LONGEST_WAIT = 60.0
MORE_KILLS = int(os.environ.get("FLOW_KILLS", "15"))
"""Kills of the long test: `FLOW_KILLS=10000 pytest -m deep tests/faults/test_flow_kills.py`."""

POINTS = (
    "release.before",
    "record_and_claim.before",
    "record_and_claim.after",
    "flow_insertion.before",
    "enqueue.after",
)
"""Where workers die: before a release is written, and before and after the calls that make one."""


class Workers:
    """Starts worker processes that kill themselves at failpoints."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.flow_worker", url, str(LEASE)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._alive: set[int] = set()

    async def start(self, rules: str = "") -> int:
        pid = await asyncio.to_thread(self._request, rules)
        self._alive.add(pid)
        return pid

    def _request(self, rules: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{rules}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def kill(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, 9)

    def close(self) -> None:
        for pid in self._alive:
            self.kill(pid)
        self._process.communicate()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(params=SHARED)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(request.param, tmp_path, request)


def a_flow(folder: Path) -> Flow:
    flow = Flow()
    numbers = [
        flow.add(f"m{number}", flow_worker.member, str(folder), number) for number in range(MEMBERS)
    ]
    total = flow.add("callback", flow_worker.callback, numbers, str(folder))
    flow.add("parent", flow_worker.parent, total, str(folder))
    return flow


async def kill_and_check(url: str, folder: Path, kills: int) -> None:
    effects = folder / "effects"
    effects.mkdir()
    workers = Workers(url)
    try:
        async with AsyncTaskQueue(url) as queue:
            handles = [await queue.start(a_flow(effects))]
            for kill in range(kills):
                point = POINTS[kill % len(POINTS)]
                pid = await workers.start(f"{point}=kill@{random.randint(1, 12)}")
                while _is_alive(pid):
                    # Some points are reached once in a flow: without another one the worker would wait.
                    if await handles[-1].status() is TaskStatus.SUCCESS:
                        handles.append(await queue.start(a_flow(effects)))
                    await asyncio.sleep(0.02)
            await workers.start()
            for handle in handles:
                assert await handle.wait(LONGEST_WAIT) is TaskStatus.SUCCESS
                nodes = await queue.storage.list_below(handle.id)
                names = [
                    task.id for task in nodes if task.workflow and task.workflow.kind == "task"
                ]
                # The nodes, and the children of the parent, each once.
                assert len(names) == MEMBERS + 2 + 3 + 1
                assert {task.status for task in nodes} == {TaskStatus.SUCCESS}
                for task in nodes:
                    if task.id not in names:
                        continue
                    tokens = (effects / task.id).read_text().split()
                    # At most one effect for each claim, and the last one was recorded.
                    assert len(set(tokens)) == len(tokens) <= task.token
                    assert tokens[-1] == str(task.token)
                expected = sum(range(MEMBERS))
                assert await handle.result(5) == 3 * expected
    finally:
        workers.close()


@pytest.mark.fault("F92")
@pytest.mark.deep_on("file")
@pytest.mark.timeout(180)
async def test_no_callback_is_lost_or_doubled_when_workers_die(url: str, tmp_path: Path) -> None:
    await kill_and_check(url, tmp_path, kills=len(POINTS))


@pytest.mark.deep
@pytest.mark.timeout(3_000)
async def test_no_callback_is_lost_or_doubled_in_many_deaths(url: str, tmp_path: Path) -> None:
    await kill_and_check(url, tmp_path, kills=MORE_KILLS)
