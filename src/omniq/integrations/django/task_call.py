"""Calls the function of a Django task in a worker, with Django's signals and connections."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import wraps
from traceback import format_exception
from typing import Any

from asgiref.sync import sync_to_async
from django.db import close_old_connections
from django.utils import timezone

from omniq.models import PermanentError
from omniq.tasks.context import current_task


def runnable(task: Any, base: Any, signals: Any) -> Callable[..., Any]:
    """The task's function for a worker: passes Django's context and renews database connections.

    Sends `task_started` and `task_finished` for each run.
    """
    call: Callable[..., Any]
    if inspect.iscoroutinefunction(task.func):

        @wraps(task.func)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            async with _async_attempt(task, base, signals, args, kwargs) as result:
                value = await task.func(*_arguments(task, base, result, args), **kwargs)
                return _keep(result, base, value)

        call = call_async
    else:

        @wraps(task.func)
        def call_sync(*args: Any, **kwargs: Any) -> Any:
            with _attempt(task, base, signals, args, kwargs) as result:
                value = task.func(*_arguments(task, base, result, args), **kwargs)
                return _keep(result, base, value)

        call = call_sync
    # The wrapper's signature counts: omniq must not take Django's context parameter for its own.
    del call.__wrapped__
    return call


@contextmanager
def _attempt(task: Any, base: Any, signals: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    close_old_connections()
    result = _running(task, base, args, kwargs)
    signals.task_started.send(type(task.get_backend()), task_result=result)
    try:
        yield result
    except BaseException as error:
        _end(result, base, error)
        raise
    else:
        _end(result, base, None)
    finally:
        signals.task_finished.send(type(task.get_backend()), task_result=result)
        close_old_connections()


@asynccontextmanager
async def _async_attempt(
    task: Any, base: Any, signals: Any, args: Any, kwargs: Any
) -> AsyncIterator[Any]:
    await sync_to_async(close_old_connections)()
    result = _running(task, base, args, kwargs)
    await signals.task_started.asend(type(task.get_backend()), task_result=result)
    try:
        yield result
    except BaseException as error:
        _end(result, base, error)
        raise
    else:
        _end(result, base, None)
    finally:
        await signals.task_finished.asend(type(task.get_backend()), task_result=result)
        await sync_to_async(close_old_connections)()


def _arguments(task: Any, base: Any, result: Any, args: Any) -> tuple[Any, ...]:
    return (base.TaskContext(task_result=result), *args) if task.takes_context else tuple(args)


def _running(task: Any, base: Any, args: Any, kwargs: Any) -> Any:
    """The running task as Django's `TaskResult`."""
    context, now = current_task(), timezone.now()
    return base.TaskResult(
        task=task,
        id=context.task_id,
        status=base.TaskResultStatus.RUNNING,
        enqueued_at=context.enqueued_at,
        started_at=now,
        last_attempted_at=now,
        finished_at=None,
        args=list(args),
        kwargs=kwargs,
        backend=task.backend,
        errors=[],
        # Django counts attempts by this list; the workers of earlier runs are not known here.
        worker_ids=[""] * context.attempt,
    )


def _keep(result: Any, base: Any, value: Any) -> Any:
    """The value as JSON data, which is what Django lets a task return. Another kind fails the task.

    It fails for good: the work is done, and a retry would do it again.
    """
    try:
        plain = base.normalize_json(value)
    except TypeError as error:
        raise error from PermanentError("the return value of a Django task must be JSON data")
    object.__setattr__(result, "_return_value", plain)
    return plain


def _end(result: Any, base: Any, error: BaseException | None) -> None:
    object.__setattr__(result, "finished_at", timezone.now())
    if error is None:
        object.__setattr__(result, "status", base.TaskResultStatus.SUCCESSFUL)
        return
    kind = type(error)
    object.__setattr__(result, "status", base.TaskResultStatus.FAILED)
    result.errors.append(
        base.TaskError(
            exception_class_path=f"{kind.__module__}.{kind.__qualname__}",
            traceback="".join(format_exception(error)),
        )
    )
