"""Runs one claimed task and returns its outcome. Knows nothing of storages.

The steps: find the function, before the run counts as started; call it where it belongs (the event
loop, a thread, a process); and turn what happened, every `BaseException` included, into one `Outcome`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal

import msgspec

from omniq.clock import Clock
from omniq.cron import next_run
from omniq.errors import FunctionNotFound
from omniq.models import ErrorCategory, PermanentError, Task, TaskError, TaskResult, TaskStatus
from omniq.outcomes import (
    Cancelled,
    Failed,
    Outcome,
    Released,
    Retried,
    Snoozed,
    Succeeded,
    Suspended,
)
from omniq.retry import ExponentialBackoff, ListedDelays, may_retry, next_delay
from omniq.serialization import Serializer, keeps_objects
from omniq.tasks.arguments import FunctionTypes
from omniq.tasks.context import TaskContext
from omniq.tasks.control import Discard, Retry, Signal, Snooze, Suspend
from omniq.tasks.error_rules import ErrorRules, explain, failed_step_of
from omniq.tasks.functions import FunctionCache
from omniq.tasks.signature import Callee, as_raised, callee_of
from omniq.tasks.versions import WrongSignature
from omniq.worker.executors.batch_call import BatchCall, Items, call_function
from omniq.worker.executors.flow_actions import do_action, with_results
from omniq.worker.executors.process_executor import ProcessExecutor
from omniq.worker.executors.process_protocol import Unserialisable
from omniq.worker.executors.resource_calls import with_resources
from omniq.worker.executors.thread_executor import ThreadExecutor
from omniq.worker.interruption import interruption
from omniq.worker.middleware import Middleware, MiddlewareStack
from omniq.worker.resources import WorkerResources

_MAX_REASON = 1000
_NEVER = float("inf")

_NEVER_RETRIED = (ErrorCategory.PERMANENT, ErrorCategory.UNCLASSIFIED)
"""The categories that are also reasons of a dead letter."""

_EXITS = (SystemExit, KeyboardInterrupt)

_CLOSE_TRIES = 3
"""How often an abandoned coroutine is closed; each `await` in a `finally` uses one."""

StopReason = Literal["timeout", "cancelled", "shutdown", "lease"]


class Run:
    """One running attempt. `stop_reason` is why the worker stops it."""

    __slots__ = (
        "context",
        "deadline",
        "is_given_up",
        "job",
        "started",
        "stop_reason",
        "stops",
        "task",
        "timeout",
    )

    def __init__(self, task: Task, started: float, timeout: float | None) -> None:
        self.task = task
        self.started = started
        self.timeout = timeout
        self.deadline = _NEVER if timeout is None else started + timeout
        self.context: TaskContext | None = None
        self.job: asyncio.Task[None] | None = None
        """The asyncio task that runs it; None before it begins."""
        self.stop_reason: StopReason | None = None
        self.stops = 0
        self.is_given_up = False

    @property
    def completed(self) -> Succeeded | None:
        """The success that a transaction of the run has recorded, whatever happens to it later."""
        return None if self.context is None else self.context.completed

    def interrupt(self) -> None:
        """Cancel the run, for its `stop_reason`."""
        if self.job is not None:
            # With the reason: middleware tells a timeout from a stop by it.
            self.job.cancel(self.stop_reason)

    def give_up(self) -> None:
        """End a run that ignores its cancellation, as far as Python can.

        Its outcome has been decided without it. If it continued, it would run beside its next
        attempt, and `asyncio.run` would wait for it for ever.
        """
        self.is_given_up = True
        if self.job is not None:
            abandon(self.job, has_begun=self.context is not None)


def abandon(job: asyncio.Task[None], *, has_begun: bool) -> None:
    """End an asyncio task that ignores its cancellation, as far as Python can."""
    if job.done():
        return
    job.add_done_callback(_retrieve)
    job.cancel()
    coroutine = job.get_coro()
    for _ in range(_CLOSE_TRIES if has_begun else 0):
        # Raises GeneratorExit in it, which code that swallows CancelledError seldom catches too.
        # `close` fails when the code awaits something after that; closed again, it is one
        # `await` further.
        with suppress(Exception):
            coroutine.close()
            return


class Execution:
    """Runs the tasks of one worker."""

    def __init__(
        self,
        functions: FunctionCache,
        *,
        clock: Clock,
        serializer: Serializer,
        base_retry_delay: float,
        errors: ErrorRules | None,
        threads: ThreadExecutor,
        processes: ProcessExecutor,
        resources: WorkerResources,
        middleware: Sequence[Middleware] = (),
    ) -> None:
        self._functions = functions
        self._clock = clock
        self._serializer = serializer
        self._keeps_objects = keeps_objects(serializer)
        self._backoff = ExponentialBackoff(base=base_retry_delay)
        self._rules = () if errors is None else (errors,)
        self._threads = threads
        self._processes = processes
        self._with_resources = partial(
            with_resources, resources=resources, threads=threads, explain=self._thread_error
        )
        self._middleware = MiddlewareStack(middleware) if middleware else None
        self._callees: dict[str, Callee] = {}
        self._call: Callable[[Callee, Task, TaskContext], Awaitable[Any]] = (
            self._call_function if not middleware else self._call_in_middleware
        )

    def find(self, func_path: str) -> Callee:
        """Find the function of a task. Raises `FunctionNotFound` if it cannot run here."""
        callee = self._callees.get(func_path)
        if callee is None:
            try:
                func = self._functions.resolve(func_path)
                callee = self._callees[func_path] = self._ready(callee_of(func, func_path))
            except FunctionNotFound:
                raise
            except BaseException as error:
                # Importing a module runs it, and its code may raise anything.
                why = f"its import raised {type(error).__name__}"
                raise FunctionNotFound(func_path, why) from error
        return callee

    def _ready(self, callee: Callee) -> Callee:
        """The callee, with what makes its resources."""
        if callee.whole is None:
            return self._with_resources(callee)
        # Its exceptions are explained for each item.
        whole = self._with_resources(callee.whole, explain=lambda _, error, __: error)
        return msgspec.structs.replace(callee, whole=whole)

    @property
    def has_middleware(self) -> bool:
        """Whether code of the application runs around each run."""
        return self._middleware is not None

    def batch_call(self, callee: Callee) -> BatchCall:
        """One call of a batched function."""

        async def in_thread(call: Callable[[], Any]) -> Any:
            return await self._threads.call(call, explain=lambda error: error)

        async def make(items: Items) -> Any:
            if callee.place == "process":
                function = self._functions.own_path(items[0].task.func_path)
                return await self._processes.call_batch(items, function)
            return await call_function(callee, items, in_thread)

        return BatchCall(callee, make)

    async def run(self, run: Run, callee: Callee, task_context: TaskContext) -> Outcome:
        """Run the task to its end. Never raises; the worker stops a run by cancelling this.

        The value that a stopped function returns counts, unless a caller cancelled the task, or the
        function has read `ctx.cancelled`: it then returned before its work was done.
        """
        task = run.task
        run.context = task_context
        try:
            if task.workflow is None:
                call = task if task.version == callee.version else callee.upcast(task)
                value = await self._call(callee, call, task_context)
            else:
                value = await self._call_node(callee, task, task_context)
            if task_context.unstored:
                await task_context.store_children()
        except BaseException as error:
            # The user's code may raise anything, and none of it may end the worker's loop.
            return await self._raised(run, callee, task_context, error)
        return self.returned(run, callee, task_context, value)

    async def end(
        self, run: Run, callee: Callee, task_context: TaskContext, outcome: Any
    ) -> Outcome:
        """The outcome of a run that has shared a call, from its value or exception there."""
        try:
            if not isinstance(outcome, BaseException):
                if task_context.unstored:
                    await task_context.store_children()
                return self.returned(run, callee, task_context, outcome)
        except BaseException as error:
            outcome = error
        return await self._raised(run, callee, task_context, outcome)

    async def _raised(
        self, run: Run, callee: Callee, task_context: TaskContext, error: BaseException
    ) -> Outcome:
        if isinstance(error, asyncio.CancelledError):
            # An abandoned thread: nothing that it does counts any more.
            task_context.cancelled = True
        if run.stop_reason not in ("lease", "cancelled"):
            await _save_checkpoint(task_context)
        outcome = self._failure(run, error, callee.rules)
        if task_context.has_undos and isinstance(outcome, Failed) and run.stop_reason is None:
            await task_context.undo_steps()
        return outcome

    def returned(self, run: Run, callee: Callee, task_context: TaskContext, value: Any) -> Outcome:
        """The outcome of a run whose function has returned that value, when nothing is left to store."""
        task = run.task
        if run.stop_reason == "cancelled" or task_context.has_seen_stop:
            return self.failure_of(run)
        # A child process has converted its result already, and an action has none of the function's.
        if task.workflow is not None and task.workflow.action:
            return self._success(task, value, task_context.warnings, None)
        types = None if callee.place == "process" else callee.types
        return self._success(task, value, task_context.warnings, types)

    def failure_of(self, run: Run) -> Outcome:
        """The outcome of a run that was stopped and never started, or does not end."""
        return self._failure(run, asyncio.CancelledError())

    def interrupted(self, run: Run) -> Released | Failed:
        """The outcome of a run that its worker ends: the task runs again, unless it may run only once."""
        if run.context is None:
            return Released(run.task.id, run.task.token)
        why = "lost its lease" if run.stop_reason == "lease" else "was stopped"
        return interruption(run.task, f"its worker {why}", self._clock.now())

    def success_of(self, task: Task, task_context: TaskContext) -> Succeeded:
        """The success that a transaction of the task will record.

        Raises `PermanentError` when its result cannot be stored.
        """
        types = self.find(task.func_path).types
        outcome = self._success(task, task_context.result, task_context.warnings, types)
        if isinstance(outcome, Succeeded):
            return outcome
        assert isinstance(outcome, Failed)
        raise PermanentError(outcome.error.message, error_type=outcome.error.error_type)

    async def _call_node(self, callee: Callee, task: Task, task_context: TaskContext) -> Any:
        """Call the function of a task that is part of a workflow, or do what its `action` says."""
        workflow = task.workflow
        assert workflow is not None
        if workflow.action:
            return await do_action(workflow.action, task, task_context)
        if workflow.refs:
            task = await with_results(task, task_context)
        if task.version != callee.version:
            task = callee.upcast(task)
        return await self._call(callee, task, task_context)

    def _call_function(
        self, callee: Callee, task: Task, task_context: TaskContext
    ) -> Awaitable[Any]:
        args = (task_context, *task.args) if callee.takes_context else task.args
        if callee.is_coroutine and callee.place == "async":
            # Without a coroutine around it.
            awaitable: Awaitable[Any] = callee.func(*args, **task.kwargs)
            return awaitable
        return self._call_in_place(callee, args, task, task_context)

    async def _call_in_place(
        self, callee: Callee, args: tuple[Any, ...], task: Task, task_context: TaskContext
    ) -> Any:
        match callee.place:
            case "async":
                value = callee.func(*args, **task.kwargs)
            case "thread":
                func = _with_event_loop(callee.func) if callee.is_chosen else callee.func
                value = await self._threads.call(
                    partial(func, *args, **task.kwargs),
                    explain=lambda error: self._thread_error(task_context, error, callee.rules),
                )
            case "process":
                function = self._functions.own_path(task.func_path)
                return await self._processes.call(task, task_context, function)
        # A plain function may return a coroutine; it belongs on the event loop.
        return await value if inspect.isawaitable(value) else value

    async def _call_in_middleware(
        self, callee: Callee, task: Task, task_context: TaskContext
    ) -> Any:
        # What the middleware gets for an exception, and what is the run's if the middleware lets it pass.
        shown: BaseException | None = None
        real: BaseException | None = None

        async def call() -> Any:
            nonlocal shown, real
            try:
                return await self._call_function(callee, task, task_context)
            except _RaisedInThread as error:
                # It was explained in its thread.
                shown, real = error.error, error.record
            except _EXITS as error:
                shown = real = error
            if isinstance(shown, _EXITS):
                # Raised in an asyncio task that the middleware makes, it would end the event loop.
                shown = self._record_of(shown)
            raise shown

        assert self._middleware is not None
        try:
            return await self._middleware.call(task_context, call)
        except BaseException as error:
            if real is not None and error is shown:
                raise real from None
            raise

    def _thread_error(
        self, task_context: TaskContext, error: BaseException, rules: tuple[ErrorRules, ...]
    ) -> BaseException:
        claim = (task_context.task_id, task_context.fencing_token)
        record = explain(error, (*rules, *self._rules), self._clock.now(), claim)
        return record if self._middleware is None else _RaisedInThread(error, record)

    def _success(
        self, task: Task, value: Any, warnings: tuple[str, ...], types: FunctionTypes | None
    ) -> Outcome:
        now = self._clock.now()
        try:
            if types is not None and types.result is not None and not self._keeps_objects:
                value = types.dump_result(value)
            result = TaskResult(
                task_id=task.id,
                status=TaskStatus.SUCCESS,
                result=value,
                attempts=task.attempts + task.crashes + 1,
                started_at=task.started_at,
                finished_at=now,
                warnings=warnings,
            )
            encoded = self._serializer.encode_result(result)
        except BaseException as error:
            # Also SystemExit: encoding runs the methods of the value. The work is done; running it
            # again would only do it twice.
            return self._failed(task, self._record_of(error), "unserialisable")
        try:
            again = None if task.interval is None and task.cron is None else _next_run(task, now)
        except Exception as error:
            # A schedule that another program has stored.
            return Failed(task.id, task.token, self._record_of(error), "unschedulable")
        return Succeeded(task.id, task.token, result, again, encoded)

    def _failure(
        self, run: Run, error: BaseException, rules: tuple[ErrorRules, ...] = ()
    ) -> Outcome:
        try:
            return self._outcome_of(run, as_raised(error), rules)
        except Exception as broken:
            # The exception is the user's class, and its attributes may be anything.
            return self._retry_or_fail(run.task, self._record_of(broken), None)

    def _outcome_of(self, run: Run, error: BaseException, rules: tuple[ErrorRules, ...]) -> Outcome:
        task = run.task
        match run.stop_reason:
            case "cancelled":
                return Cancelled(task.id, task.token, "cancelled while running")
            case "shutdown" | "lease":
                return self.interrupted(run)
            case "timeout":
                return self._retry_or_fail(task, self._timed_out(run, error), None)
            case None:
                pass
        match error:
            case Unserialisable():
                return self._failed(task, self._record_of(error.error), "unserialisable")
            case Signal():
                return self._signalled(task, error)
            case WrongSignature():
                return self._failed(task, self._record_of(error), "signature")
            case _:
                return self._retry_or_fail(task, self._explain(task, error, rules), None)

    def _timed_out(self, run: Run, error: BaseException) -> TaskError:
        took = self._clock.monotonic() - run.started
        record = TaskError(
            f"the task was stopped after {took:.3g} s",
            error_type="TaskTimeout",
            timestamp=self._clock.now(),
        )
        step = failed_step_of(error, (run.task.id, run.task.token))
        if step is None and run.context is not None:
            # A thread that still runs.
            step = run.context.running_step()
        if step is not None:
            step.add_to(record)
        return record

    def _signalled(self, task: Task, signal: Signal) -> Outcome:
        if isinstance(signal, Snooze):
            later = self._clock.now() + timedelta(seconds=signal.delay)
            return Snoozed(task.id, task.token, later, str(signal.reason)[:_MAX_REASON])
        if isinstance(signal, Suspend):
            return Suspended(task.id, task.token, signal.on, signal.enough, signal.until)
        if isinstance(signal, Discard):
            reason = TaskError.from_exception(signal).message
            return Cancelled(task.id, task.token, reason[:_MAX_REASON])
        delay = signal.delay if isinstance(signal, Retry) else None
        return self._retry_or_fail(task, self._record_of(signal), delay)

    def _retry_or_fail(self, task: Task, error: TaskError, delay: float | None) -> Outcome:
        if error.category in _NEVER_RETRIED:
            return self._failed(task, error, str(error.category))
        if not may_retry(task.attempts, task.max_retries):
            return self._failed(task, error, "exhausted")
        if delay is None:
            jitter = self._clock.random()
            delays = task.retry_delays
            backoff = ListedDelays(delays) if delays else task.retry or self._backoff
            delay = next_delay(backoff, task.attempts, error.retry_after, jitter)
        later = self._clock.now() + timedelta(seconds=delay)
        return Retried(task.id, task.token, error, later)

    def _failed(self, task: Task, error: TaskError, reason: str) -> Failed:
        """The outcome of a run that is not retried; a task may go on with its next interval."""
        again = None
        if task.reschedule_on_failure:
            # An expression that another program has stored may be wrong: the task then ends.
            with suppress(Exception):
                again = _next_run(task, self._clock.now())
        return Failed(task.id, task.token, error, reason, again)

    def _explain(
        self, task: Task, error: BaseException, rules: tuple[ErrorRules, ...]
    ) -> TaskError:
        claim = (task.id, task.token)
        return explain(error, (*rules, *self._rules), self._clock.now(), claim)

    def _record_of(self, error: BaseException) -> TaskError:
        return TaskError.from_exception(error, timestamp=self._clock.now())


async def _save_checkpoint(task_context: TaskContext) -> None:
    """Store the progress of the run, as far as that is possible: the next run continues there."""
    # A second cancellation too: the outcome must be decided now.
    with suppress(Exception, asyncio.CancelledError):
        await task_context.flush()


class _RaisedInThread(BaseException):
    """Carries the exception of a thread, for middleware, and what the thread has found out of it."""

    def __init__(self, error: BaseException, record: TaskError) -> None:
        super().__init__()
        self.error = error
        self.record = record


def _next_run(task: Task, now: datetime) -> datetime | None:
    if task.interval is None and task.cron is None:
        return None
    return next_run(interval=task.interval, cron=task.cron, tz=task.tz, after=now)


def _with_event_loop(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with a new event loop for the coroutine it may return."""

    def call(*args: Any, **kwargs: Any) -> Any:
        value = func(*args, **kwargs)
        return asyncio.run(_wait_for(value)) if inspect.isawaitable(value) else value

    return call


async def _wait_for(value: Awaitable[Any]) -> Any:
    return await value


def _retrieve(job: asyncio.Task[None]) -> None:
    """Retrieve its exception, so that asyncio does not log that it was never retrieved."""
    if not job.cancelled():
        job.exception()
