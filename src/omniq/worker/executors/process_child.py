"""The program of a child process: it runs one task after the other for its parent."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, NoReturn, TypeVar

import msgspec

from omniq import log
from omniq.clock import SYSTEM_CLOCK, Clock
from omniq.concurrency.coroutines import run_without_loop
from omniq.concurrency.running_task import CURRENT
from omniq.errors import (
    InvalidTask,
    NotSealed,
    SerializationError,
    StaleClaim,
    StorageClosed,
    StorageError,
    UnguardedModule,
)
from omniq.events import WorkerProblem
from omniq.models import ErrorCategory, Progress, Task, TaskError, TaskResult, TaskStatus
from omniq.operations.handle import AsyncTaskHandle, TaskHandle
from omniq.serialization import Serializer, encode_internal, keeps_objects
from omniq.settings import Settings
from omniq.storage.store_clock import StoreClock
from omniq.tasks import context
from omniq.tasks.arguments import FunctionTypes
from omniq.tasks.context import TaskContext
from omniq.tasks.control import Signal
from omniq.tasks.error_rules import ErrorRules, explain
from omniq.tasks.functions import resolve
from omniq.tasks.signature import Callee, as_raised, callee_of, item_of
from omniq.tasks.task_builder import TaskBuilder
from omniq.tasks.task_enqueuer import NewTasks
from omniq.worker.executors.batch_call import RunningBatch
from omniq.worker.executors.child_lifetime import ChildLifetime
from omniq.worker.executors.child_limits import limit_this_process
from omniq.worker.executors.flow_actions import with_pages
from omniq.worker.executors.process_enqueue import (
    Answer,
    ChildTasks,
    EnqueueRequest,
    TaskQuestion,
    child_handle,
    decode_answer,
)
from omniq.worker.executors.process_flows import ChildFlows, FlowAnswer, FlowRequest
from omniq.worker.executors.process_protocol import (
    HEADER,
    SLACK,
    CheckpointReply,
    CheckpointRequest,
    OutputReport,
    Reply,
    RunRequest,
    SignalRecord,
    Skipped,
    decode_checkpoint_reply,
    decode_config,
    decode_request,
)
from omniq.worker.import_path import use_path
from omniq.worker.lifespan import LifespanState

_T = TypeVar("_T")

_BYTES_HEADER = 5
"""What MessagePack adds to each of many byte strings, at most."""


class Parent:
    """The socket to the worker. Threads of the task may report and ask at the same time."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._is_running = False

    def receive(self) -> bytes | None:
        """The next message; None when the parent has ended."""
        header = self._read(HEADER.size)
        return None if header is None else self._read(HEADER.unpack(header)[0])

    def send(self, reply: Reply) -> None:
        message = encode_internal(reply)
        with self._lock:
            self._socket.sendall(HEADER.pack(len(message)) + message)

    def begin_run(self) -> None:
        self._is_running = True
        self.send(Reply(has_started=True))

    def end_run(self, reply: Reply) -> None:
        """Send how the run ended. From then on, threads that it has left running cannot ask."""
        # First: a thread that asks again and again would keep the lock.
        self._is_running = False
        with self._asking:
            self.send(reply)

    def ask(self, request: Reply) -> bytes:
        """Send the request and wait for its reply. The parent sends nothing else during a run.

        Between two runs its next message is not a reply, and belongs to the main thread.
        """
        with self._asking:
            if not self._is_running:
                raise StorageClosed("the task has ended")
            self.send(request)
            message = self.receive()
        if message is None:
            raise StorageClosed("the worker has ended")
        return message

    def _read(self, length: int) -> bytes | None:
        data = bytearray()
        while len(data) < length:
            chunk = self._socket.recv(length - len(data))
            if not chunk:
                return None
            data += chunk
        return bytes(data)


class ChildServices:
    """What the worker offers to a task in a child process: over the socket, blocking."""

    loop = None

    def __init__(
        self, parent: Parent, codec: Serializer, settings: Settings, state: LifespanState
    ) -> None:
        self._state = state
        # The store's: it says until when a task sleeps, and the next run may be on another machine.
        self.clock = StoreClock(SYSTEM_CLOCK)
        self._parent = parent
        self._lock = threading.Lock()
        self.serializer = codec
        self._max_message = settings.max_payload + SLACK // 2
        self._tasks = ChildTasks(self._ask_about, codec, self.clock)
        self.flows = ChildFlows(self._ask_flow, codec)
        self.builder = TaskBuilder(settings, self.clock, keeps_objects=keeps_objects(codec))

    @property
    def storage(self) -> NoReturn:
        raise InvalidTask("a child process has no connection to the storage")

    async def enqueue(self, task: Task, context: TaskContext, new: NewTasks) -> list[str]:
        tasks = [self.serializer.encode_task(each) for each in new.tasks]
        size = sum(map(len, tasks)) + _BYTES_HEADER * len(tasks)
        if size > self._max_message:
            raise InvalidTask(
                f"enqueue_many: {len(tasks)} calls take {size:,} bytes, and {self._max_message:,} can "
                "be sent to the worker in one message; enqueue fewer in one call"
            )
        return self._ask_about(EnqueueRequest(tasks, new.name, new.has_id, new.place)).ids

    def handle(
        self, task_id: str, types: FunctionTypes | None, *, blocking: bool
    ) -> AsyncTaskHandle[Any] | TaskHandle[Any]:
        return child_handle(self._tasks, task_id, types, blocking=blocking)

    def _ask_flow(self, request: FlowRequest) -> FlowAnswer:
        size = sum(map(len, request.tasks)) + _BYTES_HEADER * len(request.tasks)
        if size > self._max_message:
            raise InvalidTask(
                f"{len(request.tasks)} children take {size:,} bytes, and {self._max_message:,} can be sent to "
                "the worker in one message; pass smaller arguments"
            )
        return self._ask_about(request).flow or FlowAnswer()

    def _ask_about(self, request: EnqueueRequest | TaskQuestion | FlowRequest) -> Answer:
        match request:
            case EnqueueRequest():
                message = self._parent.ask(Reply(enqueue_request=request))
            case TaskQuestion():
                message = self._parent.ask(Reply(question=request))
            case FlowRequest():
                message = self._parent.ask(Reply(flow_request=request))
        answer = decode_answer(message)
        if answer.refusal is not None:
            raise answer.refusal.to_error()
        return answer

    @property
    def state(self) -> Any:
        return self._state.get()

    def report(self, progress: Progress) -> None:
        self._parent.send(Reply(progress=progress))

    def add_output(self, task: Task, data: bytes) -> bool:
        # The worker reads no further while it has no room: then this blocks.
        self._parent.send(Reply(output=OutputReport(task.id, task.token, data)))
        return True

    async def wait_for_room(self, task: Task) -> None:
        return

    def report_skipped_step(self, task: Task, step: str, error: str) -> None:
        self._parent.send(Reply(skipped=Skipped(step, error)))

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        future: Future[_T] = Future()
        # One at a time, so that none of them waits for another.
        with self._lock:
            try:
                future.set_result(run_without_loop(work))
            except BaseException as error:
                # The caller gets it from the future, in its thread.
                future.set_exception(error)
        return future

    async def in_thread(self, call: Callable[[], _T]) -> _T:
        return await asyncio.to_thread(call)

    def transaction(
        self, task: Task, context: TaskContext, *, blocking: bool
    ) -> AbstractAsyncContextManager[Any]:
        raise InvalidTask(
            "ctx.transaction() needs a task in the worker's own process: async, or in a thread"
        )

    async def load_checkpoint(self, task_id: str) -> bytes | None:
        reply = self._ask(CheckpointRequest())
        if reply.is_not_sealed:
            raise NotSealed(f"the checkpoint of task {task_id}")
        return reply.checkpoint

    async def save_checkpoint(self, task_id: str, token: int, checkpoint: bytes) -> None:
        if self._ask(CheckpointRequest(checkpoint)).is_stale:
            raise StaleClaim(task_id, token)

    def _ask(self, request: CheckpointRequest) -> CheckpointReply:
        message = self._parent.ask(Reply(checkpoint_request=request))
        reply = decode_checkpoint_reply(message)
        if reply.error is not None:
            kind = SerializationError if reply.is_unfit else StorageError
            raise kind(reply.error)
        return reply


class TaskServer:
    """Runs the tasks that the parent sends, one at a time."""

    def __init__(
        self,
        services: ChildServices,
        codec: Serializer,
        rules: tuple[ErrorRules, ...],
        lifetime: ChildLifetime,
    ) -> None:
        self._services = services
        self._lifetime = lifetime
        self._codec = codec
        self._rules = rules
        self._callees: dict[str, Callee] = {}

    def serve(self, request: RunRequest) -> Reply:
        """Run one task. Every end is a reply; nothing that the task raises is raised here."""
        clock = self._services.clock
        clock.observe(clock.boot_micros() + request.ahead, sent_at=clock.boot_micros())
        try:
            task = self._codec.decode_task(request.task)
            callee = self._find(request.function)
        except UnguardedModule as error:
            # No run of it can do anything else.
            record = _record_of(error, clock)
            record.category = ErrorCategory.PERMANENT
            return Reply(error=record)
        except BaseException as error:
            # Importing a module runs it.
            return Reply(error=_record_of(as_raised(error), clock))
        if callee.whole is not None:
            return self._serve_batch(callee, callee.whole, task, request)
        task_context = TaskContext(task, request.timeout, self._services)
        task = with_pages(task, task_context)
        try:
            # A new context: what one task sets must not be visible to the next one.
            value = contextvars.Context().run(_call, callee, task, task_context, self._lifetime)
        except BaseException as error:
            return self._reply_of_error(callee, task, error)
        return self._reply_of_value(callee, task, value, task_context.warnings)

    def _serve_batch(
        self, callee: Callee, whole: Callee, first: Task, request: RunRequest
    ) -> Reply:
        """Run the tasks of a batch in one call of the function."""
        assert whole.batch is not None
        tasks = [first, *map(self._codec.decode_task, request.others)]
        replies: dict[str, Reply] = {}
        items: dict[str, Any] = {}
        for task in tasks:
            try:
                items[task.id] = item_of(callee.types, task.args, task.kwargs)
            except BaseException as error:
                # Converting runs the code of the item's class.
                replies[task.id] = self._reply_of_error(callee, task, error)
        outcomes: list[Any] = []
        if items:
            try:
                given = list(items.values())
                returned = contextvars.Context().run(self._call_batch, whole, given, first)
                outcomes = whole.batch.outcomes(returned, len(items))
            except BaseException as error:
                outcomes = [error] * len(items)
        by_id = dict(zip(items, outcomes, strict=True))
        for task in tasks:
            if task.id not in replies:
                outcome = by_id[task.id]
                replies[task.id] = (
                    self._reply_of_error(callee, task, outcome)
                    if isinstance(outcome, BaseException)
                    else self._reply_of_value(callee, task, outcome, ())
                )
        return Reply(items=[replies[task.id] for task in tasks])

    def _call_batch(self, whole: Callee, items: list[Any], first: Task) -> Any:
        CURRENT.set(RunningBatch.of(TaskContext(first, None, self._services)))
        self._lifetime.enter()
        if whole.inject is not None:
            task_context = TaskContext(first, None, self._services)
            return self._lifetime.call(whole, (items,), {}, task_context)
        return self._lifetime.wait_for(whole.func(items))

    def _reply_of_error(self, callee: Callee, task: Task, error: BaseException) -> Reply:
        clock = self._services.clock
        if isinstance(error, Signal):
            return _reply_of(error, clock)
        # The user's code may raise anything; all of it goes back as data.
        rules = (*callee.rules, *self._rules)
        return Reply(error=explain(as_raised(error), rules, clock.now(), (task.id, task.token)))

    def _reply_of_value(
        self, callee: Callee, task: Task, value: Any, warnings: tuple[str, ...]
    ) -> Reply:
        try:
            if not keeps_objects(self._codec):
                value = callee.types.dump_result(value)
            result = TaskResult(
                task_id=task.id, status=TaskStatus.SUCCESS, result=value, warnings=warnings
            )
            return Reply(result=self._codec.encode_result(result))
        except BaseException as error:
            # Encoding runs the methods of the value.
            return Reply(unserialisable=_record_of(error, self._services.clock))

    def _find(self, func_path: str) -> Callee:
        callee = self._callees.get(func_path)
        if callee is None:
            # The worker has decided that the function may run; its module may not be imported here yet.
            callee = callee_of(resolve(func_path), func_path)
            self._callees[func_path] = callee
            # Now the application has set up `logging`, or has not.
            log.take_stdlib()
        return callee


def _call(callee: Callee, task: Task, task_context: TaskContext, lifetime: ChildLifetime) -> Any:
    args = (task_context, *task.args) if callee.takes_context else task.args
    context.enter(task_context)
    try:
        lifetime.enter()
        if callee.inject is not None:
            return lifetime.call(callee, args, task.kwargs, task_context)
        value = lifetime.wait_for(callee.func(*args, **task.kwargs))
        run_without_loop(task_context.store_children())
        return value
    except BaseException:
        # Store how far the run came; the next one continues there.
        with suppress(Exception):
            run_without_loop(task_context.flush())
        raise
    finally:
        # A thread that the task has left running has nothing to report any more.
        task_context.cancelled = True


def main(descriptor: int) -> None:
    """Serve the parent until it ends."""
    _ignore_stop_signals()
    # Not inherited by processes that a task starts, and open to the very end: the parent treats
    # its closing as the end of this process.
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)
    code = 0
    try:
        _serve_all(Parent(sock))
    except BaseException:
        # The edge of the process: the task may have closed the socket.
        traceback.print_exc()
        code = 1
    # Immediately: a thread that a task has left running must not keep the process alive.
    os._exit(code)


def _serve_all(parent: Parent) -> None:
    message = parent.receive()
    if message is None:
        return
    config = decode_config(message)
    use_path(config.path)
    if config.log is not None:
        log.open_console(config.log)
    codec = config.codec()
    rules = () if config.rules is None else (config.rules.rules(),)
    state = LifespanState() if config.why_no_state is None else LifespanState(config.why_no_state)
    settings = Settings(**config.settings)
    limit_this_process(settings)
    lifetime = ChildLifetime(config.lifespan, state, _report_unclosed, settings.start_timeout)
    services = ChildServices(parent, codec, settings, state)
    server = TaskServer(services, codec, rules, lifetime)
    while (message := parent.receive()) is not None:
        request = decode_request(message)
        parent.begin_run()
        reply = server.serve(request)
        if not lifetime.is_empty:
            reply = msgspec.structs.replace(reply, needs_closing=True)
        parent.end_run(reply)
    lifetime.close()


def _report_unclosed(name: str, error: Exception) -> None:
    log.write(WorkerProblem.of(f"close {name}", error))


def _reply_of(raised: Signal, clock: Clock) -> Reply:
    try:
        return Reply(signal=SignalRecord.of(raised))
    except Exception as error:
        # A subclass with a delay that is not a number.
        return Reply(error=_record_of(error, clock))


def _record_of(error: BaseException, clock: Clock) -> TaskError:
    return TaskError.from_exception(error, timestamp=clock.now())


def _ignore_stop_signals() -> None:
    """Ignore Ctrl-C and SIGTERM: the worker decides what they mean for the task that runs here.

    With a handler that does nothing: processes started by a task would inherit SIG_IGN, and could
    then not be terminated.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=_restore_signals)


def _restore_signals() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
