"""`TaskContext`: what a running task can read about itself, report and store."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from contextvars import ContextVar
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast, overload

from omniq.clock import seconds_to_micros
from omniq.concurrency.coroutines import run_without_loop
from omniq.concurrency.event_loop import has_event_loop
from omniq.concurrency.running_task import CURRENT
from omniq.errors import InvalidTask, OmniqError, SerializationError, StaleClaim
from omniq.models import PermanentError, Progress, Task, TaskError, check_key
from omniq.outcomes import Succeeded
from omniq.serialization import Serializer, keeps_objects
from omniq.tasks.checkpoint import Checkpoint, Cursor, Source
from omniq.tasks.children import ChildTasks
from omniq.tasks.control import Signal, Snooze
from omniq.tasks.durations import Duration, seconds_of
from omniq.tasks.error_rules import FailedStep
from omniq.tasks.steps import (
    PLACE,
    RunCheckpoint,
    WorkerServices,
    await_or_block,
    decode_value,
    encode_value,
    reencode_checkpoint,
    run_on_loop_of,
    task_key,
)
from omniq.tasks.task_enqueuer import OptionsEnqueuer, TaskEnqueuer, enqueue_calls, enqueuer_with
from omniq.tasks.task_output import JsonValue, LogLevel, encode_chunk, encode_log
from omniq.tasks.transaction import Transaction

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

if TYPE_CHECKING:
    from typing import Unpack

    from typing_extensions import TypeVar as TypeVarWithDefault

    from omniq.tasks.enqueued_ids import EnqueuedIds
    from omniq.tasks.task_enqueuer import ContextOptions, NewTasks

    S = TypeVarWithDefault("S", default=Any)
else:
    # Python 3.11 and 3.12 have no defaults for type variables; only type checkers need it.
    S = TypeVar("S")

_MAX_MESSAGE = 1000
_MAX_WARNINGS = 100

_current: ContextVar[object] = CURRENT


class TaskContext(TaskEnqueuer, ChildTasks, Generic[S]):
    """The running task. A function that declares it as its first parameter receives it.

    `TaskContext[State]` says to type checkers what the worker's lifespan yields, which is `state`.

    The thread that runs the function may use it. `fencing_token` grows with every claim of the
    task: pass it to systems that can refuse writers with an older token.

    `step`, `sleep`, `stream`, `checkpoint`, `enqueue`, `call`, `map`, `wait` and `wait_for` are awaited in async
    tasks; in others they block.
    """

    __slots__ = (
        "_checkpoint",
        "_enqueued",
        "_is_stopped",
        "_services",
        "_sleeps",
        "_task",
        "_undos",
        "completed",
        "connection",
        "connection_lock",
        "has_seen_stop",
        "result",
        "timeout",
        "warnings",
    )

    def __init__(self, task: Task, timeout: float | None, services: WorkerServices) -> None:
        self._task = task
        self._services = services
        self._checkpoint: RunCheckpoint | None = None
        self._sleeps = 0
        # Few tasks have children or steps to undo: the others make no collections for them.
        self._names = self.unstored = None
        self._undos: list[tuple[str, Callable[..., Any], Any]] | None = None
        self.timeout = timeout
        self._is_stopped = False
        self.has_seen_stop = False
        """Whether the function read the request to stop: its return value is then incomplete."""
        self.warnings: tuple[str, ...] = ()
        """The errors of this run that did not make it fail."""
        self.result: Any = None
        """The value that a transaction records as the task's result."""
        self.connection: Any = None
        """That of the run's open transaction."""
        self.connection_lock: asyncio.Lock
        """Held by one enqueue in the transaction at a time. Set when a transaction begins."""
        self.completed: Succeeded | None = None
        """The outcome, once the run's transaction is committed; nothing later changes it."""

    @property
    def in_transaction(self) -> bool:
        """Whether the run is inside `transaction()`."""
        return self.connection is not None

    @property
    def task_id(self) -> str:
        return self._task.id

    @property
    def func_path(self) -> str:
        return self._task.func_path

    @property
    def state(self) -> S:
        """What the lifespan of this worker process has yielded. Raises `OmniqError` without one."""
        return cast("S", self._services.state)

    @property
    def task_type(self) -> str:
        """The type that the task was given; else the function's path."""
        return self._task.task_type or self._task.func_path

    @property
    def attempt(self) -> int:
        """The number of this run of the task; the first is 1."""
        return self._task.attempts + self._task.crashes + 1

    @property
    def fencing_token(self) -> int:
        return self._task.token

    @property
    def queue(self) -> str:
        return self._task.queue

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._task.metadata

    @property
    def enqueued_at(self) -> datetime:
        return self._task.created_at

    @property
    def started_at(self) -> datetime | None:
        return self._task.started_at

    @property
    def due_at(self) -> datetime:
        """When this run was due. The waiting time of the task counts from then."""
        return self._task.eta or self._task.created_at

    @property
    def deadline(self) -> datetime | None:
        """When the worker stops the run; None when it has no timeout."""
        if self.timeout is None or self._task.started_at is None:
            return None
        return self._task.started_at + timedelta(seconds=self.timeout)

    @property
    def cancelled(self) -> bool:
        """Whether to stop: the task was cancelled, timed out or lost its lease, or the worker ends.

        The return value of a function that has read True here is not stored.
        """
        self.has_seen_stop = self._is_stopped
        return self._is_stopped

    @cancelled.setter
    def cancelled(self, is_stopped: bool) -> None:
        self._is_stopped = is_stopped

    def progress(self, fraction: float, message: str = "") -> None:
        """Report how far the task is, from 0 to 1. Only the newest report is stored, after a moment.

        A run that has to stop stores nothing: another run may have begun.
        """
        if not 0 <= fraction <= 1:
            raise InvalidTask(f"progress {fraction!r}: expected a number from 0 to 1")
        text = str(message)[:_MAX_MESSAGE].encode("utf-8", "backslashreplace").decode()
        if not self._is_stopped:
            self._services.report(
                Progress(
                    task_id=self._task.id,
                    token=self._task.token,
                    fraction=float(fraction),
                    message=text,
                )
            )

    # Output

    def log(self, message: object, /, *, level: LogLevel = "info", **fields: Any) -> None:
        """Add a line to the output of the task, with values of JSON as `fields`. It never waits.

        The dashboard and `omniq tasks output` show it as it comes. It is stored with the task, after a moment;
        only the newest lines and chunks are kept: see `max_output_chunks`.
        """
        self._services.add_output(self._task, encode_log(message, level, fields))

    def stream(self, chunk: str | bytes | JsonValue, /) -> Awaitable[None]:
        """Add a chunk to the output of the task, for those who read `handle.stream()` meanwhile.

        It is text, bytes, or a value of JSON. Awaited in async tasks, it waits a moment when the storage is slower
        than the task; in others it blocks. The chunks are stored in batches, the last ones before the outcome.
        Raises `InvalidTask` for another value, and `OutputTooLarge` for one of more than 64 KiB.
        """
        if self._services.add_output(self._task, encode_chunk(chunk)):
            return _NO_WAIT
        if not has_event_loop():
            run_without_loop(self._wait_for_room())
            return _NO_WAIT
        return _Wait(self._wait_for_room)

    async def pass_output(self, data: bytes) -> None:
        """Add a chunk of a run in a child process, which sends more when this returns."""
        if not self._services.add_output(self._task, data):
            await self._services.wait_for_room(self._task)

    async def _wait_for_room(self) -> None:
        await run_on_loop_of(self._services, self._services.wait_for_room(self._task))

    # Steps

    @overload
    def step(
        self,
        name: str,
        func: Callable[..., Coroutine[Any, Any, R]],
        /,
        *args: Any,
        undo: Callable[[R], Any],
        **kwargs: Any,
    ) -> Coroutine[Any, Any, R]: ...

    @overload
    def step(
        self,
        name: str,
        func: Callable[..., Coroutine[Any, Any, R]],
        /,
        *args: Any,
        critical: bool,
        **kwargs: Any,
    ) -> Coroutine[Any, Any, R | None]: ...

    @overload
    def step(
        self,
        name: str,
        func: Callable[P, Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Coroutine[Any, Any, R]: ...

    @overload
    def step(
        self,
        name: str,
        func: Callable[..., R],
        /,
        *args: Any,
        undo: Callable[[R], Any],
        **kwargs: Any,
    ) -> R: ...

    @overload
    def step(
        self, name: str, func: Callable[..., R], /, *args: Any, critical: bool, **kwargs: Any
    ) -> R | None: ...

    @overload
    def step(self, name: str, func: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def step(self, name: str, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the function once for the task; a later run gets the stored result.

        An async task awaits the step; a plain function then runs in a thread. In other tasks the
        step blocks, and the function must be a plain one. The result must be a value that a task
        can return. Steps may run at the same time; each has a different name.

        An exception of the function is raised here. If the task does not catch it, the run ends,
        and the task's error names the step and the steps that were finished. With `critical=False`
        the exception becomes a warning of the result instead, None is returned, and a later run
        calls the step again.

        `undo` is called with the result if the task fails for good later: the last step first, each once. It is
        for tasks on the event loop and in threads.

        After a crash during a step, or before its result was stored, the step is called again: give
        external systems a key by which they recognise a repetition.
        """
        check_key("step name", name)
        critical = bool(kwargs.pop("critical", True))
        undo = kwargs.pop("undo", None)
        call = partial(func, *args, **kwargs)
        if undo is None:
            return await_or_block(self._step(name, func, call, critical))
        if self._services.loop is None:
            raise InvalidTask(
                "undo needs a task in the worker's own process: async, or in a thread"
            )
        return await_or_block(self._undoable_step(name, func, call, undo))

    @property
    def checkpoint(self) -> Checkpoint:
        """The finished steps and their results, of this run and of earlier ones."""
        return Checkpoint(self._use_checkpoint, self._services.serializer, self._checkpoint)

    def cursor(self, name: str, items: Source[T], *, every: int = 100) -> Cursor[T]:
        """Iterate over items; a later run resumes after the last item that was finished.

        `items` must have the same order in every run. Or it is a function that receives the last
        finished item, None at first, and returns the items after it. Async tasks use `async for`,
        also for async iterables; other tasks use `for`. An item is finished when the next one is
        requested. The position is saved after every `every` items: after a crash, up to that many
        items are repeated.
        """
        return Cursor(self._use_checkpoint, self._services.serializer, name, items, every)

    def sleep(self, duration: Duration, name: str = "") -> Awaitable[None]:
        """End the run; after that time the task runs again and continues from here.

        Each sleep of a task happens once, however often the task runs. It is identified by its
        name, or by its position among the sleeps of a run. The code before it runs again, so put
        that code into steps. A sleep uses no attempt.
        """
        seconds = seconds_of("duration", duration)
        if name:
            check_key("sleep name", name)
        self._sleeps += 1
        slept: Any = await_or_block(self._sleep(name or f"#{self._sleeps}", seconds))
        # In a task that is not async nothing is left to await.
        return cast("Awaitable[None]", slept)

    def transaction(self) -> Transaction:
        """Open a transaction on the database that holds the tasks; its commit completes the task.

        Use `async with ctx.transaction() as connection` in async tasks, and `with` in tasks that run
        in threads. The writes through the connection and the task's success are committed in one
        step, so the writes happen exactly once. An exception rolls back both, and the task fails as
        usual. The task's result is the value of `ctx.result` at the end of the block; what the
        function returns or raises after that is ignored. Raises `StaleClaim` when another worker
        has the task.

        Only SQLite and PostgreSQL have this. On SQLite the connection is a `sqlite3.Connection`, no
        other writer can write during the transaction, and it is rolled back after a third of the
        lease. `step`, `sleep` and `cursor` cannot be used inside.
        """
        return Transaction(self._task, self, self._services)

    # Enqueue

    def options(self, **options: Unpack[ContextOptions]) -> OptionsEnqueuer:
        """Return `enqueue` and `enqueue_many` with options. They are checked immediately.

        They are those of `queue.options(…)`, and `name`: a task is then known by that name, in all
        runs of this task, whatever its arguments are. A run can use each name once.
        """
        return enqueuer_with(self, dict(options))

    async def _enqueue_all(self, calls: list[Any]) -> list[Any]:
        return await enqueue_calls(self, calls, None, None)

    # For the worker that runs the task

    async def enqueue_new(self, new: NewTasks) -> list[str]:
        """Store tasks that the run enqueues; return their ids. Used on the services' event loop."""
        if self._is_stopped:
            # Another run may have begun.
            raise StaleClaim(self._task.id, self._task.token)
        self.check_incomplete()
        return await self._services.enqueue(self._task, self, new)

    def check_incomplete(self) -> None:
        """Raise `InvalidTask` after the commit of the transaction."""
        if self.completed is not None:
            # After a crash, the task would not run again to enqueue anything.
            raise InvalidTask(
                "the task is complete: its transaction has been committed; call ctx.enqueue inside "
                "ctx.transaction(), or before it"
            )

    @property
    def enqueued(self) -> EnqueuedIds | None:
        """The ids that the run has given to tasks. Few tasks enqueue others, so it is made late."""
        return getattr(self, "_enqueued", None)

    @enqueued.setter
    def enqueued(self, ids: EnqueuedIds | None) -> None:
        self._enqueued = ids

    async def flush(self) -> None:
        """Save the changes of the checkpoint that are not saved yet."""
        if self._checkpoint is not None:
            await self._checkpoint.flush()

    def running_step(self) -> FailedStep | None:
        """The step that runs now, to be named by an error; None outside of steps."""
        checkpoint = self._checkpoint
        if checkpoint is None or checkpoint.data is None or not checkpoint.running_steps:
            return None
        return FailedStep(self._claim, checkpoint.running_steps[0], checkpoint.data.done())

    async def load_checkpoint(self, codec: Serializer) -> bytes | None:
        """Load the checkpoint of earlier runs, for a run in a child process that uses this codec."""
        stored = await self._services.load_checkpoint(self._task.id)
        if stored is None:
            return None
        return reencode_checkpoint(stored, task_key(self._task), self._services.serializer, codec)

    async def save_checkpoint(self, checkpoint: bytes, codec: Serializer) -> None:
        """Save the checkpoint of a run in a child process that uses this codec."""
        checkpoint = reencode_checkpoint(
            checkpoint, task_key(self._task), codec, self._services.serializer
        )
        await self._services.save_checkpoint(self._task.id, self._task.token, checkpoint)

    def report_skipped_step(self, step: str, error: str) -> None:
        """Emit the event that a step that is not critical failed."""
        self._services.report_skipped_step(self._task, step, error)

    @property
    def _claim(self) -> tuple[str, int]:
        return self._task.id, self._task.token

    async def _step(
        self, name: str, func: Callable[..., Any], call: Callable[[], Any], critical: bool
    ) -> Any:
        stored = await self._use_checkpoint(lambda checkpoint: checkpoint.begin(name))
        if stored is not None:
            return self._decode_result(name, func, stored)
        try:
            value = await self._call_step(name, func, call)
            result = self._encode_result(name, func, value)
        except BaseException as error:
            # Also after a cancellation: the name is free for another try in the same run.
            done = self._checkpoint.fail(name) if self._checkpoint is not None else []
            if isinstance(error, Signal | StaleClaim):
                raise
            if critical or not isinstance(error, Exception):
                FailedStep(self._claim, name, done).attach_to(error)
                raise
            self._warn(name, error)
            return None
        try:
            await self._use_checkpoint(lambda checkpoint: checkpoint.finish(name, result))
        except SerializationError as error:
            raise _not_stored(name, error) from error
        return value

    async def _undoable_step(
        self, name: str, func: Callable[..., Any], call: Callable[[], Any], undo: Callable[..., Any]
    ) -> Any:
        value = await self._step(name, func, call, critical=True)
        if self._undos is None:
            self._undos = []
        self._undos.append((name, undo, value))
        return value

    @property
    def has_undos(self) -> bool:
        """Whether steps of this run are to be undone if it fails for good."""
        return bool(self._undos)

    async def undo_steps(self) -> None:
        """Undo the steps of a task that fails for good, the last one first; a failure is a warning.

        Used by the worker, on its event loop.
        """
        while self._undos:
            name, undo, value = self._undos.pop()
            await self._step(f"undo {name}", undo, partial(undo, value), critical=False)

    async def _call_step(self, name: str, func: Callable[..., Any], call: Callable[[], Any]) -> Any:
        outer = PLACE.get()
        PLACE.set((name, -1))
        try:
            if has_event_loop():
                if inspect.iscoroutinefunction(func):
                    return await call()
                value = await self._services.in_thread(call)
                return await value if inspect.isawaitable(value) else value
            value = call()
            if inspect.iscoroutine(value):
                value.close()
                raise InvalidTask(f"step {name!r}: an async function needs an async task")
            return value
        finally:
            PLACE.set(outer)

    def _encode_result(self, step: str, func: Callable[..., Any], value: object) -> bytes:
        # Imported late: a program that only declares tasks does not need it.
        from omniq.tasks.annotations import dump_result, result_converter

        serializer, converter = self._services.serializer, result_converter(func)
        try:
            if converter is not None and not keeps_objects(serializer):
                value = dump_result(converter, value)
            return encode_value(serializer, value)
        except SerializationError as error:
            raise _not_stored(step, error) from error

    def _decode_result(self, step: str, func: Callable[..., Any], stored: bytes) -> Any:
        """The result of a step of an earlier run, as the function of the step declares it."""
        from omniq.tasks.annotations import load_value, result_converter

        value, converter = decode_value(self._services.serializer, stored), result_converter(func)
        try:
            return value if converter is None else load_value(converter, value, f"step {step!r}")
        except SerializationError as error:
            raise PermanentError(
                f"the stored result does not fit: {error}", failed_step=step
            ) from None

    def _warn(self, step: str, error: Exception) -> None:
        record = TaskError.from_exception(error)
        if len(self.warnings) < _MAX_WARNINGS:
            text = f"step {step} failed: {record.error_type}: {record.message}"
            self.warnings += (text[:_MAX_MESSAGE],)
        self._services.report_skipped_step(self._task, step, record.error_type)

    async def _sleep(self, name: str, seconds: float) -> None:
        clock = self._services.clock
        end = clock.micros() + seconds_to_micros(seconds)
        stored = await self._use_checkpoint(lambda checkpoint: checkpoint.sleep_until(name, end))
        left = stored - clock.micros()
        if left > 0:
            raise Snooze(left / 1_000_000)

    async def _use_checkpoint(self, use: Callable[[RunCheckpoint], Coroutine[Any, Any, T]]) -> T:
        if self._is_stopped:
            # Another run may have begun.
            raise StaleClaim(self._task.id, self._task.token)
        if self.in_transaction:
            # On SQLite a save on another connection would wait for the transaction to end.
            raise InvalidTask("no steps, sleeps or cursors inside ctx.transaction()")

        async def use_on_loop() -> T:
            # Created on the services' event loop, where two threads cannot create two.
            if self._checkpoint is None:
                self._checkpoint = RunCheckpoint(self._services, self._task)
            return await use(self._checkpoint)

        try:
            return await run_on_loop_of(self._services, use_on_loop())
        except StaleClaim:
            self.cancelled = True
            raise


class _Wait:
    """Waits when it is awaited, and only then."""

    def __init__(self, wait: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        self._wait = wait

    def __await__(self) -> Generator[Any, Any, None]:
        if self._wait is not None:
            yield from self._wait().__await__()


_NO_WAIT = _Wait()


def current_task() -> TaskContext:
    """Return the context of the task that runs here. Raises `OmniqError` outside of a task."""
    try:
        found = _current.get()
    except LookupError:
        raise OmniqError("current_task() was called outside of a running task") from None
    if not isinstance(found, TaskContext):
        raise OmniqError(
            "current_task() was called in a batch, which runs several tasks: give the function a first "
            "parameter contexts: list[TaskContext]"
        )
    return found


def enter(context: TaskContext) -> None:
    """Make it the current task of this asyncio task or thread."""
    _current.set(context)


def _not_stored(step: str, error: SerializationError) -> PermanentError:
    # Permanent: the step has had its effect, and a repetition would return the same value.
    return PermanentError(
        f"the result of step {step!r} cannot be stored: {error}",
        error_type="SerializationError",
        failed_step=step,
        recovery_hint="the step has had its effect; have it return plain data, or an id",
    )
