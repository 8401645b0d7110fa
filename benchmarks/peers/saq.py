"""SAQ: 100 jobs at a time, uvloop, on PostgreSQL or Redis."""

from __future__ import annotations

from typing import Any

from saq import Queue
from saq.worker import start

from benchmarks.run_context import CONCURRENCY, URL, record_start

PACKAGES = ["saq[redis,postgres,hiredis]", "uvloop"]
STORES = ["postgres", "redis", "redis-always"]
KEEPS = "a result"

queue = Queue.from_url(URL)


async def noop(_: Any, *, number: int) -> None:
    record_start(number)


settings = {"queue": queue, "functions": [noop], "concurrency": CONCURRENCY}


async def open() -> None:
    await queue.connect()


async def close() -> None:
    await queue.disconnect()


async def one(number: int) -> None:
    await queue.enqueue("noop", number=number)


def work() -> None:
    start(f"{__name__}.settings")
