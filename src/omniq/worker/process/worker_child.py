"""The other end of `children`: one worker process of several, which obeys its supervisor."""

from __future__ import annotations

import ctypes
import os
import signal as signals
import socket
import sys
import threading
from contextlib import suppress
from io import BufferedReader
from typing import NoReturn

import msgspec

from omniq.errors import OmniqError
from omniq.settings import Settings
from omniq.worker.process import console
from omniq.worker.process.supervisor import Worker
from omniq.worker.process.worker_children import READY, Briefing, Force, Order, Stop

_PR_SET_PDEATHSIG = 1
_RECYCLE = 75
"""The exit code of a process that asks to be replaced: what sysexits.h calls a temporary failure."""


def main() -> None:
    """Do what the supervisor says until it says stop, or is gone."""
    descriptor, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    _hear_of_death_of(parent_pid)
    sock = socket.socket(fileno=descriptor)
    # Not for the processes that a task may start.
    sock.set_inheritable(False)
    orders = sock.makefile("rb")
    briefing = msgspec.json.decode(orders.readline(), type=Briefing)
    sys.path[:] = briefing.path
    if briefing.log_level is not None:
        console.start_logging(briefing.log_level)
    _run(briefing, sock, orders)


def _run(briefing: Briefing, sock: socket.socket, orders: BufferedReader) -> NoReturn:
    plan = briefing.plan
    try:
        worker = Worker(
            briefing.url,
            plan.modules,
            plan.concurrency,
            queues=plan.queues,
            poll_interval=plan.poll_interval,
            lease=plan.lease,
            shutdown_timeout=plan.shutdown_timeout,
            settings=Settings(**briefing.settings),
            listeners=plan.listeners,
        )
        threading.Thread(target=_obey, args=(worker, orders), daemon=True).start()
        code = worker.run(on_ready=lambda: _report_ready(sock))
    except OmniqError as error:
        console.leave(console.complain(error))
    # Replaced by the supervisor, as whatever ends unasked.
    console.leave(_RECYCLE if worker.wants_restart else code, at_once=worker.was_cut_off)


def _report_ready(sock: socket.socket) -> None:
    # A supervisor that is gone by now is heard of by `_obey`, and what runs is given back.
    with suppress(OSError):
        sock.sendall(READY)


def _obey(worker: Worker, orders: BufferedReader) -> None:
    """Pass on what the supervisor says; its end means: give everything back, nobody looks."""
    for line in orders:
        match msgspec.json.decode(line, type=Order):
            case Stop(timeout):
                worker.request_stop(timeout)
            case Force():
                worker.request_stop(0, force=True)
    worker.request_stop(0)


def _hear_of_death_of(parent_pid: int) -> None:
    """Have the kernel send SIGTERM when the parent dies; a second way to hear of it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signals.SIGTERM)
    if os.getppid() != parent_pid:
        sys.exit(1)


if __name__ == "__main__":
    main()
