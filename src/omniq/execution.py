"""Runs one claimed task and says what it came to. Knows nothing of storages.

A pipe of named steps: find the function, call it where it belongs (the loop, a thread, a process),
and turn whatever happened, every `BaseException` included, into one `Outcome`.
"""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import msgspec

from omniq import context
from omniq.clock import Clock
from omniq.context import TaskContext
from omniq.errors import FunctionNotFound, SerializationError
from omniq.functions import FunctionCache, options_of
from omniq.models import ErrorCategory, Task, TaskError, TaskResult, TaskStatus
from omniq.options import Executor
from omniq.outcomes import Cancelled, Failed, Outcome, Released, Retried, Snoozed, Succeeded
from omniq.processes import ProcessSlots
from omniq.retry import ExponentialBackoff, may_retry, next_delay
from omniq.schedule import next_run
from omniq.serialization import Serializer
from omniq.signals import Discard, Retry, Signal, Snooze
from omniq.threads import ThreadSlots

MAX_UNKNOWN_RELEASES = 20
"""How often a task is handed on for want of its function before it is a dead letter."""

_RELEASE_DELAY = 5.0

StopReason = Literal["timeout", "cancelled", "shutdown", "lease"]


class Callee(msgspec.Struct, frozen=True):
    """A function, and what its signature says. Looked at once."""

    func: Callable[..., Any]
    place: Executor
    takes_context: bool


class Run:
    """One attempt that is under way. `stop_reason` is why the worker wants it to end."""

    __slots__ = ("context", "deadline", "job", "started", "stop_reason", "stops", "task")

    def __init__(self, task: Task, started: float, timeout: float | None) -> None:
        self.task = task
        self.started = started
        self.deadline = float("inf") if timeout is None else started + timeout
        self.context: TaskContext | None = None
        self.job: asyncio.Task[None] | None = None
        self.stop_reason: StopReason | None = None
        self.stops = 0


class Execution:
    """Everything needed to run tasks of one worker."""

    def __init__(
        self,
        functions: FunctionCache,
        *,
        clock: Clock,
        serializer: Serializer,
        base_retry_delay: float,
        threads: ThreadSlots,
        processes: ProcessSlots,
    ) -> None:
        self._functions = functions
        self._clock = clock
        self._serializer = serializer
        self._backoff = ExponentialBackoff(base=base_retry_delay)
        self._threads = threads
        self._processes = processes
        self._callees: dict[str, Callee] = {}

    async def run(self, run: Run, task_context: TaskContext) -> Outcome:
        """Run the task to its end. Never raises; cancelling it is how the worker stops a run."""
        task = run.task
        run.context = task_context
        try:
            callee = self._callees.get(task.func_path) or self._find(task.func_path)
            value = await self._call(callee, task, task_context)
        except BaseException as error:
            # The user's code may raise anything, and none of it may end the worker's loop.
            return self._failure(run, error)
        return self._success(task, value)

    def failure_of(self, run: Run) -> Outcome:
        """What a run comes to that was told to stop and never began, or does not end."""
        return self._failure(run, asyncio.CancelledError())

    def _find(self, func_path: str) -> Callee:
        func = self._functions.resolve(func_path)
        callee = self._callees[func_path] = callee_of(func)
        return callee

    async def _call(self, callee: Callee, task: Task, task_context: TaskContext) -> Any:
        args = (task_context, *task.args) if callee.takes_context else task.args
        match callee.place:
            case "async":
                context.enter(task_context)
                return await callee.func(*args, **task.kwargs)
            case "thread":
                value = await self._threads.call(task_context, callee.func, args, task.kwargs)
                # A sync function may hand back a coroutine; it belongs on the loop.
                return await value if inspect.iscoroutine(value) else value
            case "process":
                return await self._processes.call(task, task_context)

    def _success(self, task: Task, value: Any) -> Outcome:
        now = self._clock.now()
        result = TaskResult(
            task_id=task.id,
            status=TaskStatus.SUCCESS,
            result=value,
            attempts=task.attempts + 1,
            started_at=task.started_at,
            finished_at=now,
        )
        try:
            encoded = self._serializer.encode_result(result)
        except SerializationError as error:
            # The work is done; running it again would only do it twice.
            return Failed(task.id, task.token, self._record_of(error), "unserialisable")
        again = None
        if task.interval is not None or task.cron is not None:
            again = next_run(interval=task.interval, cron=task.cron, tz=task.tz, after=now)
        return Succeeded(task.id, task.token, result, again, encoded)

    def _failure(self, run: Run, error: BaseException) -> Outcome:
        task = run.task
        match run.stop_reason:
            case "cancelled":
                return Cancelled(task.id, task.token, "cancelled while running")
            case "shutdown" | "lease":
                return Released(task.id, task.token)
            case "timeout":
                took = self._clock.monotonic() - run.started
                late = TaskError(
                    f"the task was stopped after {took:.3g} s",
                    error_type="TaskTimeout",
                    timestamp=self._clock.now(),
                )
                return self._retry_or_fail(task, late, None)
            case None:
                pass
        if isinstance(error, FunctionNotFound):
            return self._without_function(task, error)
        if isinstance(error, Signal):
            return self._signalled(task, error)
        return self._retry_or_fail(task, self._record_of(error), None)

    def _without_function(self, task: Task, error: FunctionNotFound) -> Outcome:
        if error.elsewhere and task.releases < MAX_UNKNOWN_RELEASES:
            later = self._clock.now() + timedelta(seconds=_RELEASE_DELAY)
            return Released(task.id, task.token, unknown_function=True, eta=later)
        return Failed(task.id, task.token, self._record_of(error), "unknown function")

    def _signalled(self, task: Task, signal: Signal) -> Outcome:
        if isinstance(signal, Snooze):
            later = self._clock.now() + timedelta(seconds=signal.delay)
            return Snoozed(task.id, task.token, later)
        if isinstance(signal, Discard):
            return Cancelled(task.id, task.token, signal.reason)
        delay = signal.delay if isinstance(signal, Retry) else None
        return self._retry_or_fail(task, self._record_of(signal), delay)

    def _retry_or_fail(self, task: Task, error: TaskError, delay: float | None) -> Outcome:
        if error.category is ErrorCategory.PERMANENT:
            return Failed(task.id, task.token, error, "permanent")
        if not may_retry(task.attempts, task.max_retries):
            return Failed(task.id, task.token, error, "exhausted")
        if delay is None:
            chance = self._clock.random()
            delay = next_delay(
                task.retry or self._backoff, task.attempts, error.retry_after, chance
            )
        later = self._clock.now() + timedelta(seconds=delay)
        return Retried(task.id, task.token, error, later)

    def _record_of(self, error: BaseException) -> TaskError:
        return TaskError.from_exception(error, timestamp=self._clock.now())


def callee_of(func: Callable[..., Any]) -> Callee:
    """What a worker must know to call the function."""
    chosen = options_of(func).executor
    place: Executor = chosen or ("async" if inspect.iscoroutinefunction(func) else "thread")
    return Callee(func, place, _takes_context(func))


def _takes_context(func: Callable[..., Any]) -> bool:
    parameters = list(inspect.signature(func).parameters.values())
    if not parameters:
        return False
    annotation = parameters[0].annotation
    if isinstance(annotation, str):
        try:
            annotation = typing.get_type_hints(func).get(parameters[0].name)
        except Exception:
            # Hints may name what exists for type checkers only; the text itself must do.
            return str(parameters[0].annotation).rpartition(".")[2] == TaskContext.__name__
    return annotation is TaskContext
