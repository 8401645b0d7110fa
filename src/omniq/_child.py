"""The other end of `processes`: a process that runs one task after the other for its parent."""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import signal
import socket
import struct
import sys
from typing import Any

from omniq import context
from omniq.clock import SYSTEM_CLOCK
from omniq.context import TaskContext
from omniq.errors import SerializationError
from omniq.execution import callee_of
from omniq.functions import FunctionCache
from omniq.models import Progress, Task, TaskError, TaskResult, TaskStatus
from omniq.processes import Reply, SignalRecord, Welcome
from omniq.serialization import Serializer, encode_internal, internal_decoder, serializer_for
from omniq.settings import Settings
from omniq.signals import Signal

_HEADER = struct.Struct(">I")
_PR_SET_PDEATHSIG = 1


class Parent:
    """The socket to the worker."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def receive(self) -> bytes | None:
        """The next message; None when the parent has gone."""
        header = self._read(_HEADER.size)
        return None if header is None else self._read(_HEADER.unpack(header)[0])

    def send(self, reply: Reply) -> None:
        message = encode_internal(reply)
        self._socket.sendall(_HEADER.pack(len(message)) + message)

    def report(self, progress: Progress) -> None:
        self.send(Reply(progress=progress))

    def _read(self, length: int) -> bytes | None:
        data = bytearray()
        while len(data) < length:
            chunk = self._socket.recv(length - len(data))
            if not chunk:
                return None
            data += chunk
        return bytes(data)


def main() -> None:
    """Serve the parent until it goes away."""
    descriptor, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent_pid)
    # The worker's own Ctrl-C and SIGTERM decide what becomes of running tasks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as sock:
        # Not for the processes that a task may start.
        sock.set_inheritable(False)
        parent = Parent(sock)
        greeting = parent.receive()
        if greeting is None:
            return
        welcome = internal_decoder(Welcome)(greeting)
        sys.path[:] = welcome.path
        functions = FunctionCache(welcome.allow)
        serializer = serializer_for(
            Settings(
                serializer="cloudpickle" if welcome.serializer == "cloudpickle" else "msgspec",
                signing_key=welcome.signing_key,
                max_payload=welcome.max_payload,
            )
        )
        while (message := parent.receive()) is not None:
            parent.send(_serve(message, functions, serializer, parent))


def _serve(
    message: bytes, functions: FunctionCache, serializer: Serializer, parent: Parent
) -> Reply:
    try:
        task = serializer.decode_task(message)
        value = _call(task, functions, parent)
        result = TaskResult(task_id=task.id, status=TaskStatus.SUCCESS, result=value)
        return Reply(result=serializer.encode_result(result))
    except Signal as raised:
        return Reply(signal=SignalRecord.of(raised))
    except SerializationError as error:
        return Reply(
            error=TaskError(str(error), error_type="SerializationError", category="permanent")
        )
    except BaseException as error:
        # The user's code may raise anything; all of it goes back as data.
        return Reply(error=TaskError.from_exception(error, timestamp=SYSTEM_CLOCK.now()))


def _call(task: Task, functions: FunctionCache, parent: Parent) -> Any:
    callee = callee_of(functions.resolve(task.func_path))
    task_context = TaskContext(task, task.timeout, parent.report)
    args = (task_context, *task.args) if callee.takes_context else task.args
    context.enter(task_context)
    value = callee.func(*args, **task.kwargs)
    if inspect.iscoroutine(value):
        return asyncio.run(value)
    return value


def _die_with(parent_pid: int) -> None:
    """Have the kernel end this process with its parent, so that none is left behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)


if __name__ == "__main__":
    main()
