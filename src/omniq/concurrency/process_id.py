"""The id of this process, without a system call for each use."""

from __future__ import annotations

import os


class _ProcessId:
    """Reads the id of the process, and once again in a child that it forks."""

    def __init__(self) -> None:
        self._read()
        os.register_at_fork(after_in_child=self._read)

    def _read(self) -> None:
        self.number = os.getpid()


PROCESS_ID = _ProcessId()
