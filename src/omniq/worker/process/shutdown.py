"""What signals ask of a worker: which of them stop it, and which of them end it immediately.

The first SIGTERM or SIGINT: stop claiming, wait for running tasks up to the shutdown timeout, release
the rest without using an attempt, exit 0. The second one, or SIGQUIT: release what can be released
within half a second, exit 128 + the signal's number. SIGHUP counts as SIGTERM where there is a
terminal that can be closed; it is ignored elsewhere, and under nohup.
"""

from __future__ import annotations

import os
import signal as signals
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import msgspec

from omniq.clock import Clock
from omniq.worker.process import console

_ONE_STOP = 0.3
"""Signals within this time count as one: some programs signal a process, and then its group."""


class StopRequest(msgspec.Struct, frozen=True):
    """Stop within `timeout` seconds, None: without a limit. With `force`, release everything and end now."""

    timeout: float | None
    force: bool = False
    signal: int = 0


class StoppedWhileStarting(BaseException):
    """A signal arrived while the user's modules were being imported: nothing has been claimed."""


class StopSignals:
    """Turns the signals that this process receives into requests to stop."""

    def __init__(
        self,
        request: Callable[[StopRequest], object],
        timeout: float | None,
        clock: Clock,
        is_starting: Callable[[], bool],
    ) -> None:
        self._request = request
        self._timeout = timeout
        self._clock = clock
        self._is_starting = is_starting
        self._first_at: float | None = None

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals in the body, in the main thread. Before and after it, others do."""
        before = {number: signals.getsignal(number) for number in _stop_signals()}
        for number in before:
            signals.signal(number, self._on_signal)
        console.unblock_signals()
        if signals.SIGHUP not in before:
            before[signals.SIGHUP] = signals.signal(signals.SIGHUP, signals.SIG_IGN)
        try:
            yield
        finally:
            for number, handler in before.items():
                signals.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_starting():
            raise StoppedWhileStarting
        now = self._clock.monotonic()
        if self._first_at is None:
            self._first_at = now
        elif number != signals.SIGQUIT and now - self._first_at < _ONE_STOP:
            return
        force = now > self._first_at or number == signals.SIGQUIT
        self._request(StopRequest(self._timeout, force, number))


def _stop_signals() -> list[signals.Signals]:
    numbers = [signals.SIGTERM, signals.SIGINT, signals.SIGQUIT]
    if os.isatty(0) and signals.getsignal(signals.SIGHUP) != signals.SIG_IGN:
        numbers.append(signals.SIGHUP)
    return numbers
