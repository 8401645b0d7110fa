"""Several worker processes: started, told to stop, and replaced when they die.

Each child has a socket to this process. Its plan comes over it, then orders; it answers once, when
it is ready. When the socket ends, the child knows that nobody looks after it any more. Orders and
not signals: a signal to the whole process group must not count twice.
"""

from __future__ import annotations

import os
import signal as signals
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from omniq import log
from omniq.clock import Clock
from omniq.events import Dispatcher, ProcessEnded, ProcessStarted
from omniq.worker.process.pool_process import Ended, Notice, Plan, Ready

READY = b"r"

_SHORTEST_PAUSE = 0.1
_LONGEST_PAUSE = 30.0
_SETTLED_AFTER = 10.0
"""Seconds after which a child counts as well, and the next death starts from the shortest pause."""

_LATE = 1.5
"""Seconds after the time to stop when a child is killed. It has cut off its tasks itself by then."""

_FORCED = 0.7


class Briefing(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a child. Over a socket: a URL or a key must not show in a process list."""

    plan: Plan
    url: str | None
    settings: dict[str, Any]
    path: list[str]
    log_level: str | None


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Claim no more, and end when all runs have, or after `timeout` seconds."""

    timeout: float | None


class Force(msgspec.Struct, frozen=True, tag=True):
    """Give back what can be given back, and end now."""


Order = Stop | Force


class Children:
    """The crew of several processes.

    The first one is started alone: what it cannot do, such as import the modules, the others cannot
    either, and the reason is said once.
    """

    grace = _LATE + 0.2

    def __init__(
        self,
        count: int,
        briefing: Briefing,
        tell: Callable[[Notice], None],
        clock: Clock,
    ) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._is_ready = False
        self._codes: list[int] = []
        events = Dispatcher()
        log.attach(events)
        message = msgspec.json.encode(briefing)
        self._slots = [
            _Slot(message, clock, events, self._on_ready, self._on_end) for _ in range(count)
        ]
        self._started = 0

    def start(self) -> None:
        with self._lock:
            self._start(1)

    def stop(self, timeout: float | None) -> None:
        for slot in self._all_told_to_stop():
            slot.stop(timeout)

    def cut_off(self, guilty: str = "") -> bool:
        slots = self._all_told_to_stop()
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

    def _all_told_to_stop(self) -> list[_Slot]:
        with self._lock:
            # None is started after this.
            self._is_ready = True
            return self._slots[: self._started]

    def _on_ready(self) -> None:
        with self._lock:
            if self._is_ready:
                return
            self._is_ready = True
            self._start(len(self._slots))
        self._tell(Ready())

    def _on_end(self, code: int) -> None:
        with self._lock:
            self._codes.append(code)
            if len(self._codes) < self._started:
                return
        self._tell(Ended(code=max(self._codes)))


class _Slot:
    """Keeps one child running: starts it, and another in its place when it ends."""

    def __init__(
        self,
        message: bytes,
        clock: Clock,
        events: Dispatcher,
        on_ready: Callable[[], None],
        on_end: Callable[[int], None],
    ) -> None:
        self._message = message
        self._clock = clock
        self._events = events
        self._on_ready = on_ready
        self._on_end = on_end
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._stopping = threading.Event()
        self._was_ready = False
        # Alive as long as its child: the kernel takes the death of the thread that started a
        # process for the death of the parent.
        self._thread = threading.Thread(target=self._keep, name="omniq-supervisor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float | None) -> None:
        self._order(Stop(timeout))
        if timeout is not None:
            self.kill_after(timeout + _LATE)

    def force(self) -> None:
        self._order(Force())

    def kill_after(self, seconds: float) -> None:
        """Kill the child if it is there after so long. What it holds is given back by its lease."""
        child = self._child
        if child is not None:
            timer = threading.Timer(seconds, child.kill)
            timer.daemon = True
            timer.start()

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def _order(self, order: Order) -> None:
        with self._lock:
            self._stopping.set()
            child = self._child
            if child is not None:
                child.send(order)
                if not child.is_ready:
                    # Its orders wait until it has imported its modules; a signal does not.
                    child.interrupt()

    def _keep(self) -> None:
        deaths = 0
        while True:
            began = self._clock.monotonic()
            try:
                child = self._start_child()
            except OSError as error:
                # Out of memory or of processes: that may pass.
                child, how = None, str(error)
            else:
                if child is None:
                    return self._on_end(0)
                code = self._watch(child)
                if (last := self._last_word(child, code)) is not None:
                    return self._on_end(last)
                how = _how(code)
            deaths = 0 if self._clock.monotonic() - began > _SETTLED_AFTER else deaths + 1
            pause = min(_LONGEST_PAUSE, _SHORTEST_PAUSE * 2 ** min(deaths, 20))
            pid = 0 if child is None else child.pid
            self._events.emit(ProcessEnded(pid=pid, how=how, restart_in=pause))
            self._stopping.wait(pause)

    def _start_child(self) -> _Child | None:
        """A new child; None when none is wanted any more."""
        with self._lock:
            if self._stopping.is_set():
                return None
            self._child = _Child.start(self._message)
            return self._child

    def _last_word(self, child: _Child, code: int) -> int | None:
        """The exit code of the slot if this child was its last; None when another takes its place."""
        if self._stopping.is_set():
            # One that was never ready held nothing; one that did not end well may have.
            return int(child.is_ready and code != 0)
        if not self._was_ready and code > 0:
            # It said why on stderr, and the next one would say the same.
            return code
        return None

    def _watch(self, child: _Child) -> int:
        """Wait for the child's end; its exit code."""
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
                    "-m",
                    "omniq.worker.process.worker_child",
                    str(descriptor),
                    str(os.getpid()),
                ],
                pass_fds=(descriptor,),
                stdin=subprocess.DEVNULL,
                # A session of its own: Ctrl-C and a closed terminal reach the supervisor, which
                # passes them on once.
                start_new_session=True,
            )
        child = cls(process, ours)
        child._send(message)
        return child

    def send(self, order: Order) -> None:
        self._send(msgspec.json.encode(order))

    def _send(self, message: bytes) -> None:
        # A child that has just died is noticed by whoever waits for it.
        with suppress(OSError):
            self._socket.sendall(message + b"\n")

    def wait_ready(self) -> bool:
        """Whether the child came so far as to claim tasks; False when it ended before."""
        with suppress(OSError):
            self.is_ready = self._socket.recv(1) == READY
        return self.is_ready

    def wait(self) -> int:
        return self._process.wait()

    def interrupt(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        # `Popen` knows a process it has waited for, and sends nothing to whoever has its pid now.
        self._process.kill()

    def close(self) -> None:
        self._socket.close()


def _how(code: int) -> str:
    """How a process ended, in words.

    >>> _how(-9), _how(3)
    ('SIGKILL', 'exit code 3')
    """
    if code >= 0:
        return f"exit code {code}"
    try:
        return signals.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
