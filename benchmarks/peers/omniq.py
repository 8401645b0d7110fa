"""omniq: its own command with its default log, 100 tasks at a time.

Runs before 18 November 2026 were made at log level WARNING.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.run_context import CONCURRENCY, FOLDER, STORE, URL, exec_module, record_start
from omniq import AsyncTaskQueue, task

PACKAGES = ["-e", ".[postgres,redis]", "uvloop"]
STORES = [
    "postgres",
    "redis",
    "redis-always",
    "sqlite-power",
    "sqlite-os",
    "file-power",
    "file-os",
]
KEEPS = "a result"

kind, _, durability = STORE.partition("-")
address = {
    "sqlite": f"sqlite:///{FOLDER}/omniq.db?durability={durability}",
    "file": f"file://{FOLDER}/omniq?durability={durability}",
}.get(kind, URL)
queue = AsyncTaskQueue(address)


@task
async def noop(number: int) -> None:
    record_start(number)


async def open() -> None:
    await queue.__aenter__()


async def close() -> None:
    await queue.__aexit__(None, None, None)


async def one(number: int) -> None:
    await queue.enqueue(noop, number)


async def many(numbers: Sequence[int]) -> None:
    await queue.enqueue_many(noop, [(number,) for number in numbers])


async def later(numbers: Sequence[int]) -> None:
    await queue.options(delay=3600).enqueue_many(noop, [(number,) for number in numbers])


def work() -> None:
    exec_module(
        *("omniq", "worker", __name__, "--url", address),
        *("--concurrency", CONCURRENCY),
    )
