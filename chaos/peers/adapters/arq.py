"""arq: `enqueue_job` and the `arq` command."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from typing import Any

from arq import create_pool
from arq.connections import RedisSettings

from chaos.peers.workload import CONCURRENCY, SETTINGS, URL, acknowledged, run_async, tasks


async def work_on(_: dict[str, Any], task_id: str, seconds: float) -> None:
    await run_async(task_id, seconds)


# The documented form of a worker: its attributes are the settings.
WorkerSettings = type(
    "WorkerSettings",
    (),
    {
        "functions": [work_on],
        "redis_settings": RedisSettings.from_dsn(URL),
        "max_jobs": CONCURRENCY,
        **SETTINGS,
    },
)


async def _produce() -> None:
    pool = await create_pool(RedisSettings.from_dsn(URL))
    for task_id, seconds in tasks():
        await pool.enqueue_job("work_on", task_id, seconds, _job_id=task_id)
        acknowledged(task_id)


def produce() -> None:
    asyncio.run(_produce())


def work() -> None:
    command = f"{os.path.dirname(sys.executable)}/arq"
    os.execv(command, [command, f"{__name__}.WorkerSettings"])


async def _left() -> list[tuple[str, str]]:
    pool = await create_pool(RedisSettings.from_dsn(URL))
    # A job stays in the queue until it is finished; one in progress is skipped.
    waiting = [("held", job.job_id) for job in await pool.queued_jobs()]
    failed = [job.job_id for job in await pool.all_job_results() if not job.success]
    return waiting + [("failed", task_id) for task_id in failed if task_id]


def left() -> Iterator[tuple[str, str]]:
    yield from asyncio.run(_left())
