"""omniq in the comparison of limits, debounce and batches."""

from __future__ import annotations

import asyncio

from benchmarks.flow_peers.meter import CONCURRENCY, SETTLE, SIZE, WAIT, Meter
from benchmarks.run_context import URL
from omniq import AsyncTaskQueue, batched, task

meter = Meter.of_arguments()


@task(max_running=1, limit_key=lambda key: key)
async def limited(key: str) -> None:
    """One of a key at a time."""
    meter.count_runs(1)


@task
async def debounced(key: str) -> None:
    """Once for all submissions of a key."""
    meter.count_runs(1)


@task
@batched(size=SIZE, wait=WAIT)
async def batch(items: list[int]) -> None:
    """One of many no-ops."""
    meter.count_runs(len(items))


async def main() -> None:
    """Fill, drain, print."""
    async with AsyncTaskQueue(URL) as queue:

        async def enqueue(number: int) -> None:
            key = meter.key(number)
            match meter.figure:
                case "limits":
                    await queue.enqueue(limited, key)
                case "debounce":
                    later = queue.options(unique=key, on_conflict="replace", delay=SETTLE)
                    await later.enqueue(debounced, key)
                case _:
                    await queue.enqueue(batch, number)

        async def work() -> None:
            async with queue.worker(concurrency=CONCURRENCY):
                await meter.done.wait()

        await meter.filled(enqueue)
        await meter.drained(work)
    meter.print()


asyncio.run(main())
