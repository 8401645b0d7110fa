"""The processes of one run: a peer's producer and its workers, each in the peer's environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    # Workers import this module, and need no stores.
    from benchmarks.stores import Store

GRACE_SECONDS, PATIENT_SECONDS, ANSWER_SECONDS = 1.0, 30.0, 900
TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


class Failed(Exception):
    """A process of a peer failed; the end of its log is in the message."""


class Producer:
    """A process that enqueues and prints its answer."""

    def __init__(
        self, python: Path, peer: str, store: Store, figure: str, count: int, seconds: float
    ) -> None:
        self._log = store.folder / "producer.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(python, "-m", "benchmarks.producer", peer),
                    *(figure, str(count), str(seconds)),
                ],
                cwd=store.folder,
                env=store.environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def answer(self) -> Any:
        """Return its answer, after it has ended."""
        try:
            output, _ = self._process.communicate(timeout=ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            self.close()
            raise Failed(f"no answer in {ANSWER_SECONDS} seconds") from None
        if self._process.returncode:
            raise Failed(_tail(self._log))
        return json.loads(output.splitlines()[-1])

    def await_line(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise Failed(_tail(self._log))

    def close(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.communicate()

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()


class Workers:
    """A number of worker processes, which run while the block lasts."""

    def __init__(
        self, python: Path, peer: str, store: Store, processes: int = 1, *, is_patient: bool = False
    ) -> None:
        """With `is_patient`, wait longer for a normal shutdown, because the store is used again."""
        self._command = [str(python), "-m", "benchmarks.consumer", peer]
        self._store = store
        self._count = processes
        self._grace = PATIENT_SECONDS if is_patient else GRACE_SECONDS
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        with (self._store.folder / "worker.log").open("wb") as log:
            for _ in range(self._count):
                process = subprocess.Popen(
                    self._command,
                    cwd=self._store.folder,
                    env=self._store.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
                self._processes.append(process)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            _signal(process, signal.SIGTERM)
        until = time.monotonic() + self._grace
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.01, until - time.monotonic()))
            _signal(process, signal.SIGKILL)
            process.wait()

    def check(self) -> None:
        if any(process.poll() is not None for process in self._processes):
            raise Failed(_tail(self._store.folder / "worker.log"))

    def cpu_seconds(self) -> float:
        return sum(cpu_seconds(pid) for pid in self.pids())

    def resident_megabytes(self) -> float:
        pages = 0
        for pid in self.pids():
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * PAGE / 1e6

    def pids(self) -> list[int]:
        return [pid for process in self._processes for pid in process_tree(process.pid)]


def process_tree(pid: int) -> list[int]:
    """Return a process and all its live descendants. Needs Linux."""
    pids = [pid]
    for each in pids:
        try:
            for thread in os.listdir(f"/proc/{each}/task"):
                children = Path(f"/proc/{each}/task/{thread}/children").read_text()
                pids += map(int, children.split())
        except OSError:
            continue
    return pids


def cpu_seconds(pid: int) -> float:
    """Return user and system time of one process, and of the children that it has waited for."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, facts[11:15])) / TICK


def exact_cpu_seconds(pid: int) -> float:
    """Return the time of a process and its live descendants, without those that have ended, to the nanosecond."""
    nanoseconds = 0
    for each in process_tree(pid):
        for thread in Path(f"/proc/{each}/task").glob("*/schedstat"):
            with suppress(OSError):
                nanoseconds += int(thread.read_text().split()[0])
    return nanoseconds / 1e9


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal the whole process group: a peer's command may have children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-12:])
