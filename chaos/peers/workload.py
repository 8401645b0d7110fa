"""The part that all adapters share: the tasks, and the events recorded outside the store.

Only the standard library is used: this runs in the environment of each queue. An event is one
append to one file, so it survives the death of its process.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

URL = os.environ.get("PEER_URL", "")
SETTINGS: dict[str, Any] = json.loads(os.environ.get("PEER_SETTINGS", "{}"))
CONCURRENCY = int(os.environ.get("PEER_CONCURRENCY", "4"))

_BUSY, _CALM = 1 / 20, 1 / 2
_SHORTEST, _LONGEST = 0.02, 0.4


def tasks() -> Iterator[tuple[str, float]]:
    """Yield ids and durations, twenty a second; two after SIGUSR1, none after SIGTERM.

    Some tasks continue during the last wait: some queues search for abandoned tasks only when there
    are other tasks.
    """
    draw, pause = random.Random(int(os.environ.get("PEER_SEED", "0"))), _BUSY
    is_over = False

    def calm(*_: object) -> None:
        nonlocal pause
        pause = _CALM

    def stop(*_: object) -> None:
        nonlocal is_over
        is_over = True

    signal.signal(signal.SIGUSR1, calm)
    signal.signal(signal.SIGTERM, stop)
    number, due = 0, time.monotonic()
    while not is_over:
        number += 1
        yield f"task-{number:05}", round(draw.uniform(_SHORTEST, _LONGEST), 3)
        # By the clock, so that the time of an enqueue does not add to the pause.
        due = max(due + pause, time.monotonic() - 1)
        time.sleep(max(0.0, due - time.monotonic()))


def acknowledged(task_id: str) -> None:
    """Record that the queue has acknowledged the task."""
    _note("acknowledged", task_id)


def run(task_id: str, seconds: float) -> None:
    """Run the task in a worker for plain functions."""
    _note("start", task_id)
    time.sleep(seconds)
    _note("end", task_id)


async def run_async(task_id: str, seconds: float) -> None:
    """Run the task in a worker for coroutines."""
    _note("start", task_id)
    await asyncio.sleep(seconds)
    _note("end", task_id)


def _note(what: str, task_id: str) -> None:
    # The session is the worker: all its processes and threads share it.
    line = f"{what} {task_id} {time.monotonic():.6f} {os.getsid(0)}\n"
    file = os.open(os.environ["PEER_NOTES"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, line.encode())
    os.close(file)


def main(adapter: str, verb: str) -> None:
    """Run a verb of an adapter: `python -m chaos.peers.workload rq produce`."""
    module = importlib.import_module(f"chaos.peers.adapters.{adapter}")
    if verb != "left":
        getattr(module, verb)()
        return
    for state, task_id in module.left():
        sys.stdout.write(f"{state} {task_id}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
