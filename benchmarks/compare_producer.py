"""The producer of `benchmarks.compare`, run with the omniq of either version.

    python -m benchmarks.compare_producer WHAT URL COUNT

`fill` only fills the store; `drain` also drains it, in this process; `bulk` and `single` report what
1,000 tasks a call and one task a call cost this process, and `latency` the time from an enqueue
until its result is here, with a worker beside it. The tasks have no limits, or those that
`COMPARE_LIMITS` names in `LIMITS`.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time

from benchmarks.compare_tasks import add_one, counters, noop, report
from omniq import AsyncTaskQueue

_BATCH = 1_000

LIMITS = {"": _BATCH, "never": _BATCH, "row": 50}
"""Kinds of limits, and how many tasks in a row have the same one: none, one limit that never blocks, and
a key for each 50 tasks of which one runs at a time."""


async def main(what: str, url: str, count: int) -> None:
    async with AsyncTaskQueue(url) as queue:
        if what == "latency":
            report({"seconds": count * await _latency(queue, count)})
            return
        before = counters()
        if what == "single":
            for number in range(count):
                await queue.enqueue(noop, number)
        else:
            await _fill(queue, count)
        if what in ("bulk", "single"):
            report({name: value - before[name] for name, value in counters().items()})
        if what == "drain":
            async with queue.worker(concurrency=100) as pool:
                await pool.run_until_empty()


async def _fill(queue: AsyncTaskQueue, count: int) -> None:
    kind = os.environ.get("COMPARE_LIMITS", "")
    for first in range(0, count, LIMITS[kind]):
        numbers = range(first, min(count, first + LIMITS[kind]))
        enqueue_many = queue.enqueue_many
        if kind == "never":
            enqueue_many = queue.options(max_running=10_000, limit_key="all").enqueue_many
        elif kind == "row":
            enqueue_many = queue.options(max_running=1, limit_key=f"k{first}").enqueue_many
        await enqueue_many(noop, [(number,) for number in numbers])


async def _latency(queue: AsyncTaskQueue, count: int) -> float:
    """The median over single tasks, each enqueued when the one before has returned."""
    taken: list[float] = []
    # The first finds a worker that is still starting.
    for number in range(count + 1):
        began = time.monotonic()
        handle = await queue.enqueue(add_one, number)
        await handle.result(timeout=60)
        taken.append(time.monotonic() - began)
    return statistics.median(taken[1:])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
