"""The other end of `processes`: a process that runs one task after the other for its parent."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable
from typing import Any

from omniq import context
from omniq.clock import SYSTEM_CLOCK
from omniq.context import TaskContext
from omniq.functions import FunctionCache
from omniq.models import Progress, TaskError, TaskResult, TaskStatus
from omniq.running.callee import Callee, as_raised, callee_of
from omniq.running.crossing import HEADER, Order, Reply, SignalRecord, decode_order, decode_welcome
from omniq.serialization import Serializer, encode_internal
from omniq.signals import Signal


class Parent:
    """The socket to the worker. The task's own threads may report at the same time."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def receive(self) -> bytes | None:
        """The next message; None when the parent has gone."""
        header = self._read(HEADER.size)
        return None if header is None else self._read(HEADER.unpack(header)[0])

    def send(self, reply: Reply) -> None:
        message = encode_internal(reply)
        with self._lock:
            self._socket.sendall(HEADER.pack(len(message)) + message)

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


class Server:
    """Makes the calls that the parent orders, one at a time."""

    def __init__(self, parent: Parent, functions: FunctionCache, codec: Serializer) -> None:
        self._parent = parent
        self._functions = functions
        self._codec = codec
        self._callees: dict[str, Callee] = {}

    def serve(self, order: Order) -> Reply:
        """Make one call. Whatever happens is a reply; nothing the task does is raised."""
        try:
            # A context of its own: what one task sets, the next one must not find.
            task_id, value = contextvars.Context().run(self._call, order)
        except Signal as raised:
            return _reply_of(raised)
        except BaseException as error:
            # The user's code may raise anything; all of it goes back as data.
            return Reply(error=_record_of(as_raised(error)))
        result = TaskResult(task_id=task_id, status=TaskStatus.SUCCESS, result=value)
        try:
            return Reply(result=self._codec.encode_result(result))
        except BaseException as error:
            # Pickling runs the value's own methods.
            return Reply(unserialisable=_record_of(error))

    def _call(self, order: Order) -> tuple[str, Any]:
        task = self._codec.decode_task(order.task)
        callee = self._callees.get(task.func_path)
        if callee is None:
            callee = callee_of(self._functions.resolve(task.func_path))
            self._callees[task.func_path] = callee
        task_context = TaskContext(task, order.timeout, self._parent.report)
        args = (task_context, *task.args) if callee.takes_context else task.args
        context.enter(task_context)
        try:
            value = callee.func(*args, **task.kwargs)
            if inspect.isawaitable(value):
                value = asyncio.run(_wait_for(value))
            return task.id, value
        finally:
            # A thread that the task left behind has nothing to report any more.
            task_context.cancelled = True


def main(descriptor: int) -> None:
    """Serve the parent until it goes away."""
    _ignore_polite_signals()
    # Not for the processes that a task may start, and kept open to the very end: the parent
    # takes its closing for the death of this process.
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)
    code = 0
    try:
        _serve_all(Parent(sock))
    except BaseException:
        # The edge of the process: the task may have closed the socket under us.
        traceback.print_exc()
        code = 1
    # At once: a thread that a task left behind must not keep the process.
    os._exit(code)


def _serve_all(parent: Parent) -> None:
    greeting = parent.receive()
    if greeting is None:
        return
    welcome = decode_welcome(greeting)
    sys.path[:] = welcome.path
    server = Server(parent, FunctionCache(welcome.allow), welcome.codec())
    while (message := parent.receive()) is not None:
        order = decode_order(message)
        parent.send(Reply(has_begun=True))
        parent.send(server.serve(order))


def _reply_of(raised: Signal) -> Reply:
    try:
        return Reply(signal=SignalRecord.of(raised))
    except Exception as error:
        # A subclass with a delay that is not a number.
        return Reply(error=_record_of(error))


def _record_of(error: BaseException) -> TaskError:
    return TaskError.from_exception(error, timestamp=SYSTEM_CLOCK.now())


async def _wait_for(value: Awaitable[Any]) -> Any:
    return await value


def _ignore_polite_signals() -> None:
    """Leave it to the worker what Ctrl-C and SIGTERM mean for what runs here.

    By a function that does nothing: processes started by a task would inherit SIG_IGN, and could
    then not be terminated.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=_restore_signals)


def _restore_signals() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
