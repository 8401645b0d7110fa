"""Workers for a task of five steps, forked one after the other so that each starts fast.

    python -m tests.faults.step_worker URL LEASE

For each name of a queue on its standard input it starts a worker process for that queue, and
prints the process id.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from pathlib import Path

from omniq import AsyncTaskQueue, Settings, TaskContext, task
from omniq.storage import open_storage

STEPS = 5
POLL = 0.05
_LONGEST_PAUSE = 0.05


@task(max_retries=0)
async def five_steps(ctx: TaskContext, folder: str) -> list[int]:
    return [
        await ctx.step(f"step {number}", effect, folder, ctx.task_id, ctx.fencing_token, number)
        for number in range(1, STEPS + 1)
    ]


async def effect(folder: str, task_id: str, token: int, number: int) -> int:
    """Record the effect of the step, at a random time within the step."""
    await asyncio.sleep(random.random() * _LONGEST_PAUSE)
    append_line(Path(folder, task_id), f"{token} {number}\n")
    await asyncio.sleep(random.random() * _LONGEST_PAUSE)
    return number


def append_line(path: Path, line: str) -> None:
    with open(path, "ab", buffering=0) as effects:
        effects.write(line.encode())


async def serve(url: str, lease: float, queue_name: str) -> None:
    # A task may lose any number of workers: here the test kills them, not the task.
    settings = Settings(max_crashes=10_000)
    async with (
        AsyncTaskQueue(url, settings=settings) as queue,
        queue.worker(queues=[queue_name], lease=lease, poll_interval=POLL),
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
            random.seed()
            asyncio.run(serve(url, lease, line.strip()))
        print(pid, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
