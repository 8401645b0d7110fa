"""The id of this process, without a system call for each use; and what cannot leave this process."""

from __future__ import annotations

import os
from typing import NoReturn


class _ProcessId:
    """Reads the id of the process, and once again in a child that it forks."""

    def __init__(self) -> None:
        self._read()
        os.register_at_fork(after_in_child=self._read)

    def _read(self) -> None:
        self.number = os.getpid()


PROCESS_ID = _ProcessId()


class OfOneProcess:
    """An object that a queue or a handle has, and that another process cannot use."""

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a queue cannot be pickled, nor a handle; open another queue in the other process, with the "
            "same URL, and pass ids of tasks"
        )
