"""Writes to stderr without waiting for a reader that has stopped reading.

A terminal after Ctrl-S and a pipe whose reader is stopped accept nothing more. A worker that waited for
them would run no task, renew no lease and ignore SIGTERM. So the lines wait in memory instead; when too
many wait and nothing is read for a second, further ones are left out, and counted.
"""

from __future__ import annotations

import select
import sys
from collections import deque
from collections.abc import Callable, Iterator

PIECE = 4_096
"""How many bytes one write has at most: PIPE_BUF of Linux. Such a write does not block when the pipe is
ready, and those of several processes into one pipe do not mix."""

_MOST_WAITING = 256
"""How many pieces may wait before the writer waits for the reader: 1 MiB."""

_PATIENCE = 1.0
"""Seconds without a read after which a reader counts as stopped."""


class Stderr:
    """The lines that wait for stderr. One thread at a time may use it.

    `left_out` makes the line that says how many lines are missing.
    """

    def __init__(self, left_out: Callable[[int], str]) -> None:
        self._waiting: deque[str] = deque()
        self._is_stopped = False
        self._missing = 0
        self._left_out = left_out
        self._poll = select.poll()
        self._descriptor = -1

    @property
    def is_behind(self) -> bool:
        """Whether lines wait for the reader."""
        return bool(self._waiting)

    def write(self, text: str) -> None:
        """Write the text, one or more whole lines, after what waits."""
        is_full = len(self._waiting) >= _MOST_WAITING
        if is_full and self._is_stopped and not self._is_ready(0):
            self._missing += text.count("\n")
            return
        if self._waiting:
            text = self._waiting.pop() + text
        self._waiting.extend(_pieces(text))
        self._write_waiting(_MOST_WAITING)

    def finish(self) -> None:
        """Write everything that waits, unless the reader has stopped."""
        self._write_waiting(0)

    def forget(self) -> None:
        """Leave what waits to another process."""
        self._waiting.clear()
        self._missing = 0

    def _write_waiting(self, most: int) -> None:
        """Write while the reader reads, and wait for it while more than `most` pieces wait."""
        while self._waiting:
            is_patient = len(self._waiting) > most and not self._is_stopped
            if not self._is_ready(_PATIENCE if is_patient else 0):
                self._is_stopped = self._is_stopped or is_patient
                return
            self._is_stopped = False
            write_stderr(self._waiting.popleft())
            if self._missing and not self._waiting:
                missing, self._missing = self._missing, 0
                self._waiting.append(self._left_out(missing))

    def _is_ready(self, seconds: float) -> bool:
        """Whether stderr accepts a piece within that time. One that is broken does: the write will fail."""
        try:
            descriptor = sys.stderr.fileno()
            if descriptor != self._descriptor:
                self._poll = select.poll()
                self._poll.register(descriptor, select.POLLOUT)
                self._descriptor = descriptor
            return bool(self._poll.poll(seconds * 1_000))
        except (OSError, ValueError, AttributeError):
            # Not a file: a test has replaced it, or there is none.
            return True
        except RuntimeError:
            # A signal handler that logs, while the poll that it interrupted waits.
            return False


def write_stderr(text: str) -> None:
    """Write to stderr; does nothing when there is none or when it is closed."""
    # EPIPE, EIO of a closed terminal, a full disk, a closed descriptor, no stream at all: in each case the
    # line cannot be read, and the work continues. RuntimeError: a signal handler that logs during a write.
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError, RuntimeError):
        pass


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces that end with a line, except where a line alone is longer than a piece."""
    # No character has more than four bytes.
    most = PIECE if text.isascii() else PIECE // 4
    at = 0
    while len(text) - at > most:
        end = text.rfind("\n", at, at + most) + 1 or at + most
        yield text[at:end]
        at = end
    if at < len(text):
        yield text[at:]
