"""A worker process whose tasks die, with hooks that leave a file for each call.

    python -m tests.faults.hook_worker URL LEASE [ALLOWED]

Prints "ready" to its standard output, and works until it is killed. ALLOWED is the only function that
it may run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from omniq import AsyncTaskQueue, PermanentError, Task, TaskError, failpoints, task


def note_death(task: Task, error: TaskError) -> None:
    Path(task.args[0], f"{task.id}.{os.getpid()}.{error.error_type}").touch()


@task(on_dead=note_death)
async def fail(folder: str) -> None:
    raise PermanentError("no stock")


@task(on_dead=note_death, max_crashes=1)
async def fail_and_kill_at_the_next_record(folder: str) -> None:
    failpoints.configure("record_and_claim.after=kill")
    raise PermanentError("no stock")


@task(on_dead=note_death, max_crashes=1)
async def crash(folder: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@task(max_crashes=1)
async def crash_without_a_hook(folder: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@task
async def other() -> None:
    return None


async def main(url: str, lease: float, allowed: str | None = None) -> None:
    allow = None if allowed is None else [allowed]
    async with (
        AsyncTaskQueue(url) as queue,
        queue.worker(concurrency=2, poll_interval=0.1, lease=lease, allow=allow),
    ):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), *sys.argv[3:]))
