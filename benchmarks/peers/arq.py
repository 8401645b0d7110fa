"""arq: 100 jobs at a time, uvloop, polling every 10 ms instead of every 500."""

from __future__ import annotations

from typing import Any

from arq import create_pool
from arq.connections import ArqRedis, RedisSettings
from arq.worker import run_worker

from benchmarks.run_context import CONCURRENCY, URL, record_start

PACKAGES = ["arq", "hiredis", "uvloop"]
STORES = ["redis"]
KEEPS = "a result"

pool: ArqRedis


async def noop(_: Any, number: int) -> None:
    record_start(number)


class WorkerSettings:
    functions = (noop,)
    redis_settings = RedisSettings.from_dsn(URL)
    max_jobs = CONCURRENCY
    poll_delay = 0.01


async def open() -> None:
    global pool
    pool = await create_pool(WorkerSettings.redis_settings)


async def close() -> None:
    await pool.aclose()


async def one(number: int) -> None:
    await pool.enqueue_job("noop", number)


def work() -> None:
    run_worker(WorkerSettings)
