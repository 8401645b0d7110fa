"""What both sides of a comparison share: the sizes of the work, and how a side says what it took.

A side is a program: `python -m benchmarks.flow_peers.SIDE FIGURE COUNT`. It fills the store at BENCH_URL, drains it
with one worker, and prints one line of JSON. It counts the runs, since the last one ends the time.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass

OF_A_KEY = 50
"""Tasks, or submissions, of each key."""

SETTLE = 0.5
"""Seconds without another submission after which a debounced task runs."""

SIZE, WAIT = 100, 0.2
"""How many items a batch has, and how long it waits for them."""

CONCURRENCY, PRODUCERS = 100, 100


@dataclass
class Meter:
    """Seconds and CPU seconds of this process, while it fills and while it drains."""

    figure: str
    count: int
    ran: int = 0
    fill: float = 0.0
    fill_cpu: float = 0.0
    drain: float = 0.0
    drain_cpu: float = 0.0

    @classmethod
    def of_arguments(cls) -> Meter:
        """The work that the command line names."""
        return cls(sys.argv[1], int(sys.argv[2]))

    def __post_init__(self) -> None:
        self.done = asyncio.Event()
        """Set when all have run; for a side that has no call which waits for that."""

    def count_runs(self, count: int) -> None:
        """Note that many runs. On the event loop."""
        self.ran += count
        if self.ran >= self.expected:
            self.done.set()

    @property
    def expected(self) -> int:
        """How many runs there are."""
        return self.count // OF_A_KEY if self.figure == "debounce" else self.count

    def key(self, number: int) -> str:
        """The key of the task with that number: those of a key are far from each other."""
        return f"key {number % (self.count // OF_A_KEY)}"

    async def filled(self, enqueue: Callable[[int], Awaitable[object]]) -> None:
        """Enqueue all, as many producers do at the same time."""
        began, cpu = time.perf_counter(), time.process_time()
        for start in range(0, self.count, PRODUCERS):
            numbers = range(start, min(start + PRODUCERS, self.count))
            await asyncio.gather(*map(enqueue, numbers))
        self.fill, self.fill_cpu = time.perf_counter() - began, time.process_time() - cpu

    async def drained(self, work: Callable[[], Awaitable[object]]) -> None:
        """Run all, and check that each key or task had its run."""
        began, cpu = time.perf_counter(), time.process_time()
        await work()
        self.drain, self.drain_cpu = time.perf_counter() - began, time.process_time() - cpu

    def print(self) -> None:
        """One line for the program that compares."""
        # A debounced task runs again if a submission comes later than the time to settle: on a busy machine some do.
        if self.ran < self.expected:
            raise SystemExit(f"{self.ran} runs, and not {self.expected}")
        print(json.dumps(asdict(self)), flush=True)
