"""Tasks for the tests of faults in child processes."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

from omniq import TaskQueue, task

_lock = threading.Lock()


@task
def append(path: str, number: int) -> None:
    with Path(path).open("a") as file:
        file.write(f"{number}\n")


@task(executor="process", timeout=30)
def hold_the_interpreter(seconds: float, path: str) -> str:
    """Run no other thread of this process meanwhile: `PyDLL` does not release the lock."""
    append(path, 1)
    ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))
    return "done"


@task
def hold_a_lock(ready: str, until: str) -> None:
    """Hold the lock in a thread of the worker."""
    with _lock:
        Path(ready).touch()
        while not Path(until).exists():
            threading.Event().wait(0.01)


@task(executor="process")
def take_the_lock(number: int) -> int:
    with _lock:
        return number


@task(executor="process", max_retries=1)
def eat_memory(megabytes: int) -> int:
    # The kernel then kills this process, and not the worker.
    Path("/proc/self/oom_score_adj").write_text("1000")
    eaten = bytearray(megabytes << 20)
    eaten[::4096] = b"x" * len(eaten[::4096])
    return len(eaten)


@task(max_retries=0)
def multiply(url: str) -> None:
    """Enqueue two more for each that runs."""
    with TaskQueue(url) as queue:
        for _ in range(2):
            queue.enqueue(multiply, url)
