"""A worker process for tests that pause, resume and kill it.

    python -m tests.faults.worker_process URL LEASE

Prints "ready" to its standard output, ends on SIGTERM, and then prints the pool's statistics.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from omniq import AsyncTaskQueue, TaskContext, task

POLL = 0.1


@task(max_retries=5)
async def work(ctx: TaskContext, folder: str, seconds: float) -> int:
    """Record the start, with its time and worker, for each claim; the first run takes long."""
    record_start(Path(folder, f"{ctx.task_id}.{ctx.fencing_token}.part"))
    if ctx.fencing_token == 1:
        await asyncio.sleep(seconds)
    return ctx.fencing_token


def record_start(part: Path) -> None:
    part.write_text(json.dumps({"at": time.monotonic(), "pid": os.getpid()}))
    part.rename(part.with_suffix(".started"))


async def main(url: str, lease: float) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with (
        AsyncTaskQueue(url) as queue,
        queue.worker(poll_interval=POLL, base_retry_delay=0.01, lease=lease) as pool,
    ):
        print("ready", flush=True)
        await stop.wait()
        await pool.stop(cancel_in_flight=True)
        print(msgspec.json.encode(pool.stats()).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
