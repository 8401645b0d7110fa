"""What the tests of the worker have it run. The tests hold the other end of the events."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

from omniq import task

started = threading.Semaphore(0)
let_go = threading.Event()
running = 0
most_running = 0
_lock = threading.Lock()


async def add(a: int, b: int) -> int:
    return a + b


@task
def hold() -> str:
    """Says that it runs, and ends when it is let go."""
    global running, most_running
    with _lock:
        running += 1
        most_running = max(most_running, running)
    started.release()
    let_go.wait(8)
    with _lock:
        running -= 1
    return "held"


async def stubborn() -> None:
    """Does not care about being cancelled."""
    started.release()
    while not let_go.is_set():
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)


def reset() -> None:
    global started, running, most_running
    started = threading.Semaphore(0)
    let_go.clear()
    running = most_running = 0
