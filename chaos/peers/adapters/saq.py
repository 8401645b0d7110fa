"""SAQ on Redis: `queue.enqueue` and the `saq` command."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from typing import Any

from saq import Job, Queue, Status

from chaos.peers.workload import CONCURRENCY, SETTINGS, URL, acknowledged, run_async, tasks


async def work_on(_: dict[str, Any], *, task_id: str, seconds: float) -> None:
    await run_async(task_id, seconds)


async def _produce() -> None:
    queue = Queue.from_url(URL)
    for task_id, seconds in tasks():
        await queue.enqueue(
            Job("work_on", kwargs={"task_id": task_id, "seconds": seconds}, key=task_id, **SETTINGS)
        )
        acknowledged(task_id)


def produce() -> None:
    asyncio.run(_produce())


settings = {
    "queue": Queue.from_url(URL),
    "functions": [work_on],
    "concurrency": CONCURRENCY,
}


def work() -> None:
    command = f"{os.path.dirname(sys.executable)}/saq"
    os.execv(command, [command, f"{__name__}.settings"])


async def _left() -> list[tuple[str, str]]:
    queue = Queue.from_url(URL)
    found = []
    async for job in queue.iter_jobs():
        match job.status:
            case Status.NEW | Status.QUEUED:
                found.append(("held", job.key))
            case Status.ACTIVE:
                # The sweep runs it again if a retry is left, and ends it otherwise.
                found.append(("held" if job.retryable else "failed", job.key))
            case Status.ABORTED | Status.ABORTING | Status.FAILED:
                found.append(("failed", job.key))
    return found


def left() -> Iterator[tuple[str, str]]:
    yield from asyncio.run(_left())
