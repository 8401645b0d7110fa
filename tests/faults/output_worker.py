"""A worker process that is killed while its task streams.

    python -m tests.faults.output_worker URL LEASE

Prints "ready" to its standard output, and works until it is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from omniq import AsyncTaskQueue, TaskContext, failpoints, task

CHUNKS = 400


@task(max_retries=0)
async def dictate(ctx: TaskContext, dies_by: str) -> str:
    """Stream numbers. In the first run the process is killed: by the task, or at a failpoint."""
    for number in range(1, CHUNKS + 1):
        await ctx.stream(f"{number} ")
        if ctx.attempt == 1 and number == CHUNKS // 2:
            # What was streamed until now is stored meanwhile.
            await asyncio.sleep(0.5)
            if dies_by != "itself":
                failpoints.configure(f"{dies_by}=kill")
        if ctx.attempt == 1 and number == CHUNKS - 1 and dies_by == "itself":
            os.kill(os.getpid(), signal.SIGKILL)
    return "said"


async def main(url: str, lease: float) -> None:
    async with (
        AsyncTaskQueue(url) as queue,
        queue.worker(concurrency=2, poll_interval=0.1, lease=lease),
    ):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
