"""Does a queue drain as fast while dashboards are open?

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

from omniq import AsyncTaskQueue, task

SECRET = "a secret of the benchmark"
VIEWERS = 3


@task
async def nothing(number: int) -> int:
    """A task that does nothing."""
    return number


async def drain(url: str, tasks: int) -> float:
    """Return tasks a second."""
    async with AsyncTaskQueue(url) as queue:
        await queue.enqueue_many(nothing, list(range(tasks)))
        async with queue.worker(concurrency=50) as pool:
            began = time.perf_counter()
            await pool.run_until_empty()
            return tasks / (time.perf_counter() - began)


def drain_with_dashboards(url: str, tasks: int) -> float:
    """Drain while another process serves three dashboards."""
    process = subprocess.Popen(
        [sys.executable, "-m", "omniq", "dashboard", "--port", "0", "--url", url],
        env={**os.environ, "OMNIQ_DASHBOARD_OPERATOR": SECRET},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        return asyncio.run(drain_with_viewers(process.stdout.readline().strip(), url, tasks))
    finally:
        process.terminate()
        process.wait()


async def drain_with_viewers(address: str, url: str, tasks: int) -> float:
    """Drain while three pages of that address are open."""
    headers = {"authorization": f"Bearer {SECRET}"}
    async with httpx.AsyncClient(base_url=address, headers=headers, timeout=60) as client:
        watching = [asyncio.create_task(watch(client)) for _ in range(VIEWERS)]
        rate = await drain(url, tasks)
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        return rate


async def watch(client: httpx.AsyncClient) -> None:
    """Do what an open page does: listen to the stream, and reload at every event."""
    async with client.stream("GET", "/api/stream") as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                await client.get("/")


def main(pairs: int, tasks: int) -> None:
    """Measure in pairs, so that other load on the machine affects both."""
    ratios = []
    for number in range(pairs):
        with tempfile.TemporaryDirectory() as folder:
            urls = [f"sqlite:///{Path(folder)}/{name}.db" for name in ("alone", "watched")]
            alone = asyncio.run(drain(urls[0], tasks))
            watched = drain_with_dashboards(urls[1], tasks)
        ratios.append(watched / alone)
        print(f"{number + 1}: {alone:8,.0f} alone {watched:8,.0f} watched  {ratios[-1]:.2f}")
    print(f"median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:]]
    main(*(given or [5, 20_000]))
