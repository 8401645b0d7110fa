"""Workers for flows that die at failpoints, forked one after the other so that each starts fast.

    python -m tests.faults.flow_worker URL LEASE

For each line on its standard input, the rules of failpoints, it starts a worker process with these, and
prints the process id.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from omniq import AsyncTaskQueue, Settings, TaskContext, failpoints, task
from omniq.storage import open_storage

POLL = 0.05
MEMBERS = 6


@task(max_retries=0)
async def member(ctx: TaskContext, folder: str, number: int) -> int:
    record(folder, ctx)
    return number


@task(max_retries=0)
async def callback(ctx: TaskContext, numbers: list[int], folder: str) -> int:
    record(folder, ctx)
    return sum(numbers)


@task(max_retries=0)
async def parent(ctx: TaskContext, total: int, folder: str) -> int:
    """A task with children, behind the callback."""
    parts = await ctx.map("part", member, [folder] * 3, total)
    last = await ctx.call("last", callback, parts, folder)
    record(folder, ctx)
    return last


def record(folder: str, ctx: TaskContext) -> None:
    """Note that this run of the task had its effect."""
    with open(Path(folder, ctx.task_id), "ab", buffering=0) as effects:
        effects.write(f"{ctx.fencing_token}\n".encode())


async def serve(url: str, lease: float) -> None:
    # The test kills workers, not the tasks.
    settings = Settings(max_crashes=10_000)
    async with (
        AsyncTaskQueue(url, settings=settings) as queue,
        queue.worker(lease=lease, poll_interval=POLL, concurrency=3),
    ):
        await asyncio.Event().wait()


def main(url: str, lease: float) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Import the driver here, not in each worker.
    open_storage(url)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if line.strip():
                failpoints.configure(line.strip())
            asyncio.run(serve(url, lease))
        print(pid, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
