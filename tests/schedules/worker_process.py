"""A worker process for tests: `python -m tests.schedules.worker_process URL FOLDER QUEUE`. It logs what it does."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from omniq import Settings
from omniq.events import Event, ScheduleFired
from omniq.storage import open_storage
from omniq.worker import AsyncWorkerPool

POLL = 0.02
TASKS = "tests.schedules.sample_tasks"


def leave_line(folder: str, text: str) -> None:
    """Append one line, in one write, to the file of this process."""
    path = Path(folder, f"{os.getpid()}.lines")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, f"{text}\n".encode())
    os.close(descriptor)


async def beat(url: str, folder: str, queue: str) -> None:
    """Fire schedules and run the tasks of that queue until SIGTERM."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)

    def log_firing(event: Event) -> None:
        if isinstance(event, ScheduleFired):
            leave_line(folder, f"fired {event.nominal.isoformat()}")

    storage = open_storage(url, settings=Settings(durability="os"))
    pool = AsyncWorkerPool(storage, 4, POLL, queues=[queue], lease=60.0, allow=[TASKS])
    pool.events.subscribe(log_firing)
    async with pool:
        leave_line(folder, "ready")
        await stopping.wait()


if __name__ == "__main__":
    asyncio.run(beat(*sys.argv[1:]))
