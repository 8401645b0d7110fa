"""Supervised child processes for functions with `executor="process"`.

Each child serves one call at a time. When it dies, that one call fails and the child is replaced;
when a call must stop, its child is killed. Tasks, results and errors cross as codec bytes, never as
pickles. Not `ProcessPoolExecutor`, in which one dying child breaks the pool for everybody.
"""

from __future__ import annotations

import asyncio
import os
import signal as signals
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from typing import Any

import msgspec

from omniq.context import TaskContext
from omniq.errors import SerializationError
from omniq.models import Progress, Task, TaskError
from omniq.serialization import Serializer, encode_internal, internal_decoder
from omniq.settings import Settings
from omniq.signals import Discard, Retry, Signal, Snooze

_HEADER = struct.Struct(">I")

# What a child needs it is told over its socket; what a task must not see is not in its environment.
_SECRETS = ("OMNIQ_SIGNING_KEY", "OMNIQ_URL")


class Welcome(msgspec.Struct, frozen=True):
    """The first message to a child: how to find and decode what it will be sent."""

    path: list[str]
    serializer: str
    signing_key: str | None
    max_payload: int
    allow: list[str] | None


class SignalRecord(msgspec.Struct, frozen=True):
    """A `Retry`, `Snooze` or `Discard` that the task raised."""

    kind: str
    delay: float | None
    reason: str

    @classmethod
    def of(cls, raised: Signal) -> SignalRecord:
        return cls(type(raised).__name__, getattr(raised, "delay", None), str(raised))

    def to_signal(self) -> Signal:
        match self.kind:
            case "Snooze":
                return Snooze(self.delay or 0)
            case "Discard":
                return Discard(self.reason)
            case _:
                return Retry(self.reason, delay=self.delay)


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A message from a child: progress, or the end of a call."""

    progress: Progress | None = None
    result: bytes | None = None
    error: TaskError | None = None
    signal: SignalRecord | None = None


_decode_reply = internal_decoder(Reply)


class ProcessSlots:
    """Children that are started when needed and kept for the next call."""

    def __init__(self, settings: Settings, serializer: Serializer, allow: list[str] | None) -> None:
        self._serializer = serializer
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()
        self._welcome = encode_internal(
            Welcome(
                path=sys.path,
                serializer=settings.serializer,
                signing_key=settings.signing_key,
                max_payload=settings.max_payload,
                allow=allow,
            )
        )

    async def call(self, task: Task, task_context: TaskContext) -> Any:
        """Run the task in a child. When cancelled, the child is killed."""
        child = self._idle.pop() if self._idle else await self._start()
        try:
            await child.send(self._serializer.encode_task(task))
            reply = await child.receive()
            while reply.progress is not None:
                task_context.progress(reply.progress.fraction, reply.progress.message)
                reply = await child.receive()
        except (OSError, EOFError, SerializationError) as error:
            raise await self._lost(child) from error
        except BaseException:
            self._all.discard(child)
            child.kill()
            raise
        self._idle.append(child)
        if reply.signal is not None:
            raise reply.signal.to_signal()
        if reply.error is not None:
            raise reply.error
        return self._serializer.decode_result(reply.result or b"").result

    async def close(self) -> None:
        """End all children, those that run something included."""
        children, self._all = self._all, set()
        self._idle.clear()
        for child in children:
            child.kill()

    async def _start(self) -> _Child:
        child = await asyncio.to_thread(_Child.start)
        self._all.add(child)
        try:
            await child.connect()
            await child.send(self._welcome)
        except OSError as error:
            raise await self._lost(child) from error
        return child

    async def _lost(self, child: _Child) -> TaskError:
        self._all.discard(child)
        code = await asyncio.to_thread(child.end)
        died = code < 0
        how = f"signal {-code} ({signals.Signals(-code).name})" if died else f"exit code {code}"
        return TaskError(f"worker_process_died: {how}", error_type="WorkerProcessDied")


class _Child:
    """One child process and the socket to it."""

    def __init__(self, process: subprocess.Popen[bytes], ours: socket.socket) -> None:
        self._process = process
        self._socket = ours
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @classmethod
    def start(cls) -> _Child:
        ours, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name not in _SECRETS}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "omniq._child", str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        ours.setblocking(False)
        return cls(process, ours)

    async def connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket)

    async def send(self, message: bytes) -> None:
        assert self._writer is not None
        self._writer.write(_HEADER.pack(len(message)) + message)
        await self._writer.drain()

    async def receive(self) -> Reply:
        assert self._reader is not None
        (length,) = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
        return _decode_reply(await self._reader.readexactly(length))

    def kill(self) -> None:
        """End the process now; it is reaped without waiting for long."""
        with suppress(ProcessLookupError):
            self._process.kill()
        if self._writer is not None:
            self._writer.close()
        # SIGKILL takes effect at once but for a process in an uninterruptible system call.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)

    def end(self) -> int:
        """Wait for a process that has closed its end, and return how it ended."""
        try:
            return self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
