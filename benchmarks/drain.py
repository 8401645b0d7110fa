"""Does draining a queue cost the same however much there is? Prints ratios, and asserts nothing.

For each backend: tasks a second draining a long queue against a short one, and a short one with
many tasks due tomorrow beside it against one alone. A drain is what a worker's loop does to the
storage: record what finished and claim the next batch, results kept, default durability. Each
ratio is the median of interleaved pairs, so that a noisy machine troubles both sides alike.

    python benchmarks/drain.py [--backend memory|file|sqlite] [--pairs 5] [--durability power|os]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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

BATCH = 100
ENQUEUE_BATCH = 1000


async def fill(storage: BaseStorage, count: int, eta: datetime | None = None) -> None:
    for start in range(0, count, ENQUEUE_BATCH):
        batch = range(start, min(start + ENQUEUE_BATCH, count))
        await storage.enqueue_many(
            [Task(func_path="bench.noop", args=(number,), eta=eta) for number in batch]
        )


async def drain(storage: BaseStorage) -> int:
    """Claim and finish everything that is due; how many tasks that were, each once."""
    seen: set[str] = set()
    count = 0
    outcomes: list[Succeeded] = []
    while True:
        _, claimed = await storage.record_and_reserve(outcomes, BATCH)
        if not claimed:
            break
        count += len(claimed)
        seen.update(task.id for task in claimed)
        outcomes = [
            Succeeded(
                task.id,
                task.token,
                TaskResult(task_id=task.id, status=TaskStatus.SUCCESS, result=None, attempts=1),
            )
            for task in claimed
        ]
    if len(seen) != count:
        sys.exit(f"{count - len(seen)} tasks were claimed twice")
    return count


@contextlib.contextmanager
def a_store(backend: str, durability: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="omniq-bench-") as folder:
        place = Path(folder, "store")
        yield {
            "memory": "memory://",
            "file": f"file://{place}?durability={durability}",
            "sqlite": f"sqlite:///{place}.db?durability={durability}",
        }[backend]


async def rate(url: str, due: int, tomorrow: int) -> float:
    """Tasks a second draining `due` tasks with `tomorrow` others beside them."""
    async with open_storage(url) as storage:
        await fill(storage, tomorrow, eta=datetime.now(UTC) + timedelta(days=1))
        await fill(storage, due)
        start = time.perf_counter()
        drained = await drain(storage)
        seconds = time.perf_counter() - start
    if drained != due:
        sys.exit(f"{due} tasks were due and {drained} were drained")
    return drained / seconds


def measure(backend: str, durability: str, due: int, tomorrow: int) -> float:
    with a_store(backend, durability) as url:
        return asyncio.run(rate(url, due, tomorrow))


def compare(backend: str, arguments: argparse.Namespace) -> None:
    long_pairs, crowded_pairs, alone = [], [], []
    for _ in range(arguments.pairs):
        short = measure(backend, arguments.durability, arguments.short, 0)
        long = measure(backend, arguments.durability, arguments.long, 0)
        crowded = measure(backend, arguments.durability, arguments.short, arguments.tomorrow)
        alone.append(short)
        long_pairs.append(long / short)
        crowded_pairs.append(crowded / short)
    print(
        f"{backend:8} {statistics.median(alone):>12,.0f} {statistics.median(long_pairs):>14.2f} "
        f"{statistics.median(crowded_pairs):>16.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", choices=["memory", "file", "sqlite"], action="append")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--durability", choices=["power", "os"], default="power")
    parser.add_argument("--short", type=int, default=5_000)
    parser.add_argument("--long", type=int, default=50_000)
    parser.add_argument("--tomorrow", type=int, default=100_000)
    arguments = parser.parse_args()
    print(
        f"median of {arguments.pairs} interleaved pairs, durability={arguments.durability}, "
        f"batches of {BATCH}; ratios to {arguments.short:,} tasks alone"
    )
    print(
        f"{'backend':8} {'tasks/s':>12} {f'{arguments.long:,} queued':>14} "
        f"{f'{arguments.tomorrow:,} later':>16}"
    )
    for backend in arguments.backend or ["memory", "sqlite", "file"]:
        compare(backend, arguments)


if __name__ == "__main__":
    main()
