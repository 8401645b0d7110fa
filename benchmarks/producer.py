"""Enqueues for one peer, in the peer's environment: `python -m benchmarks.producer PEER FIGURE COUNT SECONDS`.

Prints one line of JSON. Stops after SECONDS when a peer is too slow for COUNT; a fill continues for
three times as long while it has fewer than 20,000.

fill, later  how many tasks are now queued, or due in an hour, in the fastest way the peer has
bulk         tasks a second, 1,000 in each call
single       tasks a second, one awaited after the other
together     tasks a second, by 100 concurrent callers, each awaiting one after the other
latency      milliseconds from just before each enqueue to the start of its task on an idle worker
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import run_context

BULK, CALLERS, CHECK_EVERY = 1_000, 100, 5
# The rate of some peers depends on the length of the queue: a short one would favour slow peers.
LEAST, PATIENCE = 20_000, 3
FIRST_LATENCIES = 10


async def call(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function of a peer, which may be a plain one or a coroutine."""
    value = function(*arguments)
    return await value if inspect.isawaitable(value) else value


class Producer:
    """One peer that enqueues for a limited time."""

    def __init__(self, name: str, figure: str, count: int, seconds: float) -> None:
        self.peer = importlib.import_module(f"benchmarks.peers.{name}")
        self.count = count
        self.seconds = seconds
        self._least = LEAST if figure == "fill" else 0
        self._until = 0.0
        self._next = 0

    def begin(self) -> None:
        self._until = time.monotonic() + self.seconds

    @property
    def is_over(self) -> bool:
        if self._next >= self.count:
            return True
        allowed = self.seconds * (PATIENCE - 1) if self._next < self._least else 0.0
        return time.monotonic() > self._until + allowed

    def take(self, size: int) -> range:
        """Return the numbers of the next tasks."""
        first = self._next
        self._next = min(first + size, self.count)
        return range(first, self._next)

    async def fill(self) -> int:
        self.begin()
        if hasattr(self.peer, "many"):
            await self._in_bulk(self.peer.many)
        elif inspect.iscoroutinefunction(self.peer.one):
            await asyncio.gather(*(self._one_by_one() for _ in range(CALLERS)))
        else:
            await self._one_by_one()
        return self._next

    async def later(self) -> int:
        self.begin()
        await self._in_bulk(self.peer.later)
        return self._next

    async def bulk(self) -> float | None:
        return await self._rate(self._in_bulk(self.peer.many))

    async def single(self) -> float:
        return await self._rate(self._one_by_one())

    async def together(self) -> float:
        async def all_of_them() -> None:
            await asyncio.gather(*(self._one_by_one() for _ in range(CALLERS)))

        return await self._rate(all_of_them())

    async def latency(self) -> list[float]:
        """Measure after a line on standard input: the worker has to start and become idle first."""
        starts = run_context.start_times
        assert starts is not None
        await call(self.peer.one, 0)
        print("open", flush=True)
        sys.stdin.readline()
        self.begin()
        self.take(1)
        found = []
        while not self.is_over:
            number = self.take(1)[0]
            began = time.monotonic_ns()
            await call(self.peer.one, number)
            # Another process records the start: no event in this process could end the wait.
            while not starts.has_started(number) and time.monotonic() < self._until:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            if starts.has_started(number):
                found.append((starts.started_at(number) - began) / 1e6)
            await asyncio.sleep(0.015)
        return found[FIRST_LATENCIES:] or found

    async def _rate(self, work: Any) -> float:
        """Measure after one task, which pays the cost that only the first one has."""
        await call(self.peer.one, self.count)
        self.begin()
        began = time.perf_counter()
        await work
        return self._next / (time.perf_counter() - began)

    async def _in_bulk(self, enqueue: Callable[..., Any]) -> None:
        while not self.is_over:
            await call(enqueue, self.take(BULK))

    async def _one_by_one(self) -> None:
        one = self.peer.one
        is_async = inspect.iscoroutinefunction(one)
        while not self.is_over:
            for number in self.take(CHECK_EVERY):
                if is_async:
                    await one(number)
                else:
                    one(number)


async def produce(name: str, figure: str, count: int, seconds: float) -> Any:
    producer = Producer(name, figure, count, seconds)
    await call(producer.peer.open)
    try:
        return await getattr(producer, figure)()
    finally:
        await call(producer.peer.close)


if __name__ == "__main__":
    run_context.use_uvloop()
    _, peer, wanted, how_many, how_long = sys.argv
    print(
        json.dumps(asyncio.run(produce(peer, wanted, int(how_many), float(how_long)))), flush=True
    )
