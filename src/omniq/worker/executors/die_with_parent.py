"""Ends a child process when its parent ends. Imports little, since the child imports it first.

The parent holds the other end of a pipe that is never written to; the kernel closes it when the
parent has ended, even by SIGKILL. (PR_SET_PDEATHSIG would not do: it depends on the thread that
started the child, and a worker's threads start and end.)
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import threading
from contextlib import suppress

_PATIENCE_MS = 1000
_RECHECK = 0.01


def hold(descriptor: int, parent_pid: int) -> None:
    """Make this process, and the group it leads, end when the parent ends."""
    os.set_inheritable(descriptor, False)
    # Not on every system, and not in every sandbox: there the watcher thread must suffice.
    with suppress(AttributeError, OSError):
        # The kernel itself sends SIGKILL when the pipe is hung up: also while C code holds the
        # interpreter's lock, when no Python thread could run.
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)
    watcher = threading.Thread(
        target=_watch, args=(descriptor, parent_pid), name="omniq-parent-watch", daemon=True
    )
    watcher.start()


def _watch(descriptor: int, parent_pid: int) -> None:
    """For other systems, for a parent that had ended before, and for one that has forked."""
    poller = select.poll()
    poller.register(descriptor, select.POLLHUP)
    pause = threading.Event()
    while os.getppid() == parent_pid:
        # The parent's id decides. The task may have closed the pipe and reused its descriptor:
        # then this checks again after a short pause.
        if poller.poll(_PATIENCE_MS):
            pause.wait(_RECHECK)
    with suppress(ProcessLookupError):
        os.killpg(os.getpgrp(), signal.SIGKILL)
