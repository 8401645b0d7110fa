"""How close omniq comes to what each store can do. Prints one table, and asserts nothing.

For each backend: tasks a second of omniq and of the driver's own loop (`raw.py`) with the same
durability, the share of the one in the other, and the CPU of a task: in this process, and in the
server. Medians of interleaved pairs; every drain checks that each task ran once.

    python benchmarks/limits.py [--backend postgres] [--pairs 3] [--tasks 5000] [--durability os]

drain     a worker at concurrency 100 with results kept; raw: end and claim, 100 at a time
          (memory: `create_task` with a callback, 100 at a time)
bulk      enqueue, 1,000 at a time
single    enqueue one by one, each awaited
together  the same by 100 callers at once; raw: one by one, there being nothing to gather them
latency   p50 from an enqueue to the start of its task on an idle worker in another process

PostgreSQL and Redis are started here, and wait for the disk unless `--durability os` is given.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from omniq import AsyncTaskQueue
from omniq.testing.servers import PostgresServer, RedisServer, Server

sys.path.insert(0, str(Path(__file__).parent))

from pool import across_processes, noop
from raw import Raw, raw_store

BACKENDS = ("memory", "sqlite", "file", "postgres", "redis")
FIGURES = ("drain", "bulk", "single", "together")
BATCH, BULK, CALLERS = 100, 1_000, 100


@dataclass
class Cost:
    """Tasks a second, and the CPU of one in microseconds: here, and in the server."""

    rate: float
    cpu: float
    server_cpu: float


class Place:
    """Where one backend keeps its tasks: a fresh store for each measurement."""

    def __init__(self, backend: str, folder: Path, durability: str, server: Server | None) -> None:
        self.backend = backend
        self.folder = folder
        self.durability = durability
        self.server = server

    def url(self) -> str:
        name = f"s{uuid4().hex[:8]}"
        match self.backend:
            case "memory":
                return "memory://"
            case "sqlite":
                return f"sqlite:///{self.folder}/{name}.db?durability={self.durability}"
            case "file":
                return f"file://{self.folder}/{name}?durability={self.durability}"
        assert self.server is not None
        return f"{self.server.url}?{'schema' if self.backend == 'postgres' else 'prefix'}={name}"

    def raw(self) -> Raw:
        return raw_store(self.url(), self.folder, self.durability)

    async def cost(self, count: int, work: Callable[[], Awaitable[None]]) -> Cost:
        """What `work`, which does something with so many tasks, takes."""
        server, own, began = self._server_seconds(), time.process_time(), time.perf_counter()
        await work()
        seconds = time.perf_counter() - began
        own = time.process_time() - own
        return Cost(
            count / seconds, own / count * 1e6, (self._server_seconds() - server) / count * 1e6
        )

    def _server_seconds(self) -> float:
        return 0.0 if self.server is None else cpu_seconds(self.server.pid)


def cpu_seconds(pid: int) -> float:
    """What a process and its living children have used. Zero where the system does not tell."""
    seconds, pids = 0.0, [pid]
    for each in pids:
        try:
            seconds += int(Path(f"/proc/{each}/schedstat").read_text().split()[0]) / 1e9
            for thread in os.listdir(f"/proc/{each}/task"):
                children = Path(f"/proc/{each}/task/{thread}/children").read_text()
                pids += map(int, children.split())
        except OSError:
            continue
    return seconds


# omniq


async def measure(place: Place, figure: str, count: int) -> Cost:
    async with AsyncTaskQueue(place.url()) as queue:
        await queue.enqueue("pool.noop")
        await queue.worker(concurrency=BATCH).run_until_empty()
        if figure == "drain":
            await bulk(queue, count)
            return await place.cost(count, lambda: drain(queue, count))
        work = {"bulk": bulk, "single": single, "together": together}[figure]
        return await place.cost(count, lambda: work(queue, count))


async def bulk(queue: AsyncTaskQueue, count: int) -> None:
    for start in range(0, count, BULK):
        await queue.enqueue_many("pool.noop", [()] * min(BULK, count - start))


async def single(queue: AsyncTaskQueue, count: int) -> None:
    for _ in range(count):
        await queue.enqueue("pool.noop")


async def together(queue: AsyncTaskQueue, count: int) -> None:
    await asyncio.gather(*(single(queue, count // CALLERS) for _ in range(CALLERS)))


async def drain(queue: AsyncTaskQueue, count: int) -> None:
    pool = queue.worker(concurrency=BATCH)
    await pool.run_until_empty()
    if pool.stats().completed_tasks != count:
        sys.exit(f"{count} tasks were due and {pool.stats().completed_tasks} completed")


# The driver alone


async def measure_raw(place: Place, figure: str, count: int) -> Cost | None:
    """The same figure for the raw loop; None where there is nothing to compare."""
    if place.backend == "memory":
        return await place.cost(count, lambda: run_bare(count)) if figure == "drain" else None
    async with place.raw() as store:
        await store.enqueue(1)
        await store.turn(await store.turn([], 1), 1)
        match figure:
            case "drain":
                await raw_bulk(store, count, BULK)
                return await place.cost(count, lambda: raw_drain(store, count))
            case "bulk":
                return await place.cost(count, lambda: raw_bulk(store, count, BULK))
            case _:
                return await place.cost(count, lambda: raw_bulk(store, count, 1))


async def raw_bulk(store: Raw, count: int, size: int) -> None:
    for start in range(0, count, size):
        await store.enqueue(min(size, count - start))


async def raw_drain(store: Raw, count: int) -> None:
    seen: set[str] = set()
    claimed: list[str] = []
    while claimed := await store.turn(claimed, BATCH):
        seen.update(claimed)
    if len(seen) != count:
        sys.exit(f"the raw loop drained {len(seen)} of {count} tasks")


async def run_bare(count: int) -> None:
    """The least that an event loop does for a task."""
    ended: list[object] = []
    for _ in range(0, count, BATCH):
        for _ in range(BATCH):
            asyncio.get_running_loop().create_task(noop()).add_done_callback(ended.append)
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    if len(ended) < count:
        sys.exit(f"the raw loop ran {len(ended)} of {count} tasks")


# The table


def compare(place: Place, figure: str, arguments: argparse.Namespace) -> None:
    # What waits for the disk each time is slow; a fifth of it says as much.
    count = max(CALLERS, arguments.tasks // 5) if figure == "single" else arguments.tasks
    costs, raws = [], []
    for _ in range(arguments.pairs):
        costs.append(asyncio.run(measure(place, figure, count)))
        raw = asyncio.run(measure_raw(place, figure, count))
        raws += [] if raw is None else [raw]
    shares = [cost.rate / raw.rate for cost, raw in zip(costs, raws, strict=False)]
    print(
        f"{place.backend:9} {figure:9} {middle([cost.rate for cost in costs]):>10,.0f} "
        f"{f'{middle([raw.rate for raw in raws]):,.0f}' if raws else '-':>10} "
        f"{f'{middle(shares):.0%}' if raws else '-':>7} "
        f"{middle([cost.cpu for cost in costs]):>8.1f} "
        f"{middle([cost.server_cpu for cost in costs]):>8.1f} "
        f"{f'{middle([raw.cpu for raw in raws]):.1f}' if raws else '-':>8} "
        f"{f'{middle([raw.server_cpu for raw in raws]):.1f}' if raws else '-':>8}",
        flush=True,
    )


def middle(values: list[float]) -> float:
    return statistics.median(values)


def show_latency(place: Place) -> None:
    if place.backend != "memory":
        seconds = asyncio.run(across_processes(place.url()))
        print(f"{place.backend:9} latency   p50 {middle(seconds) * 1000:.2f} ms", flush=True)


@contextmanager
def a_place(backend: str, durability: str) -> Iterator[Place]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omniq-bench-")))
        kind = {"postgres": PostgresServer, "redis": RedisServer}.get(backend)
        server = None if kind is None else stack.enter_context(kind(durable=durability == "power"))
        yield Place(backend, folder, durability, server)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", choices=BACKENDS, action="append")
    parser.add_argument("--figure", choices=[*FIGURES, "latency"], action="append")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=5_000)
    parser.add_argument("--durability", choices=["power", "os"], default="power")
    arguments = parser.parse_args()
    figures = arguments.figure or [*FIGURES, "latency"]
    print(
        f"medians of {arguments.pairs} interleaved pairs, {arguments.tasks:,} tasks, "
        f"durability={arguments.durability}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    print(
        f"{'backend':9} {'figure':9} {'tasks/s':>10} {'raw':>10} {'share':>7} "
        f"{'CPU us':>8} {'server':>8} {'raw CPU':>8} {'server':>8}"
    )
    for backend in arguments.backend or BACKENDS:
        with a_place(backend, arguments.durability) as place:
            for figure in FIGURES:
                if figure in figures:
                    compare(place, figure, arguments)
            if "latency" in figures:
                show_latency(place)


if __name__ == "__main__":
    main()
