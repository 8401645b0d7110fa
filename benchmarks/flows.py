"""What do workflows cost? `python -m benchmarks.flows` measures, prints a table, and asserts nothing.

| figure | what it is |
|---|---|
| chain | CPU of worker and server for a node of 10-node chains, to a plain task; drains in turns, median of pairs |
| group | the same for a member of a group of 1,000 |
| fan-in | CPU of a group of 100,000 members and one callback, to one of 10,000 |
| fan-out | the longest call of the store while the end of one task releases 100,000 |
| parents | 1,000 tasks that wait for 10 children each, with 10 slots: whether all finish |
| suspended | CPU of plain tasks beside 100,000 that wait for an event, to without them; above 1: slower |

    python -m benchmarks.flows [--only memory,sqlite-os] [--figures chain,group] [--tasks 10000] [--rounds 5] [--large 100000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.compare import url_of
from benchmarks.processes import exact_cpu_seconds
from benchmarks.stores import ROOT, Store, open_store
from omniq import AsyncTaskQueue, Flow, TaskContext, task
from omniq.models import TaskStatus

DEFAULT_STORES = ("memory", "sqlite-os", "file-os", "postgres", "redis")
FIGURES = ("chain", "group", "fan-in", "fan-out", "parents", "suspended")
BULK, CHAIN, GROUP, CONCURRENCY = 1_000, 10, 1_000, 100
_PARENTS, _CHILDREN, _SLOTS = 1_000, 10, 10


@task
async def noop(number: int) -> None:
    """A plain task, and each node of a flow."""


@task
async def tally(numbers: list[None]) -> int:
    """The callback of a group."""
    return len(numbers)


@task
async def with_children(ctx: TaskContext, number: int) -> int:
    """A task that waits for its children."""
    return len(await ctx.map("child", noop, range(_CHILDREN)))


# Work: each fills a store with about that many tasks


async def _plain(queue: AsyncTaskQueue, count: int) -> None:
    for start in range(0, count, BULK):
        await queue.enqueue_many(noop, [(number,) for number in range(start, start + BULK)])


async def _chains(queue: AsyncTaskQueue, count: int) -> None:
    for _ in range(count // CHAIN):
        flow = Flow()
        after: list[Any] = []
        for node in range(CHAIN):
            after = [flow.options(after=after).add(f"n{node}", noop, node)]
        await queue.start(flow)


async def _groups(queue: AsyncTaskQueue, count: int) -> None:
    size = min(GROUP, count) - 2
    for _ in range(count // (size + 2)):
        await queue.start(Flow.group(noop, range(size)))


async def _fan_in(queue: AsyncTaskQueue, count: int) -> None:
    flow = Flow()
    flow.options(after=[flow.map("m", noop, range(count))]).add("callback", noop, 0)
    await queue.start(flow)


async def _fan_out(queue: AsyncTaskQueue, count: int) -> None:
    source = await queue.enqueue(noop, 0)
    for start in range(0, count, BULK):
        numbers = [(number,) for number in range(start, start + BULK)]
        await queue.options(after=[source]).enqueue_many(noop, numbers)


async def _parents(queue: AsyncTaskQueue, count: int) -> None:
    await queue.enqueue_many(with_children, [(number,) for number in range(count)])


async def _suspended(queue: AsyncTaskQueue, count: int) -> None:
    """Plain tasks beside ten times as many that wait for a task that is due in a day."""
    source = await queue.options(delay=86_400).enqueue(noop, 0)
    for start in range(0, 10 * count, BULK):
        numbers = [(number,) for number in range(start, start + BULK)]
        await queue.options(after=[source]).enqueue_many(noop, numbers)
    await _plain(queue, count)


WORK = {
    "plain": _plain,
    "chain": _chains,
    "group": _groups,
    "fan-in": _fan_in,
    "fan-out": _fan_out,
    "parents": _parents,
    "suspended": _suspended,
}


# One drain, in a process of its own


async def drain(kind: str, url: str, count: int, server: int) -> dict[str, float]:
    """Fill the store and drain it: CPU seconds of this process and the server, and the longest call."""

    def spent() -> float:
        return time.process_time() + (exact_cpu_seconds(server) if server else 0.0)

    async with AsyncTaskQueue(url) as queue:
        began = spent()
        await WORK[kind](queue, count)
        filled = spent()
        longest = _longest_call(queue)
        slots = _SLOTS if kind == "parents" else CONCURRENCY
        pool = queue.worker(concurrency=slots, poll_interval=0.1)
        before = time.monotonic()
        await pool.run_until_empty()
        while kind == "fan-out" and await queue.storage.advance_flows():
            await queue.worker(concurrency=slots).run_until_empty()
        seconds = time.monotonic() - before
        drained = spent()
        stats = await queue.storage.stats()
        return {
            "fill": filled - began,
            "drain": drained - filled,
            "seconds": seconds,
            "longest": longest[0],
            "tasks": pool.stats().completed_tasks,
            "ended": stats.by_status.get(TaskStatus.SUCCESS, 0),
        }


def _longest_call(queue: AsyncTaskQueue) -> list[float]:
    """The time of the longest call that claims, records or goes on with a release."""
    longest = [0.0]

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        async def timed_call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return await call(*args, **kwargs)
            finally:
                longest[0] = max(longest[0], time.perf_counter() - began)

        return timed_call

    for name in ("record_and_reserve", "advance_flows"):
        setattr(queue.storage, name, timed(getattr(queue.storage, name)))
    return longest


def measure(kind: str, store: Store, count: int) -> dict[str, float]:
    """One drain on an empty store."""
    with store.fresh():
        pid = "0" if store.server is None else str(store.server.pid)
        command = [sys.executable, "-m", "benchmarks.flows", "--drain", kind, url_of(store)]
        done = subprocess.run(
            [*command, str(count), pid],
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
            stdout=subprocess.PIPE,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{kind} on {store.name} failed")
        measured: dict[str, float] = json.loads(done.stdout)
        return measured


# The figures


def cost(kind: str, store: Store, count: int, rounds: int) -> str:
    """CPU of a node or a member, to that of a plain task: medians of paired drains."""
    ratios, fills, costs = [], [], []
    for number in range(rounds):
        order = ("plain", kind) if number % 2 else (kind, "plain")
        pair = {each: measure(each, store, count) for each in order}
        each = {name: spent["drain"] / spent["tasks"] for name, spent in pair.items()}
        fill = {name: spent["fill"] / spent["tasks"] for name, spent in pair.items()}
        ratios.append(each[kind] / each["plain"])
        fills.append(fill[kind] / fill["plain"])
        costs.append((each["plain"], each[kind]))
    low, high = min(ratios), max(ratios)
    plain, other = (statistics.median(values) * 1e6 for values in zip(*costs, strict=True))
    return (
        f"{statistics.median(ratios):.2f} x ({low:.2f} to {high:.2f}), {other:.0f} of {plain:.0f} µs; "
        f"start {statistics.median(fills):.2f} x"
    )


def figure(name: str, store: Store, given: argparse.Namespace) -> str:
    """The figure as text."""
    large = given.large
    match name:
        case "chain" | "group":
            return cost(name, store, given.tasks, given.rounds)
        case "fan-in":
            small, big = (measure(name, store, count) for count in (large // 10, large))
            return f"{big['drain'] / small['drain']:.1f} x of a tenth, {large} members"
        case "fan-out":
            spent = measure(name, store, large)
            return f"longest call {spent['longest'] * 1e3:.0f} ms, {spent['ended']:.0f} released"
        case "parents":
            spent = measure(name, store, _PARENTS)
            return f"{spent['ended']:.0f} ended in {spent['seconds']:.1f} s"
        case _:
            ratios = []
            for _ in range(given.rounds):
                beside = measure(name, store, large // 10)
                ratios.append(beside["drain"] / measure("plain", store, large // 10)["drain"])
            return f"{statistics.median(ratios):.2f} x beside {large}"


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flows")
    parser.add_argument("--only", default=",".join(DEFAULT_STORES), help="stores, with commas")
    parser.add_argument("--figures", default=",".join(FIGURES), help="with commas")
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--large", type=int, default=100_000)
    parser.add_argument("--drain", nargs=4, metavar=("KIND", "URL", "COUNT", "SERVER"))
    given = parser.parse_args()
    if given.drain:
        kind, url, count, server = given.drain
        print(json.dumps(asyncio.run(drain(kind, url, int(count), int(server)))))
        return
    for store_name in given.only.split(","):
        with open_store(store_name) as store:
            for name in given.figures.split(","):
                print(f"| {store_name} | {name} | {figure(name, store, given)} |", flush=True)


if __name__ == "__main__":
    main()
