"""What does fairness cost, and what does a quiet tenant get? Prints ratios, and asserts nothing.

fair    drains tasks of many tenants with `fair_key`, in pairs with as many plain tasks, by a pool as `omniq worker`
        runs it; then waits of a quiet tenant beside one that has flooded the queue, in rounds: 1 is its fair wait

For each pair, tasks a second of the drain and of the enqueue in batches of 1,000. Targets: a drain of 0.87 × the plain
one, and 2 rounds.

    python -m benchmarks.flow_control fair [--backend memory|sqlite|file|postgres|redis] [--tasks 20000] [--tenants 10000] [--pairs 5]

The servers are those of `omniq.testing.servers`, on this machine, without waiting for its disk.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from omniq import AsyncTaskQueue, task
from omniq.testing.servers import PostgresServer, RedisServer

Noop = Callable[[str], Coroutine[Any, Any, None]]

BULK, CONCURRENCY = 1_000, 100
FLOOD, QUIET = 5_000, 50


@task
async def plain(tenant: str) -> None:
    """A task that does nothing."""


@task(fair_key=lambda tenant: tenant)
async def fair(tenant: str) -> None:
    """A task that does nothing, in the turn of its tenant."""


_seen: list[str] = []


@task(fair_key=lambda tenant: tenant)
async def seen(tenant: str) -> None:
    """A task that says whose turn it was."""
    _seen.append(tenant)


@contextlib.contextmanager
def stores(backend: str) -> Iterator[str]:
    """Yield the beginning of the URLs of any number of empty stores of one kind."""
    match backend:
        case "memory":
            yield "memory://"
        case "postgres":
            with PostgresServer() as server:
                yield f"{server.url}?schema=store"
        case "redis":
            with RedisServer() as server:
                yield f"{server.url}?prefix=store"
        case _:
            with tempfile.TemporaryDirectory(prefix="omniq-bench-") as folder:
                yield f"{backend}:///{folder}/store"


def url_of(base: str, number: int) -> str:
    """The URL of one of these stores."""
    if base == "memory://":
        return base
    is_local = base.startswith(("sqlite", "file"))
    return f"{base}{number}" + ("?durability=os" if is_local else "")


async def drain(url: str, function: Noop, count: int, tenants: int) -> tuple[float, float]:
    """Tasks a second of an enqueue in bulk, and of the drain."""
    async with AsyncTaskQueue(url) as queue:
        began = time.perf_counter()
        for start in range(0, count, BULK):
            numbers = range(start, min(start + BULK, count))
            await queue.enqueue_many(function, [(f"tenant {each % tenants}",) for each in numbers])
        enqueued = time.perf_counter()
        pool = queue.worker(concurrency=CONCURRENCY)
        await pool.run_until_empty()
        ended = time.perf_counter()
        if pool.stats().completed_tasks != count:
            raise SystemExit(f"{count} tasks were due and {pool.stats().completed_tasks} completed")
    return count / (enqueued - began), count / (ended - enqueued)


async def quiet_waits(url: str) -> list[float]:
    """The rounds that each task of a quiet tenant waited for, while another had flooded the queue."""
    waits: list[float] = []
    async with AsyncTaskQueue(url) as queue:
        for _ in range(FLOOD // BULK):
            await queue.enqueue_many(seen, [("flood",)] * BULK)
        pool = queue.worker(concurrency=1)
        async with pool:
            for _ in range(QUIET):
                _seen.clear()
                handle = await queue.enqueue(seen, "quiet")
                # In each round, the other tenant runs one task.
                before = len(_seen)
                await handle.result()
                waits.append(float(max(_seen.index("quiet") - before, 0)))
    return waits


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", choices=["fair"])
    parser.add_argument("--backend", default="memory")
    parser.add_argument("--tasks", type=int, default=20_000)
    parser.add_argument("--tenants", type=int, default=10_000)
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()
    ratios: list[tuple[float, float]] = []
    with stores(given.backend) as base:
        for pair in range(given.pairs):
            subjects = [(plain, 2 * pair), (fair, 2 * pair + 1)]
            rates = {}
            for function, number in subjects if pair % 2 else reversed(subjects):
                url = url_of(base, number)
                rates[function] = asyncio.run(drain(url, function, given.tasks, given.tenants))
            (bulk, drained), (fair_bulk, fair_drained) = rates[plain], rates[fair]
            ratios.append((fair_bulk / bulk, fair_drained / drained))
            print(
                f"enqueue {fair_bulk:,.0f} of {bulk:,.0f} a second, "
                f"drain {fair_drained:,.0f} of {drained:,.0f}",
                flush=True,
            )
        waits = sorted(asyncio.run(quiet_waits(url_of(base, 2 * given.pairs))))
    bulk, drained = (statistics.median(each) for each in zip(*ratios, strict=True))
    print(f"{given.backend}: enqueue {bulk:.2f} x, drain {drained:.2f} x of plain")
    print(f"a quiet tenant waits {statistics.median(waits):.1f} rounds, p99 {waits[-1]:.1f}")


if __name__ == "__main__":
    main()
