"""Taskiq: a Redis stream, 100 tasks at a time and as many fetched ahead, uvloop."""

from __future__ import annotations

from taskiq_redis import RedisStreamBroker

from benchmarks.run_context import CONCURRENCY, URL, exec_module, record_start

PACKAGES = ["taskiq", "taskiq-redis", "hiredis", "orjson", "uvloop"]
STORES = ["redis", "redis-always"]
KEEPS = "nothing"

broker = RedisStreamBroker(URL)


@broker.task(task_name="noop")
async def noop(number: int) -> None:
    record_start(number)


async def open() -> None:
    await broker.startup()


async def close() -> None:
    await broker.shutdown()


async def one(number: int) -> None:
    await noop.kiq(number)


def work() -> None:
    exec_module(
        *("taskiq", "worker", f"{__name__}:broker", "--workers", 1, "--log-level", "WARNING"),
        *("--max-async-tasks", CONCURRENCY, "--max-prefetch", CONCURRENCY),
    )
