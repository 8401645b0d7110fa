"""Calls functions with resources: makes these first, where the function runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from omniq.concurrency.coroutines import run_without_loop
from omniq.errors import InvalidTask
from omniq.models import PermanentError
from omniq.tasks.context import TaskContext
from omniq.tasks.error_rules import ErrorRules
from omniq.tasks.signature import Callee
from omniq.worker.executors.thread_executor import ThreadExecutor
from omniq.worker.resources import Blocking, Injector, InThread, OnLoop, Place, WorkerResources

Explain = Callable[[TaskContext, BaseException, tuple[ErrorRules, ...]], BaseException]


def with_resources(
    callee: Callee, *, resources: WorkerResources, threads: ThreadExecutor, explain: Explain
) -> Callee:
    """Return a function with resources as one of the event loop, which makes them first.

    Others, and those of a child process, which makes them itself, stay as they are.
    """
    inject = callee.inject
    if inject is None or callee.place == "process":
        return callee
    try:
        injector = Injector(callee.types.resources, in_batch=callee.batch is not None)
    except InvalidTask as error:
        return msgspec.structs.replace(callee, func=_failing(str(error)))

    async def in_thread(call: Callable[[], Any]) -> Any:
        return await threads.call(call, explain=lambda error: error)

    # What blocks in the resources of a task that may block must not block the event loop.
    made_in = OnLoop() if callee.place == "async" else InThread(in_thread)

    async def call(task_context: TaskContext, /, *args: Any, **kwargs: Any) -> Any:
        values = await injector.of_worker(resources, made_in)
        args = (task_context, *args) if callee.takes_context else args

        def run(place: Place) -> Coroutine[Any, Any, Any]:
            return injector.call(partial(inject, args, kwargs), values, task_context, place)

        if callee.place == "async":
            return await run(OnLoop())
        # All in the thread of the function: what is bound to a thread works there. An async function
        # has a new event loop in it, as without resources.
        place = Blocking(partial(_run_on, asyncio.get_running_loop()))
        return await threads.call(
            (lambda: asyncio.run(run(OnLoop())))
            if callee.is_coroutine
            else (lambda: run_without_loop(run(place))),
            explain=lambda error: explain(task_context, error, callee.rules),
        )

    return msgspec.structs.replace(
        callee, func=call, place="async", takes_context=True, is_coroutine=True
    )


def _failing(why: str) -> Callable[..., Any]:
    """In place of a function that cannot be called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        raise PermanentError(why, error_type=InvalidTask.__name__)

    return call


def _run_on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> Any:
    """Run the coroutine on the worker's event loop, from a thread."""
    try:
        future = asyncio.run_coroutine_threadsafe(work, loop)
    except RuntimeError:
        # The loop is closed; without this Python warns of a coroutine that was never awaited.
        work.close()
        raise
    return future.result()
