"""Supervised child processes for functions with `executor="process"`.

Each child runs one task at a time. When it dies, that one run fails and the child is replaced;
when a run must stop, its child is killed, with all processes that the task has started. Not
`ProcessPoolExecutor`, in which one dying child breaks the pool for all tasks.
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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omniq import log
from omniq.clock import SYSTEM_CLOCK, Clock
from omniq.concurrency.futures import set_result
from omniq.errors import NotSealed, OmniqError, SerializationError, StaleClaim
from omniq.models import Task, TaskError, TaskResult
from omniq.serialization import CloudpickleSerializer, Serializer, encode_internal
from omniq.settings import Settings
from omniq.storage.urls import WORKER_URL
from omniq.tasks.context import TaskContext
from omniq.tasks.error_rules import ErrorRules
from omniq.tasks.task_output import check_encoded
from omniq.worker.executors.batch_call import Item
from omniq.worker.executors.child_lifetime import NOT_IMPORTABLE
from omniq.worker.executors.child_limits import CHILD_LIMITS, check_child_limits
from omniq.worker.executors.flow_actions import without_pages
from omniq.worker.executors.process_enqueue import RunAnswers
from omniq.worker.executors.process_protocol import (
    HEADER,
    SLACK,
    CheckpointReply,
    ChildConfig,
    EncodedRules,
    Reply,
    RunRequest,
    Unserialisable,
    decode_reply,
)
from omniq.worker.lifespan import Lifespan, importable_path
from omniq.worker.recycling import ProcessLimits

# A child receives what it needs over its socket; its environment has no secrets that a task could
# read.
_SECRETS = re.compile(r"OMNIQ_(URL|\w*KEYS?|DASHBOARD_\w+)")

_CHILD_SETTINGS = (
    *("default_max_retries", "max_payload", "retry", "queues", "start_timeout"),
    *CHILD_LIMITS,
)
"""What a child builds the tasks by that it enqueues, how long it may start, and its limits. None is a secret."""

_TRIES = 3
"""How many children may die before a run has started: the task did not cause that."""

_CLOSE_SECONDS = 10.0
"""How long idle children may take together to close their lifespans and resources."""

_REAP_SECONDS = 1.0
"""SIGKILL takes effect immediately, except in an uninterruptible system call."""

_ROOT = str(Path(__file__).absolute().parents[3])
"""The folder that contains the package `omniq`."""

_BOOT = (
    "import sys; root, pipe, parent, sock = sys.argv[1:]; del sys.argv[1:]; "
    "sys.path.insert(0, root); "
    "from omniq.worker.executors.die_with_parent import hold; hold(int(pipe), int(parent)); "
    "from omniq.worker.executors.process_child import main; main(int(sock))"
)


class ProcessExecutor:
    """Child processes that are started when needed and reused for the next run."""

    def __init__(
        self,
        settings: Settings,
        serializer: Serializer,
        clock: Clock,
        *,
        errors: ErrorRules | None = None,
        lifespan: Lifespan | None = None,
    ) -> None:
        self._clock = clock
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()
        self._dying: set[asyncio.Future[Any]] = set()
        self._retiring: set[asyncio.Future[None]] = set()
        check_child_limits(settings)
        self._limits = ProcessLimits(settings)
        pickles = isinstance(serializer, CloudpickleSerializer)
        path = None if lifespan is None else importable_path(lifespan)
        config = ChildConfig(
            path=[str(entry) for entry in sys.path],
            max_payload=settings.max_payload,
            # For this pool alone: a task must not get the key of the storage.
            pickle_key=clock.new_id() + clock.new_id() if pickles else None,
            settings={name: settings.as_data()[name] for name in _CHILD_SETTINGS},
            rules=None if errors is None else EncodedRules.of(errors),
            # In a program of the user, the child's lines belong to that program.
            log=None if log.current_console() is None else log.child_config(),
            lifespan=path,
            why_no_state=NOT_IMPORTABLE if lifespan is not None and path is None else None,
        )
        # A child must not know whether and how the storage signs its records.
        self._codec = config.codec()
        self._config = encode_internal(config)
        self._max_message = settings.max_payload + SLACK

    async def call(self, task: Task, task_context: TaskContext, function: str) -> Any:
        """Run the task in a child, with the function at that path. When cancelled, the child is killed.

        Raises what the task raised: a `Signal`, or the record of any other exception; and a
        `TaskError` of type WorkerProcessDied when the child died.
        """
        ahead = self._clock.micros() - SYSTEM_CLOCK.boot_micros()
        if task.workflow is not None and task.workflow.refs:
            task = without_pages(task)
        request = RunRequest(self._codec.encode_task(task), task_context.timeout, ahead, function)
        reply = await self._run_in_child(encode_internal(request), task_context, self._max_message)
        outcome = self._outcome_of(reply)
        if isinstance(outcome, TaskResult):
            task_context.warnings = outcome.warnings
            return outcome.result
        raise outcome

    async def call_batch(self, items: Sequence[Item], function: str) -> list[Any]:
        """Run the tasks of a batch in a child, in one call; returns a value or an exception of each.

        When cancelled, the child is killed. Raises a `TaskError` when the child died.
        """
        ahead = self._clock.micros() - SYSTEM_CLOCK.boot_micros()
        first, *others = (self._codec.encode_task(item.task) for item in items)
        context = items[0].context
        request = RunRequest(first, context.timeout, ahead, function, others)
        longest = self._max_message * len(items)
        reply = await self._run_in_child(encode_internal(request), context, longest)
        if reply.items is None:
            # The function could not be found there.
            return [self._outcome_of(reply)] * len(items)
        outcomes = map(self._outcome_of, reply.items)
        return [each.result if isinstance(each, TaskResult) else each for each in outcomes]

    def _outcome_of(self, reply: Reply) -> TaskResult | BaseException:
        """How a run has ended: its result, or what it is to raise here."""
        if reply.signal is not None:
            return reply.signal.to_signal()
        if reply.unserialisable is not None:
            return Unserialisable(reply.unserialisable)
        if reply.error is not None:
            return reply.error
        return self._codec.decode_result(reply.result or b"")

    async def close(self) -> None:
        """Kill all children, also those that run a task, and wait until they have ended.

        Idle ones that hold a lifespan or resources close them first.
        """
        try:
            await self._finish_idle()
        finally:
            # Also when the worker is stopped by force: no child may outlive it.
            for child in list(self._all):
                self._drop(child)
            self._idle.clear()
        if self._dying:
            ended = asyncio.ensure_future(_all_ended(self._dying))
            if not await self._clock.wait(ended, _REAP_SECONDS):
                ended.cancel()

    async def _finish_idle(self) -> None:
        closing = [child for child in self._idle if child.needs_closing and child.is_alive]
        finishing: set[asyncio.Future[Any]] = {child.finish() for child in closing}
        finishing |= self._retiring
        if finishing:
            ended = asyncio.ensure_future(_all_ended(finishing))
            if not await self._clock.wait(ended, _CLOSE_SECONDS):
                ended.cancel()

    async def _run_in_child(self, request: bytes, task_context: TaskContext, longest: int) -> Reply:
        died = 0
        answers = RunAnswers(task_context, self._codec)
        for _ in range(_TRIES):
            child = self._take()
            reply = None
            try:
                if not child.is_configured:
                    await child.send(self._config)
                    child.is_configured = True
                await child.send(request)
                reply = await self._wait_started(child)
                while not reply.is_final:
                    await self._handle(reply, child, task_context, answers)
                    reply = await child.receive(longest)
            except (OSError, EOFError, SerializationError):
                died = await self._drop(child)
                if reply is not None:
                    raise _death_of(died) from None
            except BaseException:
                self._drop(child)
                raise
            else:
                child.needs_closing = reply.needs_closing
                child.runs += 1
                self._put_back(child)
                return reply
        raise _death_of(died)

    def _put_back(self, child: _Child) -> None:
        """Use the child for the next run, unless it has reached a limit: it then closes what it holds, and ends."""
        if not self._limits.exceeded(child.runs, child.pid):
            self._idle.append(child)
            return
        retiring = asyncio.ensure_future(self._retire(child))
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)

    async def _retire(self, child: _Child) -> None:
        if child.needs_closing and child.is_alive:
            ended = asyncio.ensure_future(_all_ended({child.finish()}))
            if not await self._clock.wait(ended, _CLOSE_SECONDS):
                ended.cancel()
        if child in self._all:
            self._drop(child)

    async def _handle(
        self, reply: Reply, child: _Child, task_context: TaskContext, answers: RunAnswers
    ) -> None:
        """Pass on a report of the run, or answer its request."""
        progress = reply.progress
        if progress is not None and progress.task_id == task_context.task_id:
            task_context.progress(progress.fraction, progress.message)
        output = reply.output
        if output is not None:
            check_encoded(output.data)
            if (output.task_id, output.token) == (task_context.task_id, task_context.fencing_token):
                # The child waits meanwhile, once its socket is full.
                await task_context.pass_output(output.data)
        if reply.skipped is not None:
            task_context.report_skipped_step(reply.skipped.step, reply.skipped.error)
        if reply.checkpoint_request is not None:
            checkpoint = reply.checkpoint_request.checkpoint
            await child.send(encode_internal(await self._reply_to(checkpoint, task_context)))
        asked = reply.enqueue_request or reply.question or reply.flow_request
        if asked is not None:
            await child.send(encode_internal(await answers.answer(asked)))

    async def _reply_to(
        self, checkpoint: bytes | None, task_context: TaskContext
    ) -> CheckpointReply:
        try:
            if checkpoint is None:
                stored = await task_context.load_checkpoint(self._codec)
                return CheckpointReply(checkpoint=stored)
            await task_context.save_checkpoint(checkpoint, self._codec)
            return CheckpointReply()
        except StaleClaim:
            return CheckpointReply(is_stale=True)
        except NotSealed:
            return CheckpointReply(is_not_sealed=True)
        except OmniqError as error:
            is_unfit = isinstance(error, SerializationError)
            return CheckpointReply(error=str(error), is_unfit=is_unfit)

    async def _wait_started(self, child: _Child) -> Reply:
        """The message that the run has started. What earlier runs left in the socket is dropped."""
        while not (reply := await child.receive(self._max_message)).has_started:
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
        """Kill the child; the future has its exit code once it has been reaped."""
        self._all.discard(child)
        ended = child.kill()
        self._dying.add(ended)
        ended.add_done_callback(self._dying.discard)
        return ended


class _Child:
    """One child process, the leader of its process group, and the socket to it."""

    def __init__(self) -> None:
        self.is_configured = self.needs_closing = False
        self.runs = 0
        ours, theirs = socket.socketpair()
        inherited, self._held_pipe = os.pipe()
        try:
            self._process = _spawn(inherited, theirs.fileno())
        except BaseException:
            ours.close()
            os.close(self._held_pipe)
            raise
        finally:
            theirs.close()
            os.close(inherited)
        ours.setblocking(False)
        self._socket = ours

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def send(self, message: bytes) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._socket, HEADER.pack(len(message)) + message)

    async def receive(self, max_message: int) -> Reply:
        (length,) = HEADER.unpack(await self._read(HEADER.size))
        if length > max_message:
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

    def finish(self) -> asyncio.Future[int]:
        """Ask an idle process to close what it holds and to end; the future has its exit code."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        return self._reap()

    def kill(self) -> asyncio.Future[int]:
        """Kill the process and its group; the future has the exit code once it has been reaped."""
        # Before it is reaped: until then no other process can have its id.
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signals.SIGKILL)
        self._socket.close()
        os.close(self._held_pipe)
        return self._reap()

    def _reap(self) -> asyncio.Future[int]:
        # In a separate thread: the loop must not wait for a large process to be torn down, and the
        # threads of its default executor may all be busy with calls of tasks.
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()

        def wait() -> None:
            code = self._process.wait()
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(set_result, ended, code)

        try:
            threading.Thread(target=wait, name="omniq-reaper", daemon=True).start()
        except RuntimeError:
            # No thread could be started: `subprocess` reaps the child before it starts another.
            ended.set_result(self._process.poll() or -signals.SIGKILL)
        return ended


def _spawn(pipe: int, sock: int) -> subprocess.Popen[bytes]:
    environment = {
        name: value for name, value in os.environ.items() if not _SECRETS.fullmatch(name)
    }
    if os.environ.get("OMNIQ_URL"):
        environment["OMNIQ_URL"] = WORKER_URL
    numbers = [str(number) for number in (pipe, os.getpid(), sock)]
    return subprocess.Popen(
        # Unbuffered: what a task has printed must not be lost when its process is killed.
        [sys.executable, "-u", "-P", "-c", _BOOT, _ROOT, *numbers],
        pass_fds=(pipe, sock),
        stdin=subprocess.DEVNULL,
        env=environment,
        # A separate group, so that it can be killed with its children, and so that Ctrl-C in the
        # terminal reaches only the worker.
        start_new_session=True,
    )


def _death_of(code: int) -> TaskError:
    return TaskError(f"worker_process_died: {_describe_exit(code)}", error_type="WorkerProcessDied")


def _describe_exit(code: int) -> str:
    """
    >>> _describe_exit(-9), _describe_exit(7)
    ('signal 9 (SIGKILL)', 'exit code 7')
    """
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signals.Signals(-code).name})"
    except ValueError:
        # Real-time signals have no names.
        return f"signal {-code}"


async def _all_ended(dying: set[asyncio.Future[Any]]) -> None:
    await asyncio.wait(set(dying))
