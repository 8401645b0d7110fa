"""Does a claim cost the same with a million tasks beside it? Prints ratios, and asserts nothing.

For each backend: tasks a second draining 10,000 tasks, in a store that also holds a million
finished ones, a million due tomorrow and 100,000 that are ready, compared with a store that has only
those 10,000. A drain does what a worker's loop does to the storage: record outcomes and claim the
next batch. The big store is filled once, through `enqueue_many` and the same loop, which takes
minutes; the ratio is the median of interleaved pairs. For a machine that is busy with other
programs, it also prints microseconds of CPU a task, of this process and of the server's together (Linux).

    python benchmarks/claim_cost.py [--backend sqlite|postgres|redis] [--pairs 5]

The servers are those of `omniq.testing.servers`, on this machine, without waiting for its disk.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from omniq.models import Task, TaskResult, TaskStatus
from omniq.outcomes import Succeeded
from omniq.storage import BaseStorage, open_storage
from omniq.testing.servers import PostgresServer, RedisServer, Server

BATCH = 100
FILL_BATCH = 2000
TARGET = 0.8


@contextlib.contextmanager
def two_stores(backend: str) -> Iterator[tuple[str, str, Server | None]]:
    """Yield the URLs of two stores of one kind, and their server."""
    match backend:
        case "postgres":
            with PostgresServer() as server:
                yield f"{server.url}?schema=crowded", f"{server.url}?schema=alone", server
        case "redis":
            with RedisServer() as server:
                yield f"{server.url}?prefix=crowded", f"{server.url}?prefix=alone", server
        case _:
            with tempfile.TemporaryDirectory(prefix="omniq-bench-") as folder:
                base = f"sqlite:///{folder}"
                yield f"{base}/crowded.db?durability=os", f"{base}/alone.db?durability=os", None


def cpu_seconds(server: Server | None) -> float:
    """Return the CPU time of this process, and of the server and its children, so far."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat") if server is not None else ():
        with contextlib.suppress(OSError):
            facts = path.read_text().rpartition(") ")[2].split()
            if server is not None and server.pid in (int(path.parent.name), int(facts[1])):
                ticks += int(facts[11]) + int(facts[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


async def fill(storage: BaseStorage, count: int, eta: datetime | None = None) -> None:
    for start in range(0, count, FILL_BATCH):
        batch = range(start, min(start + FILL_BATCH, count))
        await storage.enqueue_many(
            [Task(func_path="bench.noop", args=(number,), eta=eta) for number in batch]
        )


async def drain(storage: BaseStorage, count: int, batch: int = BATCH) -> float:
    """Claim and finish that many tasks; return tasks a second."""
    outcomes: list[Succeeded] = []
    left = count
    start = time.perf_counter()
    while left or outcomes:
        _, claimed = await storage.record_and_reserve(outcomes, min(batch, left))
        if left and not claimed:
            sys.exit(f"{left} tasks are missing")
        left -= len(claimed)
        outcomes = [
            Succeeded(
                task.id,
                task.token,
                TaskResult(task_id=task.id, status=TaskStatus.SUCCESS, result=None, attempts=1),
            )
            for task in claimed
        ]
    return count / (time.perf_counter() - start)


async def crowd(storage: BaseStorage, arguments: argparse.Namespace) -> None:
    """Fill the large store, ready tasks last. Each pair adds the tasks that it drains."""
    began = time.perf_counter()
    for start in range(0, arguments.finished, 50_000):
        some = min(50_000, arguments.finished - start)
        await fill(storage, some)
        await drain(storage, some, batch=1000)
    await fill(storage, arguments.delayed, eta=datetime.now(UTC) + timedelta(days=1))
    await fill(storage, arguments.ready - arguments.drain)
    print(f"  filled in {time.perf_counter() - began:,.0f} s", file=sys.stderr, flush=True)


class Side:
    """One of the two stores, and its measurements."""

    def __init__(self, storage: BaseStorage, server: Server | None) -> None:
        self.storage = storage
        self._server = server
        self.rates: list[float] = []
        self.micros: list[float] = []

    async def fill_and_drain(self, count: int) -> None:
        await fill(self.storage, count)
        before = cpu_seconds(self._server)
        self.rates.append(await drain(self.storage, count))
        self.micros.append((cpu_seconds(self._server) - before) / count * 1e6)


async def measure(backend: str, arguments: argparse.Namespace) -> None:
    with two_stores(backend) as (crowded_url, alone_url, server):
        async with open_storage(crowded_url) as first, open_storage(alone_url) as second:
            crowded, alone = Side(first, server), Side(second, server)
            await crowd(first, arguments)
            for _ in range(arguments.pairs):
                await crowded.fill_and_drain(arguments.drain)
                await alone.fill_and_drain(arguments.drain)
                await second.purge_results(datetime.now(UTC) + timedelta(hours=1))
    median = statistics.median
    pairs = [busy / quiet for busy, quiet in zip(crowded.rates, alone.rates, strict=True)]
    print(
        f"{backend:8} {median(alone.rates):>10,.0f} {median(crowded.rates):>10,.0f} "
        f"{median(pairs):>7.2f} {median(alone.micros):>10.1f} {median(crowded.micros):>10.1f}   "
        f"{' '.join(f'{pair:.2f}' for pair in pairs)}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", choices=["sqlite", "postgres", "redis"], action="append")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--finished", type=int, default=1_000_000)
    parser.add_argument("--delayed", type=int, default=1_000_000)
    parser.add_argument("--ready", type=int, default=100_000)
    parser.add_argument("--drain", type=int, default=10_000)
    arguments = parser.parse_args()
    print(
        f"draining {arguments.drain:,} tasks in batches of {BATCH}: alone, and beside "
        f"{arguments.finished:,} finished, {arguments.delayed:,} delayed and "
        f"{arguments.ready:,} ready ones; target: at least {TARGET}"
    )
    print(
        f"{'backend':8} {'alone/s':>10} {'crowded/s':>10} {'ratio':>7} {'alone µs':>10} "
        f"{'crowded µs':>10}   pairs"
    )
    for backend in arguments.backend or ["sqlite", "postgres", "redis"]:
        asyncio.run(measure(backend, arguments))


if __name__ == "__main__":
    main()
