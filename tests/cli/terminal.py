"""A command in a pseudo-terminal: its process, and what it has printed."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

TIMEOUT = 20.0

_SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """The output and input of a command, in a window of that size."""

    def __init__(
        self, folder: Path, *arguments: str, columns: int = 100, rows: int = 40, **environ: str
    ) -> None:
        self._changed = threading.Condition()
        self._raw = b""
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("OMNIQ_") and name not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "omniq", *arguments],
            cwd=folder,
            env={**clean, "TERM": "xterm-256color", **environ},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._ours, 65536)
            except OSError:
                # Linux returns EIO when the other side of the terminal is closed.
                return
            with self._changed:
                self._raw += data
                self._changed.notify_all()

    @property
    def raw(self) -> str:
        return self._raw.decode()

    @property
    def text(self) -> str:
        """The printed text, without colours and cursor movements."""
        return _SEQUENCES.sub("", self.raw)

    def wait_for(self, text: str, count: int = 1) -> None:
        with self._changed:
            found = self._changed.wait_for(lambda: self.text.count(text) >= count, TIMEOUT)
        assert found, f"no {text!r} in:\n{self.text}"

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    @property
    def is_as_it_was(self) -> bool:
        """Whether the settings of the terminal are those from before the command."""
        return termios.tcgetattr(self._theirs) == self.before

    def ends(self) -> int:
        return self.process.wait(timeout=TIMEOUT)

    def close(self) -> None:
        """End the process, also after a failed test."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._theirs)
        self._reader.join(timeout=TIMEOUT)
        os.close(self._ours)
