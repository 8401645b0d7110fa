"""Calls the hooks of tasks in the background, once the end of a run is recorded."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from omniq.errors import FunctionNotFound
from omniq.events import Dispatcher, HookFailed
from omniq.models import Task, TaskError, TaskResult, TaskStatus
from omniq.tasks.functions import FunctionCache, options_of
from omniq.tasks.options import Hook, SuccessHook

_PATIENCE = 30.0
"""Seconds a hook may take. A thread cannot be stopped: one that takes longer is abandoned."""

_PATIENCE_AT_STOP = 5.0


HookEnded = Callable[[bool], Awaitable[None]]
"""Called when a call of `on_dead` has ended; with False when the pool stops before that."""


class FailureHooks:
    """Calls each hook once, with the task and its error or result: async ones on this event loop, others in a
    thread. An exception of a hook is reported, and changes nothing.
    """

    def __init__(self, functions: FunctionCache, dispatcher: Dispatcher) -> None:
        self._functions = functions
        self._events = dispatcher
        self._has_hook: dict[str, bool] = {}
        self._has_success_hook: dict[str, bool] = {}
        self._calls: set[asyncio.Task[None]] = set()

    def has_hook(self, func_path: str) -> bool:
        """Whether the function has a hook. Called for every run, so the answer is cached."""
        known = self._has_hook.get(func_path)
        if known is None:
            known = self._has_hook[func_path] = any(self._hooks_of(func_path).values())
        return known

    def succeeded(self, task: Task, result: TaskResult) -> None:
        """Call `on_success`: a run succeeded, and that is recorded. Called for every run."""
        known = self._has_success_hook.get(task.func_path)
        if known is None:
            hook = self._hooks_of(task.func_path).get("on_success")
            known = self._has_success_hook[task.func_path] = hook is not None
        if known:
            self._begin("on_success", task, result)

    def failed(self, task: Task, error: TaskError) -> None:
        """Call `on_failure`: a run failed by itself, and that is recorded."""
        self._begin("on_failure", task, error)

    def died(self, task: Task, error: TaskError, ended: HookEnded) -> bool:
        """Call `on_dead`: the task is a dead letter now. Then await `ended`. False if it has no such hook."""
        return self._begin("on_dead", task, error, ended)

    def gave_up(self, task: Task, workers: int) -> None:
        """Report that `on_dead` is not called again: all workers that called it were lost."""
        text = f"{workers} workers were lost while they called it, so it is not called again"
        self._report("on_dead", task, TaskError(text, error_type="WorkerLost"))

    async def finish(self) -> None:
        """Wait a few seconds for the running calls, then cancel them."""
        if self._calls:
            _, late = await asyncio.wait(self._calls, timeout=_PATIENCE_AT_STOP)
            for call in late:
                call.cancel()

    def _hooks_of(self, func_path: str) -> dict[str, Hook | SuccessHook | None]:
        try:
            options = options_of(self._functions.resolve(func_path))
        except FunctionNotFound:
            return {}
        return {
            "on_success": options.on_success,
            "on_failure": options.on_failure,
            "on_dead": options.on_dead,
        }

    def _begin(
        self,
        name: str,
        task: Task,
        end: TaskError | TaskResult,
        ended: HookEnded | None = None,
    ) -> bool:
        hook = self._hooks_of(task.func_path).get(name)
        if hook is None:
            return False
        work = self._call(name, hook, task, end)
        if ended is not None:
            work = _then(work, ended)
        call = asyncio.get_running_loop().create_task(work)
        # Referenced until it ends: the event loop holds only a weak reference.
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return True

    async def _call(
        self, name: str, hook: Callable[..., Any], task: Task, end: TaskError | TaskResult
    ) -> None:
        """Call it, and report what it raises; raises nothing but `CancelledError` of `on_dead`."""
        try:
            async with asyncio.timeout(_PATIENCE):
                if inspect.iscoroutinefunction(hook):
                    await hook(task, end)
                else:
                    await _in_thread(hook, task, end)
        except BaseException as raised:
            # The user's code, in the background: it may raise anything.
            task_of_call = asyncio.current_task()
            if name == "on_dead" and task_of_call is not None and task_of_call.cancelling():
                raise
            self._report(name, task, TaskError.from_exception(raised))

    def _report(self, hook: str, task: Task, error: TaskError) -> None:
        self._events.emit(
            HookFailed(
                id=task.id,
                func_path=task.func_path,
                queue=task.queue,
                attempt=_attempt(task),
                hook=hook,
                error=error.error_type,
                error_message=error.message,
                traceback=error.traceback,
            )
        )


def _attempt(task: Task) -> int:
    """The number of the attempt that has ended, which a task as it was claimed does not count yet."""
    return task.attempts + task.crashes + (task.status is TaskStatus.RUNNING)


async def _then(work: Coroutine[Any, Any, None], ended: HookEnded) -> None:
    try:
        await work
    except asyncio.CancelledError:
        await ended(False)
        raise
    await ended(True)


async def _in_thread(func: Callable[..., Any], *args: Any) -> None:
    """Call it in a separate daemon thread, which does not keep the process from exiting."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def run() -> None:
        error = None
        try:
            func(*args)
        except BaseException as raised:
            error = TaskError.from_exception(raised)
        # The loop may be closed by now, if `finish` did not wait to the end.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_end, ended, error)

    threading.Thread(target=run, name="omniq-hook", daemon=True).start()
    await ended


def _end(future: asyncio.Future[None], error: TaskError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
