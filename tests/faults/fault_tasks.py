"""Tasks for the tests of faults in child processes."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from contextlib import ExitStack
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


@task(executor="process", max_retries=0)
def reserve_memory(megabytes: int) -> int:
    return len(bytearray(megabytes << 20))


@task(executor="process", max_retries=0)
def open_files(count: int) -> int:
    with ExitStack() as stack:
        return len([stack.enter_context(Path("/dev/null").open()) for _ in range(count)])


@task(executor="process", max_retries=0)
def start_processes(count: int) -> int:
    """Start processes that sleep, and end them again."""
    started: list[int] = []
    try:
        for _ in range(count):
            pid = os.fork()
            if pid == 0:
                time.sleep(60)
                os._exit(0)
            started.append(pid)
        return len(started)
    finally:
        for pid in started:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
