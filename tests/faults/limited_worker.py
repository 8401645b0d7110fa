"""A worker whose tasks share `max_running` and a rate, and record when they start and end.

    python -m tests.faults.limited_worker URL

Prints "ready" to its standard output, and runs until it is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from omniq import AsyncTaskQueue, TaskContext, task

LEASE = 3.0
AT_ONCE = 3
RATE = 50
TIMEOUT = 60.0
SECONDS = 0.015

_notes: dict[str, int] = {}


class Run(NamedTuple):
    """One run of a task: when it was claimed, and when its function started and ended, if it did."""

    pid: int
    task_id: str
    claimed: datetime
    began: float
    ended: float | None


@task(max_running=AT_ONCE, rate=f"{RATE}/s", limit_key="service", timeout=TIMEOUT, max_retries=20)
async def work(ctx: TaskContext, folder: str, number: int) -> int:
    assert ctx.deadline is not None
    claimed = ctx.deadline - timedelta(seconds=TIMEOUT)
    key = f"{ctx.task_id}.{ctx.fencing_token}"
    _note(folder, key, claimed.isoformat(), time.monotonic())
    await asyncio.sleep(SECONDS)
    _note(folder, key, "", time.monotonic())
    return number


def _note(folder: str, *facts: object) -> None:
    """Append a line in one write, which a later kill of the process does not undo."""
    path = str(Path(folder, f"{os.getpid()}.notes"))
    if path not in _notes:
        _notes[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(_notes[path], json.dumps(facts).encode() + b"\n")


def runs_in(folder: Path) -> Iterator[Run]:
    """Yield every recorded run."""
    for path in folder.glob("*.notes"):
        # Without an unfinished last line: another process is writing it.
        lines = path.read_text().rpartition("\n")[0].splitlines()
        notes = [json.loads(line) for line in lines]
        ends = {key: at for key, claimed, at in notes if not claimed}
        for key, claimed, at in notes:
            if claimed:
                when = datetime.fromisoformat(claimed)
                yield Run(int(path.stem), key.rpartition(".")[0], when, at, ends.get(key))


async def main(url: str) -> None:
    async with (
        AsyncTaskQueue(url) as queue,
        queue.worker(concurrency=4, poll_interval=0.05, base_retry_delay=0.01, lease=LEASE),
    ):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
