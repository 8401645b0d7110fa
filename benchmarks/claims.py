"""What a claim costs beside blocked keys and other services' tasks: `python -m benchmarks.claims`.

Prints, for each store:

- the time of a claim of 20 plain tasks beside few and many keys that a rate limit blocks for hours;
- the same beside no and many tasks of another service that stand before them in the same queue, by an
  owner with 50 modules;
- the longest single call of the store, and the time until 100 tasks are claimed, when many keys have
  room at once;
- what a plain task costs `omniq worker` and the server, in a drain, relative to a task of one limit that
  never blocks, and of keys with `max_running=1` of which 50 tasks were enqueued in a row: elapsed time, and
  CPU time of both. (0.5: a task with the limit costs twice as much.)

Times are medians of interleaved rounds in one run.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.compare import DEFAULT_STORES, url_of
from benchmarks.compare import measure as measure_worker
from benchmarks.compare_producer import LIMITS
from benchmarks.stores import ROOT, Store, open_store
from omniq.models import Limit, Runnable, Task, TaskResult, TaskStatus
from omniq.outcomes import Succeeded
from omniq.settings import Settings
from omniq.storage.base import BaseStorage
from omniq.storage.urls import open_storage

CLAIMED = 20
HOURS = 36_000.0
MODULES = tuple(f"service{number}" for number in range(50))
RUNNABLE = Runnable(modules=MODULES)


@asynccontextmanager
async def empty_storage(store: Store) -> AsyncIterator[BaseStorage]:
    """A storage on an empty store."""
    fresh = store.fresh()
    # In a thread: a server is emptied with a separate event loop.
    await asyncio.to_thread(fresh.__enter__)
    try:
        async with open_storage(url_of(store), settings=Settings(lease=600.0)) as storage:
            yield storage
    finally:
        await asyncio.to_thread(fresh.__exit__, None, None, None)


async def fill(storage: BaseStorage, tasks: Iterable[Task]) -> None:
    """Enqueue the tasks, 1,000 at a time."""
    batch: list[Task] = []
    for task in tasks:
        batch.append(task)
        if len(batch) == 1_000:
            await storage.enqueue_many(batch)
            batch = []
    await storage.enqueue_many(batch)


async def finish(storage: BaseStorage, tasks: Iterable[Task]) -> None:
    """Record the success of claimed tasks."""
    await storage.record([success(task) for task in tasks])


def success(task: Task) -> Succeeded:
    return Succeeded(task.id, task.token, TaskResult(task_id=task.id, status=TaskStatus.SUCCESS))


async def block_keys(storage: BaseStorage, count: int, span: float) -> None:
    """Block that many keys for `span` seconds: of each, one task has started and one waits."""
    for _ in range(2):
        await fill(
            storage,
            (
                Task(func_path="service0.limited", limits=(Limit(key=f"k{n}", rate=1, per=span),))
                for n in range(count)
            ),
        )
    started = 0
    while started < count:
        claimed = await storage.reserve(1_000)
        await finish(storage, claimed)
        started += len(claimed)
    # Parks the others.
    assert await storage.reserve(1) == []


async def time_of_claim(storage: BaseStorage, runnable: Runnable | None) -> float:
    """Milliseconds of one claim of plain tasks."""
    await storage.enqueue_many(
        [
            Task(func_path=f"{MODULES[number % len(MODULES)]}.plain", result_ttl=0)
            for number in range(CLAIMED)
        ]
    )
    gc.collect()
    began = time.perf_counter()
    claimed = await storage.reserve(CLAIMED, runnable=runnable)
    elapsed = time.perf_counter() - began
    assert len(claimed) == CLAIMED
    await finish(storage, claimed)
    return elapsed * 1_000


Prepare = Callable[[BaseStorage, int], Any]


async def claims_beside(
    store: Store, few: int, many: int, rounds: int, prepare: Prepare, runnable: Runnable | None
) -> tuple[float, float]:
    """Median times of a claim beside few and beside many."""
    medians = []
    for count in (few, many):
        async with empty_storage(store) as storage:
            await prepare(storage, count)
            # Else the first syncs of a claim wait for what was prepared.
            await asyncio.to_thread(os.sync)
            times = [await time_of_claim(storage, runnable) for _ in range(rounds)]
            medians.append(statistics.median(times))
    return medians[0], medians[1]


async def others_before(storage: BaseStorage, count: int) -> None:
    """Enqueue tasks of another service, before all others."""
    await fill(storage, (Task(func_path="other.task", priority=1) for _ in range(count)))


async def wake(store: Store, count: int) -> tuple[float, float]:
    """Milliseconds of the longest call, and until 100 tasks are claimed, when the keys have room."""
    span = 5.0 + count / 2_000
    async with empty_storage(store) as storage:
        await block_keys(storage, count, span)
        await asyncio.sleep(span + 0.5)
        longest = measure_calls(storage)
        began = time.perf_counter()
        claimed = await storage.reserve(100)
        elapsed = time.perf_counter() - began
        assert len(claimed) == 100
        return max(longest) * 1_000, elapsed * 1_000


def measure_calls(storage: BaseStorage) -> list[float]:
    """A list that gets the seconds of each section and fast path of the storage from now on."""
    backend, seconds = storage._engine.backend, [0.0]

    def measure(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        async def measured(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return await call(*args, **options)
            finally:
                seconds.append(time.perf_counter() - began)

        setattr(owner, name, measured)

    measure(backend, "transact")
    if backend.fast_path is not None:
        measure(backend.fast_path, "record_and_claim")
    return seconds


def drains(store: Store, count: int, rounds: int) -> Iterator[str]:
    """A line for each kind of limit: what a plain task costs, relative to one with the limit."""
    spent: dict[str, list[dict[str, float]]] = {kind: [] for kind in LIMITS}
    for number in range(rounds + 1):
        for kind in LIMITS if number % 2 else reversed(LIMITS):
            found = measure_worker("drain", ROOT / "src", store, count, COMPARE_LIMITS=kind)
            if number:  # the first round fills caches
                spent[kind].append({**found, "both": found["cpu"] + found["server"]})
    for kind, name in (("never", "a limit that never blocks"), ("row", "50 of a key in a row")):
        ratios = []
        for figure, unit in (("seconds", "elapsed"), ("both", "CPU"), ("cpu", "of the worker")):
            paired = zip(spent[""], spent[kind], strict=True)
            ratio = statistics.median(plain[figure] / limited[figure] for plain, limited in paired)
            now = statistics.median(limited[figure] for limited in spent[kind])
            ratios.append(f"{unit} {ratio:.2f} x plain ({now * 1e6:.0f} µs)")
        yield f"drain through {name}: {', '.join(ratios)}"


async def measure(store: Store, options: argparse.Namespace) -> None:
    rounds = options.rounds
    few, many = await claims_beside(
        store, 10, options.keys, rounds, lambda s, n: block_keys(s, n, HOURS), None
    )
    print(
        f"{store.name}: claim of {CLAIMED} beside 10 blocked keys {few:.2f} ms, beside "
        f"{options.keys:,} {many:.2f} ms: {many / few:.2f} x",
        flush=True,
    )
    few, many = await claims_beside(store, 0, options.others, rounds, others_before, RUNNABLE)
    print(
        f"{store.name}: beside no others {few:.2f} ms, beside {options.others:,} of another "
        f"service {many:.2f} ms: {many / few:.2f} x",
        flush=True,
    )
    longest, elapsed = await wake(store, options.waking)
    print(
        f"{store.name}: {options.waking:,} keys have room at once: longest call {longest:.1f} ms, "
        f"100 claimed after {elapsed:.1f} ms",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(DEFAULT_STORES))
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--others", type=int, default=1_000_000)
    parser.add_argument("--waking", type=int, default=10_000)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--drains-only", action="store_true")
    options = parser.parse_args()
    for name in options.only.split(","):
        with open_store(name) as store:
            if not options.drains_only:
                asyncio.run(measure(store, options))
            for line in drains(store, options.tasks, min(options.rounds, 5)):
                print(f"{name}: {line}", flush=True)


if __name__ == "__main__":
    main()
