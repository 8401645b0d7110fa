"""omniq, as its quickstart has it: `queue.enqueue` and `omniq worker`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from chaos.peers.workload import CONCURRENCY, SETTINGS, URL, acknowledged, run_async, tasks
from omniq import TaskQueue, TaskStatus, task


@task
async def work_on(task_id: str, seconds: float) -> None:
    await run_async(task_id, seconds)


def produce() -> None:
    with TaskQueue(URL) as queue:
        for task_id, seconds in tasks():
            queue.options(task_id=task_id).enqueue(work_on, task_id, seconds)
            acknowledged(task_id)


def work() -> None:
    options = [f"--{name}={value}" for name, value in SETTINGS.items()]
    os.execv(
        sys.executable,
        [
            *(sys.executable, "-m", "omniq", "worker", __name__, "--url", URL),
            *(f"--concurrency={CONCURRENCY}", *options),
        ],
    )


def left() -> Iterator[tuple[str, str]]:
    states = {
        TaskStatus.PENDING: "held",
        TaskStatus.RUNNING: "held",
        TaskStatus.RETRYING: "held",
        TaskStatus.FAILED: "failed",
    }
    with TaskQueue(URL) as queue:
        for status, state in states.items():
            after = None
            while page := queue.list_tasks(status=status, limit=500, after=after):
                yield from ((state, each.id) for each in page)
                after = page[-1].id
