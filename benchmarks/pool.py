"""What a pool costs: CPU for each task, latency from enqueue to start, and memory.

    python benchmarks/pool.py [--only cpu|latency|memory] [--tasks 100000] [--backend sqlite]

cpu      draining async no-op tasks on memory at concurrency 100, as a ratio to `create_task` and
         `await`, one by one, for the same number in the same run (bound: 4)
latency  from enqueue to start, one task at a time on an idle pool, in one process and across two
         (p50 bounds: 1 ms memory, 5 ms sqlite and file, 25 ms across processes)
memory   a pool of 3 workers with 100 queued tasks beside a bare interpreter with the same imports
         (bound: 20 MB), and its growth over many tasks with result_ttl=0 (bound: 5 MB)

Prints, and asserts nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omniq import AsyncTaskQueue, AsyncWorkerPool, TaskQueue, task
from omniq.storage.memory import MemoryStorage

CONCURRENCY = 100
ENQUEUE_BATCH = 1000
LATENCY_TASKS = 300
MB = 1024 * 1024

if __name__ == "__main__":
    # Workers import the tasks by the name of this module, also in other processes.
    sys.path.insert(0, str(Path(__file__).parent))


@task
async def noop() -> None:
    """A task that does nothing."""


@task
async def when() -> float:
    """Return the time of the run, on the clock that all processes of a machine share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


# CPU


async def one_by_one(count: int) -> float:
    began = time.process_time()
    for _ in range(count):
        await asyncio.create_task(noop())
    return time.process_time() - began


async def drain(count: int) -> float:
    async with AsyncTaskQueue("memory://") as queue:
        for start in range(0, count, ENQUEUE_BATCH):
            size = min(ENQUEUE_BATCH, count - start)
            await queue.enqueue_many("pool.noop", [()] * size)
        pool = queue.worker(concurrency=CONCURRENCY)
        gc.collect()
        began = time.process_time()
        await pool.run_until_empty()
        seconds = time.process_time() - began
        if pool.stats().completed_tasks != count:
            sys.exit(f"{count} tasks were due and {pool.stats().completed_tasks} completed")
        return seconds


def measure_cpu(count: int) -> None:
    ratios = []
    for _ in range(3):
        before = asyncio.run(one_by_one(count))
        drained = asyncio.run(drain(count))
        after = asyncio.run(one_by_one(count))
        bare = (before + after) / 2
        ratios.append(drained / bare)
        print(
            f"cpu      {count:,} tasks: pool {drained / count * 1e6:.1f} us a task, "
            f"create_task and await {bare / count * 1e6:.1f} us, ratio {ratios[-1]:.2f}",
            flush=True,
        )
    print(f"cpu      median ratio {statistics.median(ratios):.2f} (bound 4)", flush=True)


# Latency


@contextlib.contextmanager
def open_store(backend: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="omniq-bench-") as folder:
        path = Path(folder, "store")
        yield {
            "memory": "memory://",
            "file": f"file://{path}",
            "sqlite": f"sqlite:///{path}.db",
        }[backend]


async def latencies(queue: AsyncTaskQueue) -> list[float]:
    """Measure the seconds from before each enqueue to the start of its task, on an idle pool."""
    seconds = []
    for _ in range(LATENCY_TASKS):
        began = time.clock_gettime(time.CLOCK_MONOTONIC)
        handle = await queue.enqueue("pool.when")
        seconds.append(await handle.result(timeout=30) - began)
    return seconds


async def within_one_process(url: str) -> list[float]:
    async with AsyncTaskQueue(url) as queue, queue.worker(concurrency=10):
        await (await queue.enqueue("pool.when")).result(timeout=30)
        return await latencies(queue)


def serve(url: str, ready: Any, stop: Any) -> None:
    """Run a worker in a separate process."""
    sys.path.insert(0, str(Path(__file__).parent))
    with TaskQueue(url) as queue, queue.worker(concurrency=10):
        ready.set()
        stop.wait()


async def across_processes(url: str) -> list[float]:
    spawn = multiprocessing.get_context("spawn")
    ready, stop = spawn.Event(), spawn.Event()
    worker = spawn.Process(target=serve, args=(url, ready, stop))
    worker.start()
    await asyncio.to_thread(ready.wait)
    try:
        async with AsyncTaskQueue(url) as queue:
            await (await queue.enqueue("pool.when")).result(timeout=30)
            return await latencies(queue)
    finally:
        stop.set()
        await asyncio.to_thread(worker.join)


def report_latency(backend: str, setup: str, seconds: list[float], bound: float) -> None:
    ordered = sorted(second * 1000 for second in seconds)
    p50, p95 = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.95)]
    print(
        f"latency  {backend:7} {setup:17} p50 {p50:7.2f} ms   p95 {p95:7.2f} ms   "
        f"(bound p50 {bound:g} ms)",
        flush=True,
    )


def measure_latency(backends: list[str]) -> None:
    for backend in backends:
        with open_store(backend) as url:
            bound = 1.0 if backend == "memory" else 5.0
            report_latency(backend, "in one process", asyncio.run(within_one_process(url)), bound)
        if backend != "memory":
            with open_store(backend) as url:
                seconds = asyncio.run(across_processes(url))
                report_latency(backend, "across processes", seconds, 25.0)


# Memory


def resident() -> int:
    """Return the resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


async def pool_in_memory(count: int) -> None:
    gc.collect()
    bare = resident()
    storage = MemoryStorage(max_pending=100)
    async with AsyncWorkerPool(storage, concurrency=3) as pool:
        while pool.stats().completed_tasks < 100:
            await fill(storage, 100)
        await fill(storage, 100)
        added = resident() - bare
        print(
            f"memory   pool of 3 workers, queue of 100: {added / MB:.1f} MB (bound 20)", flush=True
        )
        await run_many(pool, storage, min(count // 10, 20_000))
        gc.collect()
        before = resident()
        began = time.monotonic()
        await run_many(pool, storage, count)
        gc.collect()
        seconds = time.monotonic() - began
        grown = resident() - before
    print(
        f"memory   growth over {count:,} tasks: {grown / MB:.1f} MB (bound 5 for 1,000,000), "
        f"{count / seconds:,.0f} tasks/s",
        flush=True,
    )


async def run_many(pool: AsyncWorkerPool, storage: MemoryStorage, count: int) -> None:
    target = pool.stats().completed_tasks + count
    while pool.stats().completed_tasks < target:
        await fill(storage, 100)


async def fill(storage: MemoryStorage, size: int) -> None:
    """Enqueue as many tasks as there is room for, and let the pool run."""
    queue = AsyncTaskQueue(storage).options(result_ttl=0)
    room = size - await storage.count_waiting()
    if room > size // 2:
        await queue.enqueue_many("pool.noop", [()] * room)
    await asyncio.sleep(0)


def measure_memory(count: int) -> None:
    """Measure in a new process, without the memory of earlier measurements."""
    command = [sys.executable, __file__, "--memory-here", "--tasks", str(count)]
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=["cpu", "latency", "memory"])
    parser.add_argument(
        "--tasks", type=int, help="instead of 100,000 for cpu, 1,000,000 for memory"
    )
    parser.add_argument("--backend", choices=["memory", "sqlite", "file"], action="append")
    parser.add_argument("--memory-here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_here:
        asyncio.run(pool_in_memory(arguments.tasks))
        return
    if arguments.only in (None, "cpu"):
        measure_cpu(arguments.tasks or 100_000)
    if arguments.only in (None, "latency"):
        measure_latency(arguments.backend or ["memory", "sqlite", "file"])
    if arguments.only in (None, "memory"):
        measure_memory(arguments.tasks or 1_000_000)


if __name__ == "__main__":
    main()
