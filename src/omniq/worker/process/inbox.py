"""Where the main thread waits for signals and for messages of other threads."""

from __future__ import annotations

import math
import os
import queue
import select
import signal as signals
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Inbox(Generic[_T]):
    """Messages from any thread and from signal handlers, for one thread that waits for them.

    It waits on a pipe and not on a lock: a signal that arrives just before a thread starts to wait on
    a lock is not handled until something else ends the wait.
    """

    def __init__(self) -> None:
        # A signal handler may use a `SimpleQueue` while it interrupts another use of it.
        self._messages: queue.SimpleQueue[_T] = queue.SimpleQueue()
        self._reading, self._writing = os.pipe()
        # Not `select`, which accepts no descriptor above 1023.
        self._poll = select.poll()
        self._poll.register(self._reading, select.POLLIN)
        for descriptor in (self._reading, self._writing):
            os.set_blocking(descriptor, False)
            weakref.finalize(self, os.close, descriptor)

    def put(self, message: _T) -> None:
        """Add a message. From any thread, and from a signal handler."""
        self._messages.put(message)
        # A full pipe wakes the reader as well as one more byte would.
        with suppress(BlockingIOError):
            os.write(self._writing, b"\0")

    def get(self, timeout: float | None) -> _T | None:
        """The next message; None when there is none within `timeout` seconds, or after a signal."""
        with suppress(queue.Empty):
            return self._messages.get_nowait()
        # Rounded up: a wait that ends early would be repeated again and again.
        self._poll.poll(None if timeout is None else math.ceil(timeout * 1000))
        with suppress(BlockingIOError):
            os.read(self._reading, 4096)
        with suppress(queue.Empty):
            return self._messages.get_nowait()
        return None

    @contextmanager
    def woken_by_signals(self) -> Iterator[None]:
        """Within the block every signal that has a handler ends the wait. In the main thread only."""
        before = signals.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signals.set_wakeup_fd(before)
