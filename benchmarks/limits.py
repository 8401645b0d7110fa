"""The rates of the bare driver and the bare event loop: `python -m benchmarks.limits SUBJECT FIGURE COUNT SECONDS`.

Prints one line of JSON: tasks a second, and for a drain the CPU of this process for each. Runs in a separate
process, like a peer, with the store of `run_context`.

raw    the stores of `raw.py`: record and claim 100 at a time; enqueue 1,000 at a time, or one by one
bare   the stock event loop: `create_task` with a callback, 100 at a time
omniq  omniq's worker on `memory://`, 100 tasks at a time, on the same loop
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable

from benchmarks import run_context
from benchmarks.raw import Raw, raw_store
from omniq import AsyncTaskQueue, task

BATCH, BULK = 100, 1_000


@task
async def noop() -> None:
    """A task that does nothing."""


async def cost(count: int, work: Awaitable[int | None], figure: str) -> dict[str, float]:
    """Measure `work`, which handles `count` tasks unless it returns another number."""
    own, began = time.process_time(), time.perf_counter()
    done = await work or count
    seconds = time.perf_counter() - began
    cpu = {"cpu": (time.process_time() - own) / done * 1e6} if figure == "drain" else {}
    return {figure: done / seconds, **cpu}


async def bare(count: int) -> dict[str, float]:
    async def run() -> None:
        ended: list[object] = []
        loop = asyncio.get_running_loop()
        for _ in range(0, count, BATCH):
            for _ in range(BATCH):
                loop.create_task(noop()).add_done_callback(ended.append)
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        if len(ended) < count:
            sys.exit(f"the bare loop ran {len(ended)} of {count} tasks")

    return await cost(count, run(), "drain")


async def in_memory(count: int) -> dict[str, float]:
    async with AsyncTaskQueue("memory://") as queue:
        for start in range(0, count, BULK):
            await queue.enqueue_many(noop, [()] * min(BULK, count - start))
        pool = queue.worker(concurrency=BATCH)
        found = await cost(count, pool.run_until_empty(), "drain")
        if pool.stats().completed_tasks != count:
            sys.exit(f"{count} tasks were due and {pool.stats().completed_tasks} completed")
        return found


async def raw(figure: str, count: int, seconds: float) -> dict[str, float]:
    async with raw_store(run_context.STORE, run_context.URL, run_context.FOLDER) as store:
        await store.enqueue(1)
        await store.record_and_claim(await store.record_and_claim([], 1), 1)
        until = time.monotonic() + seconds
        if figure == "drain":
            queued = await enqueue(store, count, BULK, until)
            return await cost(queued, drain(store, queued), figure)
        size = BULK if figure == "bulk" else 1
        return await cost(count, enqueue(store, count, size, until), figure)


async def enqueue(store: Raw, count: int, size: int, until: float) -> int:
    done = 0
    while done < count and time.monotonic() < until:
        done += size
        await store.enqueue(size)
    return done


async def drain(store: Raw, count: int) -> None:
    seen: set[str] = set()
    claimed: list[str] = []
    while claimed := await store.record_and_claim(claimed, BATCH):
        seen.update(claimed)
    if len(seen) != count:
        sys.exit(f"the raw loop drained {len(seen)} of {count} tasks")


def main(subject: str, figure: str, count: int, seconds: float) -> dict[str, float]:
    match subject:
        case "bare":
            return asyncio.run(bare(count))
        case "omniq":
            return asyncio.run(in_memory(count))
        case _:
            run_context.use_uvloop()
            return asyncio.run(raw(figure, count, seconds))


if __name__ == "__main__":
    _, subject, figure, count, seconds = sys.argv
    print(json.dumps(main(subject, figure, int(count), float(seconds))), flush=True)
