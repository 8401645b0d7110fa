"""The supervisor process of a test server: the server never outlives the processes that use it.

`servers.py` runs this file as a script; it imports only the standard library. It starts the server as
its child and waits for the first of three events:

- The server ends: the supervisor ends too.
- SIGTERM: the supervisor shuts the server down in an orderly way.
- No process holds the `users` lock any more (the kernel releases the lock of a killed process): the
  supervisor stops the server immediately and removes its folder.
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

# Written to the supervisor's pipe, next to signal numbers: no process uses the server any more.
_UNUSED = 0

_STOP_SECONDS = 20.0
_PR_SET_PDEATHSIG = 1


def main(plan: dict[str, Any]) -> None:
    """Run the server that `plan` describes until it ends."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = _start(plan)
    threading.Thread(target=_report_when_unused, args=(plan["users"], writing), daemon=True).start()
    while server.poll() is None:
        event = os.read(reading, 1)[0]
        if event == signal.SIGTERM:
            _stop(server, plan["stop"])
        elif event == _UNUSED:
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
    # Written and renamed: a reader finds the complete file or none.
    new_file = Path(plan["pid"] + ".new")
    new_file.write_text(str(server.pid))
    new_file.replace(plan["pid"])
    return server


def _die_with_parent() -> None:
    """Let the kernel kill the server when the supervisor is killed. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _report_when_unused(users: str, writing: int) -> None:
    with Path(users).open("r+b") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        os.write(writing, bytes([_UNUSED]))
        # Hold the lock until this process ends: a new user waits for it, then starts a new server.
        threading.Event().wait()


def _stop(server: subprocess.Popen[bytes], number: int) -> None:
    server.send_signal(number)
    try:
        server.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        kill_with_children(server.pid)
        server.wait()


def kill_with_children(pid: int) -> None:
    """SIGKILL the process and its children. SIGSTOP comes first, so that it starts no more children."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        for child in children_of(pid):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    """Return the ids of the processes whose parent it is."""
    if Path("/proc/self/stat").exists():
        stats = (_stat(path) for path in Path("/proc").glob("[0-9]*/stat"))
        return [child for child, parent in stats if parent == pid]
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    )
    pairs = (line.split() for line in listing.stdout.splitlines())
    return [int(child) for child, parent in pairs if int(parent) == pid]


def _stat(path: Path) -> tuple[int, int]:
    """Return the ids of a process and its parent; both are 0 if the process has just ended."""
    try:
        # The process name, in parentheses, may contain spaces and parentheses.
        _, parent, *_ = path.read_text().rpartition(") ")[2].split()
    except OSError:
        return 0, 0
    return int(path.parent.name), int(parent)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
