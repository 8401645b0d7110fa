"""What does a batch save? Prints CPU microseconds for each task of drains, and asserts nothing.

| function | what it does |
|---|---|
| noop | returns |
| waits | awaits once, as one that asks a server does: each task has an asyncio task |
| thread | a plain `def`, which runs in a thread |

Each alone, and as batches of 100. A batch has one slot, so single tasks are measured with one slot too (what a function does that
may not run beside itself), and with 100.

    python -m benchmarks.batches [--backend memory|sqlite|file|postgres|redis] [--tasks 10000] [--rounds 5]

The time of a server is not in it. `python -m benchmarks.flow_peers --figures batch` compares with celery-batches.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

from benchmarks.flow_control import stores, url_of
from omniq import AsyncTaskQueue, batched, task

BULK, SIZE = 1_000, 100


@task
async def noop(number: int) -> None:
    """Return."""


@task
@batched(size=SIZE)
async def noop_batch(numbers: list[int]) -> None:
    """The same for a list."""


@task
async def waits(number: int) -> None:
    """Wait for one turn of the event loop."""
    await asyncio.sleep(0)


@task
@batched(size=SIZE)
async def waits_batch(numbers: list[int]) -> None:
    """The same for a list."""
    await asyncio.sleep(0)


@task
def thread(number: int) -> None:
    """Return, in a thread."""


@task
@batched(size=SIZE)
def thread_batch(numbers: list[int]) -> None:
    """The same for a list."""


FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "noop": (noop, noop_batch),
    "waits": (waits, waits_batch),
    "thread": (thread, thread_batch),
}


async def drain(url: str, function: Any, count: int, slots: int) -> tuple[float, float]:
    """Microseconds of CPU and of time for a task."""
    async with AsyncTaskQueue(url) as queue:
        for start in range(0, count, BULK):
            await queue.enqueue_many(function, list(range(start, start + BULK)))
        pool = queue.worker(concurrency=slots)
        began, cpu = time.perf_counter(), time.process_time()
        await pool.run_until_empty()
        spent, seconds = time.process_time() - cpu, time.perf_counter() - began
        if pool.stats().completed_tasks != count:
            raise SystemExit(f"{pool.stats().completed_tasks} of {count} completed")
    return spent / count * 1e6, seconds / count * 1e6


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batches")
    parser.add_argument("--backend", default="memory")
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    number = 0
    with stores(given.backend) as base:
        for name, (alone, in_batches) in FUNCTIONS.items():
            seen: dict[str, list[tuple[float, float]]] = {}
            for _ in range(given.rounds):
                for how, function, slots in (
                    ("batch", in_batches, 1),
                    ("one slot", alone, 1),
                    ("100 slots", alone, 100),
                ):
                    number += 1
                    took = asyncio.run(drain(url_of(base, number), function, given.tasks, slots))
                    seen.setdefault(how, []).append(took)
            cpu = {how: statistics.median(each[0] for each in took) for how, took in seen.items()}
            rate = {how: statistics.median(each[1] for each in took) for how, took in seen.items()}
            others = ", ".join(
                f"{how} {cpu[how]:.1f} ({cpu[how] / cpu['batch']:.1f} x; time {rate[how] / rate['batch']:.1f} x)"
                for how in ("one slot", "100 slots")
            )
            print(f"{given.backend} {name}: batch {cpu['batch']:.1f} µs, {others}", flush=True)


if __name__ == "__main__":
    main()
