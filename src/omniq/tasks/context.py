"""What a running task can know about itself, and say."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextvars import ContextVar
from datetime import datetime, timedelta
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast, overload

from omniq.clock import seconds_to_micros
from omniq.errors import InvalidTask, OmniqError, SerializationError, StaleClaim
from omniq.models import PermanentError, Progress, Task, TaskError, check_key, check_seconds
from omniq.outcomes import Succeeded
from omniq.tasks.checkpoint import Checkpoint, Cursor, Source
from omniq.tasks.control import Signal, Snooze
from omniq.tasks.error_rules import StepMark
from omniq.tasks.steps import Host, Notebook, decode_value, encode_value, has_loop, here, reached
from omniq.tasks.transaction import Transaction

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_MAX_MESSAGE = 1000
_MAX_WARNINGS = 100

_current: ContextVar[TaskContext] = ContextVar("omniq_current_task")


class TaskContext:
    """The task as its own function sees it. Declare it as the first parameter to be given it.

    Safe to use from the thread that runs the function. `fencing_token` grows with every claim of
    the task: pass it on to systems that can refuse writers with an older one.

    `step`, `sleep` and `checkpoint` are awaited in async tasks; in others they block.
    """

    __slots__ = (
        "_book",
        "_host",
        "_is_stopped",
        "_sleeps",
        "_task",
        "completed",
        "has_seen_stop",
        "in_transaction",
        "result",
        "timeout",
        "warnings",
    )

    def __init__(self, task: Task, timeout: float | None, host: Host) -> None:
        self._task = task
        self._host = host
        self._book: Notebook | None = None
        self._sleeps = 0
        self.timeout = timeout
        self._is_stopped = False
        self.has_seen_stop = False
        """Whether the function was told to stop, and looked: what it returns is not its work."""
        self.warnings: tuple[str, ...] = ()
        """What went wrong in this run without making it fail."""
        self.result: Any = None
        """What a transaction records as the task's result."""
        self.in_transaction = False
        self.completed: Succeeded | None = None
        """What the run came to, once its transaction is committed; whatever happens afterwards."""

    @property
    def task_id(self) -> str:
        return self._task.id

    @property
    def attempt(self) -> int:
        """Which run of the task this is; the first is 1."""
        return self._task.attempts + 1

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
        """When this run was due; how long the task had to wait is counted from then."""
        return self._task.eta or self._task.created_at

    @property
    def deadline(self) -> datetime | None:
        """When the run will be stopped; None when it may take as long as it likes."""
        if self.timeout is None or self._task.started_at is None:
            return None
        return self._task.started_at + timedelta(seconds=self.timeout)

    @property
    def cancelled(self) -> bool:
        """Whether to stop: the task was cancelled, took too long, lost its lease, or the worker ends.

        What a function returns that has seen it is not kept.
        """
        self.has_seen_stop = self._is_stopped
        return self._is_stopped

    @cancelled.setter
    def cancelled(self, is_stopped: bool) -> None:
        self._is_stopped = is_stopped

    def progress(self, fraction: float, message: str = "") -> None:
        """Say how far the task is, from 0 to 1. Kept soon, and only the newest.

        Nothing is kept of a run that was told to stop: another may be under way already.
        """
        if not 0 <= fraction <= 1:
            raise InvalidTask(f"progress {fraction!r}: expected a number from 0 to 1")
        text = str(message)[:_MAX_MESSAGE].encode("utf-8", "backslashreplace").decode()
        if not self._is_stopped:
            self._host.report(
                Progress(
                    task_id=self._task.id,
                    token=self._task.token,
                    fraction=float(fraction),
                    message=text,
                )
            )

    # Steps

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
        self, name: str, func: Callable[..., R], /, *args: Any, critical: bool, **kwargs: Any
    ) -> R | None: ...

    @overload
    def step(self, name: str, func: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def step(self, name: str, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the function once for the task: a later run gets the result that was kept.

        Awaited in an async task, where a plain function runs in a thread; in other tasks it blocks,
        and the function must be a plain one. The result must be one that a task could return.
        Steps may run at the same time; each has a name of its own.

        What the function raises is raised here. It ends the run, unless it is caught: the task's
        error then names the step and what was done before. With `critical=False` it becomes one of
        the result's warnings instead, None is returned, and a later run tries the step again.

        After a crash in the middle of a step, or before its result was kept, it is called again:
        give outside systems something by which they know a repeat.
        """
        check_key("step name", name)
        critical = bool(kwargs.pop("critical", True))
        return here(self._step(name, func, partial(func, *args, **kwargs), critical))

    @property
    def checkpoint(self) -> Checkpoint:
        """The finished steps and their results, of this run and of earlier ones."""
        return Checkpoint(self._reach, self._host.serializer, self._book)

    def cursor(self, name: str, items: Source[T], *, every: int = 100) -> Cursor[T]:
        """Iterate so that a later run goes on after the last item that was finished.

        `items` come in the same order each time; or it is a function that is given the last
        finished item, None at first, and returns those after it. Async iterables and `async for`
        in async tasks, `for` in others. An item is finished when the next one is asked for. Every
        `every` items that is saved: after a crash, up to so many come once more.
        """
        return Cursor(self._reach, self._host.serializer, name, items, every)

    def sleep(self, duration: float | timedelta, name: str = "") -> Awaitable[None]:
        """Let the worker go for that long; then the task runs again, and goes on from here.

        Each sleep of a task happens once, however often the task is run. It is known by its name,
        or else by its number among the sleeps of a run. What came before it should be in steps: it
        is run again. No attempt is spent.
        """
        seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
        check_seconds("duration", seconds)
        if name:
            check_key("sleep name", name)
        self._sleeps += 1
        slept: Any = here(self._sleep(name or f"#{self._sleeps}", seconds))
        # In a task that is not async there is nothing left to await.
        return cast("Awaitable[None]", slept)

    # For the worker that runs the task

    def transaction(self) -> Transaction:
        """A block with a connection to the tasks' own database; leaving it completes the task.

        `async with ctx.transaction() as connection` in async tasks, `with` in those that run in
        threads. What was written through the connection and the task's success are committed in one
        step, so that it happens exactly once; an exception undoes both, and the task fails as ever.
        The result is what `ctx.result` was set to inside the block; what the function returns or
        raises afterwards is not kept. Raises `StaleClaim` when the task is another worker's by now.

        Only where tasks are kept in SQLite or PostgreSQL. On SQLite it is a `sqlite3.Connection`,
        nobody else can write meanwhile, and after a third of the lease it is rolled back. Neither
        `step`, `sleep` nor `cursor` can be used inside.
        """
        return Transaction(self._task, self, self._host)

    async def flush(self) -> None:
        """Save what the run has done and not saved yet."""
        if self._book is not None:
            await self._book.flush()

    def step_under_way(self) -> StepMark | None:
        """The step in which the task is, if it is in one."""
        book = self._book
        if book is None or book.kept is None or not book.under_way:
            return None
        return StepMark(self._claim, book.under_way[0], book.kept.done())

    async def load_checkpoint(self) -> bytes | None:
        """What earlier runs have kept, for a run in another process."""
        return await self._host.load_checkpoint(self._task.id)

    async def save_checkpoint(self, checkpoint: bytes) -> None:
        """Keep what a run in another process has done."""
        await self._host.save_checkpoint(self._task.id, self._task.token, checkpoint)

    def tell_skipped(self, step: str, error: str) -> None:
        """Tell that a step failed which the task can do without."""
        self._host.tell_skipped(self._task, step, error)

    @property
    def _claim(self) -> tuple[str, int]:
        return self._task.id, self._task.token

    async def _step(
        self, name: str, func: Callable[..., Any], call: Callable[[], Any], critical: bool
    ) -> Any:
        kept = await self._reach(lambda book: book.begin(name))
        if kept is not None:
            return decode_value(self._host.serializer, kept)
        try:
            value = await self._called(name, func, call)
            result = self._encoded(name, value)
        except BaseException as error:
            # Also a cancellation: the name is free for another try in the same run.
            done = self._book.fail(name) if self._book is not None else []
            if isinstance(error, Signal | StaleClaim):
                raise
            if critical or not isinstance(error, Exception):
                StepMark(self._claim, name, done).put_on(error)
                raise
            self._warn(name, error)
            return None
        try:
            await self._reach(lambda book: book.finish(name, result))
        except SerializationError as error:
            raise _unkept(name, error) from error
        return value

    async def _called(self, name: str, func: Callable[..., Any], call: Callable[[], Any]) -> Any:
        if has_loop():
            if inspect.iscoroutinefunction(func):
                return await call()
            value = await self._host.in_thread(call)
            return await value if inspect.isawaitable(value) else value
        value = call()
        if inspect.iscoroutine(value):
            value.close()
            raise InvalidTask(f"step {name!r}: an async function needs an async task")
        return value

    def _encoded(self, step: str, value: object) -> bytes:
        try:
            return encode_value(self._host.serializer, self._task.id, value)
        except SerializationError as error:
            raise _unkept(step, error) from error

    def _warn(self, step: str, error: Exception) -> None:
        record = TaskError.from_exception(error)
        if len(self.warnings) < _MAX_WARNINGS:
            text = f"step {step} failed: {record.error_type}: {record.message}"
            self.warnings += (text[:_MAX_MESSAGE],)
        self._host.tell_skipped(self._task, step, record.error_type)

    async def _sleep(self, name: str, seconds: float) -> None:
        clock = self._host.clock
        end = clock.micros() + seconds_to_micros(seconds)
        left = await self._reach(lambda book: book.sleep_until(name, end)) - clock.micros()
        if left > 0:
            raise Snooze(left / 1_000_000)

    async def _reach(self, use: Callable[[Notebook], Coroutine[Any, Any, T]]) -> T:
        if self._is_stopped:
            # Another run may be under way already.
            raise StaleClaim(self._task.id, self._task.token)
        if self.in_transaction:
            # Saved beside the transaction, it would have to wait for its end on SQLite.
            raise InvalidTask("no steps, sleeps or cursors inside ctx.transaction()")

        async def at_notebook() -> T:
            # Made here, on the host's own event loop, where two threads cannot make two.
            if self._book is None:
                self._book = Notebook(self._host, self._task)
            return await use(self._book)

        try:
            return await reached(self._host, at_notebook())
        except StaleClaim:
            self.cancelled = True
            raise


def current_task() -> TaskContext:
    """The task that is running here. Raises `OmniqError` outside of one."""
    try:
        return _current.get()
    except LookupError:
        raise OmniqError("current_task() was called outside of a running task") from None


def enter(context: TaskContext) -> None:
    """Make it the current task of this asyncio task or thread."""
    _current.set(context)


def _unkept(step: str, error: SerializationError) -> PermanentError:
    # Permanent: what the step does is done, and doing it again would not make it fit.
    return PermanentError(
        f"the result of step {step!r} cannot be kept: {error}",
        error_type="SerializationError",
        failed_step=step,
        recovery_hint="the step has had its effect; have it return plain data, or an id",
    )
