"""Workers are killed in the middle of a stream: what was stored stays readable, and the next run follows it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from omniq import AsyncTaskQueue
from tests.faults.output_worker import CHUNKS, dictate
from tests.faults.shared_stores import SHARED, url_of

LEASE = 0.6
ALL = [f"{number} " for number in range(1, CHUNKS + 1)]

KILLS = [
    *((backend, "itself") for backend in SHARED),
    ("sqlite", "append_output.before"),
    ("sqlite", "append_output.after"),
]

pytestmark = pytest.mark.deep


@pytest.fixture
def url(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(backend, tmp_path, request)


@pytest.fixture
def start(url: str) -> Iterator[object]:
    processes: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.output_worker", url, str(LEASE)],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.fault("F02")
@pytest.mark.parametrize(("backend", "dies_by"), KILLS)
async def test_the_output_of_a_killed_run_stays_and_that_of_the_next_run_follows(
    url, start, dies_by
):
    async with AsyncTaskQueue(url) as queue:
        handle = await queue.enqueue(dictate, dies_by)
        first = await asyncio.to_thread(start)
        seen = []

        async def follow() -> None:
            async for chunk in handle.stream(all_runs=True, timeout=30):
                seen.append(chunk)

        following = asyncio.create_task(follow())
        await asyncio.to_thread(first.wait)
        await asyncio.to_thread(start)
        assert await handle.result(timeout=30) == "said"
        await following

        # On a busy machine the first worker may have lost its lease before, so that there is one more run.
        runs = [list(run) for _, run in groupby(seen, key=lambda chunk: chunk.run)]
        assert (runs[0][0].attempt, runs[-1][0].attempt) == (1, 2)
        for run in runs:
            values = [chunk.value for chunk in run]
            assert values == ALL[: len(values)]
            assert [chunk.is_first for chunk in run] == [True] + [False] * (len(run) - 1)
        assert len(runs[-2]) >= CHUNKS // 2
        assert len(runs[-1]) == CHUNKS
        assert [chunk.value async for chunk in handle.stream()] == ALL
