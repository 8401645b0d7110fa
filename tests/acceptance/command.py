"""Runs `omniq worker` as a separate process in a separate folder, and reads what it writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from omniq import TaskQueue
from omniq.clock import SYSTEM_CLOCK

TASKS = '''
import asyncio
import os
import subprocess
import time
from os import system
from pathlib import Path


async def add(a, b):
    return a + b


def double(number):
    return number * 2


def note(path):
    with open(path, "a") as file:
        file.write("x")


def wait_for(path):
    """Returns when the file exists."""
    while not Path(path).exists():
        time.sleep(0.01)
    return "done"


async def await_for(path):
    while not Path(path).exists():
        await asyncio.sleep(0.01)
    return "done"


async def stubborn():
    """Ignores its cancellation."""
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass


async def block_the_loop():
    while True:
        time.sleep(0.01)


async def die():
    os.kill(os.getpid(), 9)


def fail(message):
    raise RuntimeError(message)
'''

PATIENCE = 30.0


def wait_until(condition: Callable[[], object], what: str = "", within: float = PATIENCE) -> float:
    """Wait until the condition is true; returns the seconds it took."""
    began = SYSTEM_CLOCK.monotonic()
    pause = threading.Event()
    while not condition():
        waited = SYSTEM_CLOCK.monotonic() - began
        assert waited < within, f"not within {within} s: {what or condition}"
        pause.wait(0.01)
    return SYSTEM_CLOCK.monotonic() - began


class WorkerCommand:
    """A running `omniq worker`. A thread reads its output, so that it never waits for a full pipe."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        modules: tuple[str, ...] = ("tasks",),
        **environ: str,
    ) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "omniq", "worker", *modules, *arguments],
            cwd=folder,
            env={**clean_environment(), **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, word: str, count: int = 1, within: float = PATIENCE) -> None:
        """Return when that many lines contain the word."""
        with self._changed:
            found = self._changed.wait_for(
                lambda: sum(word in line for line in self.lines) >= count, within
            )
        assert found, f"no {word!r} in:\n{self.text}"

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ends(self, within: float = PATIENCE) -> int:
        """Wait for the end in time; returns the exit code. All output is in `lines` then."""
        code = self.process.wait(timeout=within)
        self._reader.join(timeout=PATIENCE)
        return code

    def kill(self) -> None:
        """Kill the process if it still runs, and close its pipe."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(timeout=PATIENCE)
        assert self.process.stderr is not None
        self.process.stderr.close()


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("OMNIQ_")}


def is_alive(pid: int) -> bool:
    """Whether the process still runs; one that has ended and waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def worker_pids(queue: TaskQueue) -> set[int]:
    return {worker.pid for worker in queue.workers()}
