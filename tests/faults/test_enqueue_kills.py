"""A task's worker is killed around each of its enqueues: each enqueued task exists exactly once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from omniq import AsyncTaskQueue
from tests.faults.enqueue_worker import ENQUEUES, from_loop, from_process, from_thread
from tests.faults.shared_stores import SHARED, url_of

LEASE = 0.6
KILLED = -9
LEAF = "tests.faults.enqueue_worker.leaf"


@pytest.fixture(params=SHARED)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(request.param, tmp_path, request)


def exit_codes(url: str, failpoints: list[str]) -> list[int]:
    """Start workers with these failpoints, one after the other; returns how each ended."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.enqueue_worker", url, str(LEASE)],
        cwd=Path(__file__).parents[2],
        input="".join(f"{line}\n" for line in failpoints),
        capture_output=True,
        text=True,
        check=True,
        timeout=150,
    )
    return [int(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "parent",
    [
        from_loop,
        pytest.param(from_thread, marks=pytest.mark.deep),
        pytest.param(from_process, marks=pytest.mark.deep),
    ],
    ids=lambda func: func.__name__,
)
async def test_a_parent_killed_around_each_enqueue_makes_each_task_exactly_once(url, parent):
    async with AsyncTaskQueue(url) as queue:
        handle = await queue.options(max_crashes=10_000).enqueue(parent)
    kills = [
        f"enqueue.{when}=kill@{number}"
        for number in range(1, ENQUEUES + 1)
        for when in ("before", "after")
    ]
    codes = exit_codes(url, [*kills, ""])

    assert codes == [KILLED] * len(kills) + [0]
    async with AsyncTaskQueue(url) as queue:
        ids = await queue.handle(handle.id).result(timeout=30)
        leaves = await queue.list_tasks(func_path=LEAF)
        assert sorted(ids) == sorted(leaf.id for leaf in leaves)
        # The second enqueue was first stored by the fourth run.
        assert sorted(leaf.args[0] for leaf in leaves) == [1, 3, 4, 5, 5, 204]
