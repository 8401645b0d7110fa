"""Several worker processes: started, stopped, and replaced when they die.

Each child has a socket to this process. It receives its configuration over it, then commands; it
answers once, when it is ready. When the socket is closed, the child knows that its supervisor has
ended. Commands and not signals: a signal to the whole process group must not count twice.
"""

from __future__ import annotations

import os
import signal as signals
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from omniq import log
from omniq.clock import Clock
from omniq.concurrency.backoff import backoff
from omniq.events import Dispatcher, ProcessEnded, ProcessStarted
from omniq.log import LogConfig
from omniq.worker.process.pool_process import Ended, Notice, Ready, WorkerConfig

READY = b"r"
STOPPED = 79
"""The exit code of a child that an operator has stopped through the storage: it is not replaced."""

REPLACED = 80
"""The exit code of a child that has reached a limit of the settings: it is replaced, and has not failed."""

_SHORTEST_PAUSE = 0.1
_LONGEST_PAUSE = 30.0
_SETTLED_AFTER = 10.0
"""Seconds after which a child counts as healthy: the next restart has the shortest pause again."""

_LATE = 1.5
"""Seconds after the shutdown timeout when a child is killed. It has stopped its tasks by then."""

_FORCED = 0.7

_REMEMBERED_DEATHS = 100

_ROOT = str(Path(__file__).absolute().parents[3])
"""The folder that contains the package `omniq`."""

_BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from omniq.worker.process.worker_child import main; main()"
)


class WorkerChildConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a child. Over a socket: a URL or a key must not show in a process list."""

    worker: WorkerConfig
    url: str | None
    settings: dict[str, Any]
    path: list[str]
    log: LogConfig | None


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Stop claiming, and end when all runs have ended, or after `timeout` seconds."""

    timeout: float | None


class Force(msgspec.Struct, frozen=True, tag=True):
    """Release what can be released, and end now."""


class Died(msgspec.Struct, frozen=True, tag=True):
    """Another child has died. Who takes its tasks stores with them `how` it did."""

    pid: int
    how: str


Command = Stop | Force | Died


class WorkerChildren:
    """Runs pools in several child processes.

    The first child is started alone: what it cannot do, such as import the modules, the others
    cannot either, and the reason is reported once.
    """

    grace = _LATE + 0.2

    def __init__(
        self,
        count: int,
        config: WorkerChildConfig,
        notify: Callable[[Notice], None],
        clock: Clock,
    ) -> None:
        self._notify = notify
        self._lock = threading.Lock()
        self._is_ready = False
        self._is_stopping = False
        self._codes: list[int] = []
        events = Dispatcher()
        log.attach(events)
        message = msgspec.json.encode(config)
        # One process says what the worker runs; its first child, which is started alone.
        quiet = msgspec.structs.replace(config.worker, reports=False)
        quiet_message = msgspec.json.encode(msgspec.structs.replace(config, worker=quiet))
        self._deaths: deque[Died] = deque(maxlen=_REMEMBERED_DEATHS)
        self._slots = [
            _Slot(
                (message if number == 0 else quiet_message, quiet_message),
                clock,
                events,
                self._deaths,
                self._on_ready,
                self._on_death,
                self._on_end,
                ends_alone=config.worker.burst,
            )
            for number in range(count)
        ]
        self._started = 0

    def start(self) -> None:
        with self._lock:
            self._start(1)

    def stop(self, timeout: float | None) -> None:
        for slot in self._stop_starting():
            slot.stop(timeout)

    def release_and_end(self, stuck_task: str = "") -> bool:
        slots = self._stop_starting()
        for slot in slots:
            slot.force()
        for slot in slots:
            slot.kill_after(_FORCED)
        for slot in slots:
            slot.join(_FORCED + 0.1)
        return all(code == 0 for code in self._codes)

    def join(self, timeout: float) -> bool:
        for slot in self._slots[: self._started]:
            slot.join(timeout)
        return True

    def _start(self, count: int) -> None:
        for slot in self._slots[self._started : count]:
            slot.start()
        self._started = max(self._started, count)

    def _stop_starting(self) -> list[_Slot]:
        with self._lock:
            # No slot is started after this.
            self._is_stopping = True
            return self._slots[: self._started]

    def _on_ready(self) -> None:
        with self._lock:
            if self._is_ready:
                return
            self._is_ready = True
            if not self._is_stopping:
                self._start(len(self._slots))
        # Also while it stops: the child that is ready may have claimed tasks, which a stop waits for.
        self._notify(Ready())

    def _on_death(self, death: Died) -> None:
        self._deaths.append(death)
        for slot in self._slots:
            slot.send(death)

    def _on_end(self, code: int) -> None:
        with self._lock:
            self._codes.append(code)
            if len(self._codes) < self._started:
                return
        self._notify(Ended(code=max(self._codes)))


class _Slot:
    """Keeps one child running: starts it, and starts another in its place when it ends."""

    def __init__(
        self,
        messages: tuple[bytes, bytes],
        clock: Clock,
        events: Dispatcher,
        deaths: Collection[Died],
        on_ready: Callable[[], None],
        on_death: Callable[[Died], None],
        on_end: Callable[[int], None],
        *,
        ends_alone: bool,
    ) -> None:
        """`messages`: the configuration of the first child, and of those that replace it.

        `ends_alone`: a child that ends without an error has done its work, and is not replaced.
        """
        self._messages = messages
        self._ends_alone = ends_alone
        self._clock = clock
        self._events = events
        self._deaths = deaths
        self._on_ready = on_ready
        self._on_death = on_death
        self._on_end = on_end
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._stopping = threading.Event()
        self._was_ready = False
        # Alive as long as its child: the kernel treats the end of the thread that started a process
        # as the end of the parent.
        self._thread = threading.Thread(
            target=self._keep_running, name="omniq-supervisor", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float | None) -> None:
        self._stop(Stop(timeout))
        if timeout is not None:
            self.kill_after(timeout + _LATE)

    def force(self) -> None:
        self._stop(Force())

    def kill_after(self, seconds: float) -> None:
        """Kill the child if it still runs after that time. Its claims end with its lease."""
        child = self._child
        if child is not None:
            timer = threading.Timer(seconds, child.kill)
            timer.daemon = True
            timer.start()

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def send(self, news: Died) -> None:
        """Send news to the child, if it runs; the child that is started next gets all of them."""
        with self._lock:
            if self._child is not None:
                self._child.send(news)

    def _stop(self, command: Command) -> None:
        with self._lock:
            self._stopping.set()
            child = self._child
            if child is not None:
                child.send(command)
                if not child.is_ready:
                    # It reads commands only after it has imported its modules; a signal does not wait.
                    child.interrupt()

    def _keep_running(self) -> None:
        deaths = 0
        while True:
            began = self._clock.monotonic()
            try:
                child = self._start_child()
            except OSError as error:
                # Out of memory or of processes: that may be temporary.
                child, code, reason = None, 0, str(error)
            else:
                if child is None:
                    return self._on_end(0)
                code = self._watch(child)
                if (last := self._final_code(child, code)) is not None:
                    return self._on_end(last)
                reason = _describe_exit(code)
                self._on_death(Died(child.pid, _describe_death(code)))
            is_healthy = self._clock.monotonic() - began > _SETTLED_AFTER or code == REPLACED
            deaths = 0 if is_healthy else deaths + 1
            pause = backoff(deaths, first=_SHORTEST_PAUSE, longest=_LONGEST_PAUSE)
            pid = 0 if child is None else child.pid
            self._events.emit(ProcessEnded(pid=pid, how=reason, restart_in=pause))
            self._stopping.wait(pause)

    def _start_child(self) -> _Child | None:
        """A new child; None when the slot was stopped."""
        with self._lock:
            if self._stopping.is_set():
                return None
            self._child = _Child.start(self._messages[self._was_ready])
            for death in list(self._deaths):
                if death.pid != self._child.pid:
                    self._child.send(death)
            return self._child

    def _final_code(self, child: _Child, code: int) -> int | None:
        """The exit code of the slot if this child was its last; None when another replaces it."""
        if self._stopping.is_set():
            # A child that was never ready held no task; one that failed may have.
            return int(child.is_ready and code not in (0, STOPPED, REPLACED))
        if code == STOPPED or (self._ends_alone and code == 0):
            return 0
        if not self._was_ready and code > 0:
            # It wrote the reason to stderr, and the next one would fail in the same way.
            return code
        return None

    def _watch(self, child: _Child) -> int:
        """Wait until the child has ended; returns its exit code."""
        self._events.emit(ProcessStarted(pid=child.pid))
        if child.wait_ready():
            self._was_ready = True
            self._on_ready()
        code = child.wait()
        with self._lock:
            self._child = None
            child.close()
        return code


class _Child:
    """One worker process and the socket to it."""

    def __init__(self, process: subprocess.Popen[bytes], ours: socket.socket) -> None:
        self._process = process
        self._socket = ours
        self.pid = process.pid
        self.is_ready = False

    @classmethod
    def start(cls, message: bytes) -> _Child:
        ours, theirs = socket.socketpair()
        descriptor = theirs.fileno()
        with theirs:
            process = subprocess.Popen(
                [
                    sys.executable,
                    # Without the current folder: what it may be searched for is in the config.
                    "-P",
                    "-c",
                    _BOOT,
                    _ROOT,
                    str(descriptor),
                    str(os.getpid()),
                ],
                pass_fds=(descriptor,),
                stdin=subprocess.DEVNULL,
                # A separate session: Ctrl-C and a closed terminal reach the supervisor, which
                # passes them on once.
                start_new_session=True,
            )
        child = cls(process, ours)
        child._write(message)
        return child

    def send(self, command: Command) -> None:
        self._write(msgspec.json.encode(command))

    def _write(self, message: bytes) -> None:
        # The slot's thread, which waits for the child, notices that it has died.
        with suppress(OSError):
            self._socket.sendall(message + b"\n")

    def wait_ready(self) -> bool:
        """Wait until the child claims tasks; returns False when it ended before."""
        with suppress(OSError):
            self.is_ready = self._socket.recv(1) == READY
        return self.is_ready

    def wait(self) -> int:
        return self._process.wait()

    def interrupt(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        # `Popen` sends nothing to a process it has waited for, whose pid may belong to another now.
        self._process.kill()

    def close(self) -> None:
        self._socket.close()


def _describe_death(code: int) -> str:
    """How a worker died, for the history of its tasks.

    >>> _describe_death(-9), _describe_death(-11), _describe_death(3)
    ('killed by SIGKILL (out of memory?)', 'killed by SIGSEGV', 'it ended with exit code 3')
    """
    if code >= 0:
        return f"it ended with exit code {code}"
    # The kernel kills with this signal when memory runs out.
    guess = " (out of memory?)" if -code == signals.SIGKILL else ""
    return f"killed by {_describe_exit(code)}{guess}"


def _describe_exit(code: int) -> str:
    """How a process ended, for people.

    >>> _describe_exit(-9), _describe_exit(3)
    ('SIGKILL', 'exit code 3')
    """
    if code >= 0:
        return f"exit code {code}"
    try:
        return signals.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
