"""The program of one worker process of several, which follows the commands of its supervisor."""

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
from omniq.worker.import_path import use_path
from omniq.worker.process import console
from omniq.worker.process.supervisor import Worker
from omniq.worker.process.worker_children import (
    READY,
    REPLACED,
    STOPPED,
    Command,
    Died,
    Force,
    Stop,
    WorkerChildConfig,
)

_PR_SET_PDEATHSIG = 1
_RECYCLE = 75
"""The exit code of a process that asks to be replaced: what sysexits.h calls a temporary failure."""


def main() -> None:
    """Run a worker until the supervisor stops it, or has ended."""
    descriptor, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    _end_with_parent(parent_pid)
    sock = socket.socket(fileno=descriptor)
    # Not inherited by processes that a task starts.
    sock.set_inheritable(False)
    commands = sock.makefile("rb")
    config = msgspec.json.decode(commands.readline(), type=WorkerChildConfig)
    use_path(config.path)
    if config.log is not None:
        console.start_logging(config.log)
    _run(config, sock, commands)


def _run(config: WorkerChildConfig, sock: socket.socket, commands: BufferedReader) -> NoReturn:
    worker_config = config.worker
    try:
        worker = Worker(
            config.url,
            worker_config.modules,
            worker_config.concurrency,
            queues=worker_config.queues,
            poll_interval=worker_config.poll_interval,
            lease=worker_config.lease,
            shutdown_timeout=worker_config.shutdown_timeout,
            settings=Settings(**config.settings),
            listeners=worker_config.listeners,
            lifespan=worker_config.lifespan,
            middleware=worker_config.middleware,
        )
        # With what only a supervisor decides.
        worker.config = worker_config
        threading.Thread(target=_follow_commands, args=(worker, commands), daemon=True).start()
        # A child that ends before this has failed to start, and is not replaced.
        worker.before_claims = lambda: _report_ready(sock)
        code = worker.run()
    except OmniqError as error:
        console.exit_process(console.report_error(error))
    if worker.needs_restart:
        # The supervisor replaces it, as every child that ends without a command.
        code = REPLACED if worker.is_restart_planned else _RECYCLE
    elif worker.was_asked_to_stop and code == 0:
        code = STOPPED
    console.exit_process(code, at_once=worker.was_cut_off)


def _report_ready(sock: socket.socket) -> None:
    # If the supervisor has ended by now, `_follow_commands` notices it and releases what runs.
    with suppress(OSError):
        sock.sendall(READY)


def _follow_commands(worker: Worker, commands: BufferedReader) -> None:
    """Pass on the supervisor's commands; when it has ended, release everything and stop."""
    for line in commands:
        match msgspec.json.decode(line, type=Command):
            case Stop(timeout):
                worker.request_stop(timeout)
            case Force():
                worker.request_stop(0, force=True)
            case Died(pid, how):
                worker.deaths[pid] = how
    worker.request_stop(0)


def _end_with_parent(parent_pid: int) -> None:
    """Make the kernel send SIGTERM when the parent dies: a second way to notice it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signals.SIGTERM)
    if os.getppid() != parent_pid:
        sys.exit(1)


if __name__ == "__main__":
    main()
