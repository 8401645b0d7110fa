"""What the tests of the worker have it run. The tests hold the other end of `gate`."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

from omniq import task


class Gate:
    """Where tasks say that they run, and wait to be let go. Each test has its own."""

    def __init__(self) -> None:
        self.started = threading.Semaphore(0)
        self.let_go = threading.Event()
        self.most_inside = 0
        self._inside = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Gate:
        with self._lock:
            self._inside += 1
            self.most_inside = max(self.most_inside, self._inside)
        self.started.release()
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._inside -= 1


gate = Gate()


@task
async def add(a: int, b: int) -> int:
    return a + b


@task
async def loop_kind() -> str:
    """The library whose event loop tasks run on."""
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


@task
def hold() -> str:
    with gate as mine:
        mine.let_go.wait(8)
    return "held"


@task
async def stubborn() -> None:
    """Does not care about being cancelled."""
    with gate as mine:
        while not mine.let_go.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)


def reset() -> Gate:
    """A gate that no task of an earlier test knows."""
    global gate
    gate = Gate()
    return gate
