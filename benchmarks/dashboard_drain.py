"""Does a watched queue drain as fast as one that nobody watches?

Drains the same tasks in pairs, alone and with three open dashboards that are served by another
process, and prints the ratio of the rates of each pair.

    python benchmarks/dashboard_drain.py [PAIRS] [TASKS]
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from omniq import AsyncTaskQueue

SECRET = "a secret of the benchmark"
WATCHERS = 3


async def nothing(number: int) -> int:
    """A task that costs nothing but its own handling."""
    return number


async def drain(url: str, tasks: int) -> float:
    """Tasks a second."""
    async with AsyncTaskQueue(url) as queue:
        await queue.enqueue_many(nothing, list(range(tasks)))
        async with queue.worker(concurrency=50) as pool:
            began = time.perf_counter()
            await pool.run_until_empty()
            return tasks / (time.perf_counter() - began)


def watched_drain(url: str, tasks: int) -> float:
    """The same, while a process serves three dashboards."""
    process = subprocess.Popen(
        [sys.executable, "-m", "omniq", "dashboard", "--port", "0", "--url", url],
        env={**os.environ, "OMNIQ_DASHBOARD_OPERATOR": SECRET},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        return asyncio.run(drain_before(process.stdout.readline().strip(), url, tasks))
    finally:
        process.terminate()
        process.wait()


async def drain_before(address: str, url: str, tasks: int) -> float:
    """The same, while three watch at that address."""
    headers = {"authorization": f"Bearer {SECRET}"}
    async with httpx.AsyncClient(base_url=address, headers=headers, timeout=60) as client:
        watching = [asyncio.create_task(watch(client)) for _ in range(WATCHERS)]
        rate = await drain(url, tasks)
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        return rate


async def watch(client: httpx.AsyncClient) -> None:
    """What an open page does: it listens, and asks for itself at every look."""
    async with client.stream("GET", "/api/stream") as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                await client.get("/")


def main(pairs: int, tasks: int) -> None:
    """Measure in pairs, so that whatever else the machine does is the same for both."""
    ratios = []
    for number in range(pairs):
        with tempfile.TemporaryDirectory() as folder:
            urls = [f"sqlite:///{Path(folder)}/{name}.db" for name in ("alone", "watched")]
            alone = asyncio.run(drain(urls[0], tasks))
            watched = watched_drain(urls[1], tasks)
        ratios.append(watched / alone)
        print(f"{number + 1}: {alone:8,.0f} alone {watched:8,.0f} watched  {ratios[-1]:.2f}")
    print(f"median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:]]
    main(*(given or [5, 20_000]))
