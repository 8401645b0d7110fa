"""The process between a test and its server: the server never outlives those who use it.

Run as a script by `servers.py`, with the standard library alone. It starts the server as its
child and waits for the first of three things: the server ends; a SIGTERM asks for an orderly stop;
or nobody holds the `users` lock any more, which the kernel drops even for a process that was
killed. Then the server is stopped at once and its folder removed.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

# In the pipe that the keeper reads, beside the numbers of signals: the last user is gone.
_UNUSED = 0

_STOP_SECONDS = 20.0
_PR_SET_PDEATHSIG = 1


def main(plan: dict[str, Any]) -> None:
    """Keep the server that `plan` describes, until it ends."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = _start(plan)
    threading.Thread(target=_tell_when_unused, args=(plan["users"], writing), daemon=True).start()
    while server.poll() is None:
        news = os.read(reading, 1)[0]
        if news == signal.SIGTERM:
            _stop(server, plan["stop"])
        elif news == _UNUSED:
            _stop(server, plan["stop_at_once"])
            shutil.rmtree(plan["folder"], ignore_errors=True)


def _start(plan: dict[str, Any]) -> subprocess.Popen[bytes]:
    with Path(plan["log"]).open("ab") as log:
        server = subprocess.Popen(
            plan["command"],
            cwd=plan["folder"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=_die_with_parent,
            start_new_session=True,
            **plan["identity"],
        )
    # Complete or absent for whoever reads it.
    fresh = Path(plan["pid"] + ".new")
    fresh.write_text(str(server.pid))
    fresh.replace(plan["pid"])
    return server


def _die_with_parent() -> None:
    """Even a keeper that is killed takes the server with it, where the kernel can promise that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _tell_when_unused(users: str, writing: int) -> None:
    with Path(users).open("r+b") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        os.write(writing, bytes([_UNUSED]))
        # The lock is kept to the end of this process: who comes now waits, and starts anew.
        threading.Event().wait()


def _stop(server: subprocess.Popen[bytes], number: int) -> None:
    server.send_signal(number)
    try:
        server.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        kill_with_children(server.pid)
        server.wait()


def kill_with_children(pid: int) -> None:
    """SIGKILL the process and its children; held still first, so that it starts no further ones."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        for child in _children(pid):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    if Path("/proc/self/stat").exists():
        stats = (_stat(path) for path in Path("/proc").glob("[0-9]*/stat"))
        return [child for child, parent in stats if parent == pid]
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    )
    pairs = (line.split() for line in listing.stdout.splitlines())
    return [int(child) for child, parent in pairs if int(parent) == pid]


def _stat(path: Path) -> tuple[int, int]:
    """A process and its parent, 0 when it has just ended."""
    try:
        # The name, in parentheses, may contain anything.
        _, parent, *_ = path.read_text().rpartition(") ")[2].split()
    except OSError:
        return 0, 0
    return int(path.parent.name), int(parent)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
