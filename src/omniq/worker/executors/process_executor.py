"""Supervised child processes for functions with `executor="process"`.

Each child serves one call at a time. When it dies, that one call fails and the child is replaced;
when a call must stop, its child is killed, with all processes that the task has started. Not
`ProcessPoolExecutor`, in which one dying child breaks the pool for everybody.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal as signals
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

from omniq._futures import set_result
from omniq.clock import Clock
from omniq.errors import OmniqError, SerializationError, StaleClaim
from omniq.models import Task, TaskError
from omniq.serialization import (
    CloudpickleSerializer,
    MsgspecSerializer,
    Serializer,
    encode_internal,
)
from omniq.settings import Settings
from omniq.tasks.context import TaskContext
from omniq.tasks.error_rules import ErrorRules
from omniq.tasks.steps import recoded
from omniq.worker.executors.process_protocol import (
    HEADER,
    SLACK,
    Answer,
    Order,
    Reply,
    RuleBook,
    Unserialisable,
    Welcome,
    decode_reply,
)

# What a child needs it is told over its socket; what a task must not see is not in its environment.
_SECRETS = re.compile(r"OMNIQ_(URL|\w*KEYS?|DASHBOARD_\w+)")

_TRIES = 3
"""How many children may die before one has begun with a call; that is not the call's fault."""

_REAP_SECONDS = 1.0
"""SIGKILL takes effect at once, but for a process in an uninterruptible system call."""

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_BOOT = (
    "import sys; root, life, parent, sock = sys.argv[1:]; del sys.argv[1:]; "
    "sys.path.insert(0, root); "
    "from omniq.worker.executors.die_with_parent import hold; hold(int(life), int(parent)); "
    "from omniq.worker.executors.process_child import main; main(int(sock))"
)


class ProcessSlots:
    """Children that are started when needed and kept for the next call."""

    def __init__(
        self,
        settings: Settings,
        serializer: Serializer,
        allow: list[str] | None,
        clock: Clock,
        *,
        errors: ErrorRules | None = None,
    ) -> None:
        self._clock = clock
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()
        self._dying: set[asyncio.Future[int]] = set()
        pickles = isinstance(serializer, CloudpickleSerializer)
        welcome = Welcome(
            path=[str(entry) for entry in sys.path],
            allow=allow,
            max_payload=settings.max_payload,
            # Of this pool alone: the key of the store is nothing that a task should have.
            pickle_key=clock.new_id() + clock.new_id() if pickles else None,
            rules=None if errors is None else RuleBook.of(errors),
        )
        # What the store seals, and how, is nothing that a child should know.
        self._store_codec = None if isinstance(serializer, MsgspecSerializer) else serializer
        self._codec = welcome.codec()
        self._welcome = encode_internal(welcome)
        self._longest = settings.max_payload + SLACK

    async def call(self, task: Task, task_context: TaskContext) -> Any:
        """Run the task in a child. When cancelled, the child is killed.

        Raises what the task raised: a `Signal`, or the record of any other exception; and a
        `TaskError` of type WorkerProcessDied when the child died.
        """
        order = Order(self._codec.encode_task(task), task_context.timeout)
        reply = await self._serve(encode_internal(order), task_context)
        if reply.signal is not None:
            raise reply.signal.to_signal()
        if reply.unserialisable is not None:
            raise Unserialisable(reply.unserialisable)
        if reply.error is not None:
            raise reply.error
        result = self._codec.decode_result(reply.result or b"")
        task_context.warnings = result.warnings
        return result.result

    async def close(self) -> None:
        """End all children, those that run something included, and wait until they are gone."""
        for child in list(self._all):
            self._drop(child)
        self._idle.clear()
        if self._dying:
            all_gone = asyncio.ensure_future(_gone(self._dying))
            if not await self._clock.wait(all_gone, _REAP_SECONDS):
                all_gone.cancel()

    async def _serve(self, order: bytes, task_context: TaskContext) -> Reply:
        died = 0
        for _ in range(_TRIES):
            child = self._take()
            reply = None
            try:
                if not child.is_welcomed:
                    await child.send(self._welcome)
                    child.is_welcomed = True
                await child.send(order)
                reply = await self._first_of(child)
                while not reply.is_final:
                    await self._attend(reply, child, task_context)
                    reply = await child.receive(self._longest)
            except (OSError, EOFError, SerializationError):
                died = await self._drop(child)
                if reply is not None:
                    raise _died(died) from None
            except BaseException:
                self._drop(child)
                raise
            else:
                self._idle.append(child)
                return reply
        raise _died(died)

    async def _attend(self, reply: Reply, child: _Child, task_context: TaskContext) -> None:
        """Do what the child asks for while it runs."""
        progress = reply.progress
        if progress is not None and progress.task_id == task_context.task_id:
            task_context.progress(progress.fraction, progress.message)
        if reply.skipped is not None:
            task_context.tell_skipped(reply.skipped.step, reply.skipped.error)
        if reply.ask is not None:
            answer = await self._answer(reply.ask.checkpoint, task_context)
            await child.send(encode_internal(answer))

    async def _answer(self, checkpoint: bytes | None, task_context: TaskContext) -> Answer:
        task_id, store = task_context.task_id, self._store_codec
        try:
            if checkpoint is None:
                found = await task_context.load_checkpoint()
                if found is not None and store is not None:
                    found = recoded(found, task_id, store, self._codec)
                return Answer(checkpoint=found)
            if store is not None:
                checkpoint = recoded(checkpoint, task_id, self._codec, store)
            await task_context.save_checkpoint(checkpoint)
            return Answer()
        except StaleClaim:
            return Answer(is_stale=True)
        except OmniqError as error:
            is_unfit = isinstance(error, SerializationError)
            return Answer(error=str(error), is_unfit=is_unfit)

    async def _first_of(self, child: _Child) -> Reply:
        """The child's word that it begins. What earlier calls left in the socket is dropped."""
        while not (reply := await child.receive(self._longest)).has_begun:
            pass
        return reply

    def _take(self) -> _Child:
        while self._idle:
            child = self._idle.pop()
            if child.is_alive:
                return child
            self._drop(child)
        try:
            child = _Child()
        except OSError as error:
            raise TaskError(
                f"no process could be started for the task: {error}",
                error_type="WorkerProcessNotStarted",
            ) from error
        self._all.add(child)
        return child

    def _drop(self, child: _Child) -> asyncio.Future[int]:
        """Kill the child; how it ended is known when it has been reaped."""
        self._all.discard(child)
        ended = child.kill()
        self._dying.add(ended)
        ended.add_done_callback(self._dying.discard)
        return ended


class _Child:
    """One child process, the leader of its own group, and the socket to it."""

    def __init__(self) -> None:
        self.is_welcomed = False
        ours, theirs = socket.socketpair()
        life, self._lifeline = os.pipe()
        try:
            self._process = _spawn(life, theirs.fileno())
        except BaseException:
            ours.close()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(life)
        ours.setblocking(False)
        self._socket = ours

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def send(self, message: bytes) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._socket, HEADER.pack(len(message)) + message)

    async def receive(self, longest: int) -> Reply:
        (length,) = HEADER.unpack(await self._read(HEADER.size))
        if length > longest:
            raise EOFError("the task has written to the worker's socket")
        return decode_reply(await self._read(length))

    async def _read(self, length: int) -> bytes:
        loop, data = asyncio.get_running_loop(), bytearray()
        while len(data) < length:
            chunk = await loop.sock_recv(self._socket, min(length - len(data), 1 << 18))
            if not chunk:
                raise EOFError("the child has closed its end")
            data += chunk
        return bytes(data)

    def kill(self) -> asyncio.Future[int]:
        """End the process and its group now; its exit code, once it has been reaped."""
        # Before it is reaped: until then its number cannot be anybody else's.
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signals.SIGKILL)
        self._socket.close()
        os.close(self._lifeline)
        return self._reap()

    def _reap(self) -> asyncio.Future[int]:
        # In a thread of its own: the loop must not wait for a large process to be torn down, and
        # the threads of its executor may all be busy with what tasks have put there.
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()

        def wait() -> None:
            code = self._process.wait()
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(set_result, ended, code)

        try:
            threading.Thread(target=wait, name="omniq-reaper", daemon=True).start()
        except RuntimeError:
            # No thread to be had: `subprocess` itself reaps it before it starts another.
            ended.set_result(self._process.poll() or -signals.SIGKILL)
        return ended


def _spawn(life: int, sock: int) -> subprocess.Popen[bytes]:
    environment = {
        name: value for name, value in os.environ.items() if not _SECRETS.fullmatch(name)
    }
    numbers = [str(number) for number in (life, os.getpid(), sock)]
    return subprocess.Popen(
        # Unbuffered: what a task has printed must not be lost when its process is killed.
        [sys.executable, "-u", "-P", "-c", _BOOT, _ROOT, *numbers],
        pass_fds=(life, sock),
        stdin=subprocess.DEVNULL,
        env=environment,
        # Its own group, so that it can be killed with its own children; and Ctrl-C in the
        # worker's terminal is the worker's.
        start_new_session=True,
    )


def _died(code: int) -> TaskError:
    return TaskError(f"worker_process_died: {_how(code)}", error_type="WorkerProcessDied")


def _how(code: int) -> str:
    """
    >>> _how(-9), _how(7)
    ('signal 9 (SIGKILL)', 'exit code 7')
    """
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signals.Signals(-code).name})"
    except ValueError:
        # Real-time signals have no names.
        return f"signal {-code}"


async def _gone(dying: set[asyncio.Future[int]]) -> None:
    await asyncio.wait(set(dying))
