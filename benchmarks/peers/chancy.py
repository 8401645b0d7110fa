"""Chancy: the async executor, 100 jobs at a time, eager polling, uvloop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from chancy import Chancy, Queue, Worker, job

from benchmarks.run_context import CONCURRENCY, URL, record_start

PACKAGES = ["chancy", "uvloop"]
STORES = ["postgres"]
KEEPS = "the row"

app: Chancy


@job(queue="default")
async def noop(*, number: int) -> None:
    record_start(number)


async def open() -> None:
    global app
    app = await Chancy(URL).__aenter__()
    await app.migrate()
    queue = Queue(
        "default",
        concurrency=CONCURRENCY,
        executor=Chancy.Executor.Async,
        polling_interval=1,
        eager_polling=True,
    )
    await app.declare(queue, upsert=True)


async def close() -> None:
    await app.__aexit__(None, None, None)


async def one(number: int) -> None:
    await app.push(noop.job.with_kwargs(number=number))


async def many(numbers: Sequence[int]) -> None:
    async for _ in app.push_many([noop.job.with_kwargs(number=number) for number in numbers]):
        pass


async def run() -> None:
    async with Chancy(URL) as chancy, Worker(chancy) as worker:
        await worker.wait_for_shutdown()


def work() -> None:
    asyncio.run(run())
