"""Does a queue drain as fast while one task streams, and three readers follow it?

Drains the same tasks in pairs, alone and while another process streams 1,000 chunks a second from one task to
three readers in a third process, and prints the ratio of the rates of each pair. The stream has a separate
worker, so that what is measured is its cost for the storage.

    python benchmarks/output_drain.py [PAIRS] [TASKS]                   # SQLite
    OMNIQ_BENCH_URL=redis://… python benchmarks/output_drain.py         # an empty store at that URL
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from omniq import AsyncTaskQueue, TaskContext, task

READERS = 3
CHUNKS_A_SECOND = 1_000


@task
async def nothing(number: int) -> int:
    """A task that does nothing."""
    return number


@task(timeout=None)
async def speak(ctx: TaskContext) -> None:
    """Stream words at the given rate until it is cancelled."""
    began, said = time.perf_counter(), 0
    while True:
        await asyncio.sleep(0.01)
        while said < (time.perf_counter() - began) * CHUNKS_A_SECOND:
            said += 1
            await ctx.stream(f"word {said} ")


async def drain(url: str, tasks: int) -> float:
    """Return tasks a second."""
    async with AsyncTaskQueue(url) as queue:
        await queue.enqueue_many(nothing, list(range(tasks)))
        async with queue.worker(concurrency=50, queues=["default"]) as pool:
            began = time.perf_counter()
            await pool.run_until_empty()
            return tasks / (time.perf_counter() - began)


async def serve_stream(url: str) -> None:
    """Run the task that streams."""
    async with AsyncTaskQueue(url) as queue, queue.worker(concurrency=1, queues=["speech"]):
        print((await queue.options(queue="speech").enqueue(speak)).id, flush=True)
        await asyncio.Event().wait()


async def follow_stream(url: str, task_id: str) -> None:
    """Follow the task with each of the readers, and print how many chunks they got a second."""
    async with AsyncTaskQueue(url) as queue:
        counts, began = [0] * READERS, time.perf_counter()

        async def follow(reader: int) -> None:
            async for chunk in queue.handle(task_id).stream():
                counts[reader] += 1 + chunk.missed

        following = asyncio.gather(*map(follow, range(READERS)))
        await asyncio.to_thread(sys.stdin.readline)
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
        print(min(counts) / (time.perf_counter() - began), flush=True)


def drain_beside_stream(url: str, tasks: int) -> tuple[float, float, float]:
    """Drain while the task streams.

    Returns also the chunks a second that the slowest reader got, and the share of a core that the stream and its
    readers took: on a machine whose cores are all busy, that is lost to others whatever the storage does.
    """
    speaker = start("speak", url)
    assert speaker.stdout is not None
    reader = start("follow", url, speaker.stdout.readline().strip())
    try:
        time.sleep(1)
        before, began = cpu_of(speaker, reader), time.perf_counter()
        rate = asyncio.run(drain(url, tasks))
        cpu = (cpu_of(speaker, reader) - before) / (time.perf_counter() - began)
        said, _ = reader.communicate("\n", timeout=20)
        return rate, float(said), cpu
    finally:
        for process in (speaker, reader):
            process.kill()
            process.wait()


def cpu_of(*processes: subprocess.Popen[str]) -> float:
    """Return the CPU seconds that the processes have used."""
    ticks = 0
    for process in processes:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start this program in another process."""
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def main(pairs: int, tasks: int) -> None:
    """Measure in pairs, so that other load on the machine affects both."""
    ratios = []
    given = os.environ.get("OMNIQ_BENCH_URL")
    for number in range(pairs):
        with tempfile.TemporaryDirectory() as folder:
            urls = [given or f"sqlite:///{Path(folder)}/{name}.db" for name in ("alone", "beside")]
            alone = asyncio.run(drain(urls[0], tasks))
            beside, chunks, cpu = drain_beside_stream(urls[1], tasks)
        ratios.append(beside / alone)
        print(
            f"{number + 1}: {alone:8,.0f} alone {beside:8,.0f} beside a stream, of which each reader got "
            f"{chunks:,.0f} chunks/s with {cpu:.0%} of a core  {ratios[-1]:.2f}",
            flush=True,
        )
    print(f"median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["speak", url]:
            asyncio.run(serve_stream(url))
        case ["follow", url, task_id]:
            asyncio.run(follow_stream(url, task_id))
        case sizes:
            main(*([int(text) for text in sizes] or [5, 20_000]))
