"""Sentry: an event for each run that fails, with the exception, its frames, and the task.

    sentry_sdk.init(dsn="…")                   # in a module of the worker, such as app/tasks.py

    omniq worker app.tasks --middleware omniq.integrations.sentry.Sentry

Each run has its own scope: what a task adds to it, such as tags and breadcrumbs, is in its events only.
Arguments of tasks are not sent.
"""

from __future__ import annotations

import asyncio

import sentry_sdk

from omniq.models import TaskError
from omniq.tasks.context import TaskContext
from omniq.tasks.control import Signal
from omniq.worker.middleware import TIMED_OUT, CallNext


class Sentry:
    """A middleware that reports the exceptions of runs, and runs that time out.

    The exception of a child process is the record of it: the event has its type, message and traceback
    as text. `Retry`, `Snooze` and `Discard` are not errors.
    """

    async def __call__(self, ctx: TaskContext, call_next: CallNext) -> None:
        """Call the rest within a new scope."""
        with sentry_sdk.isolation_scope() as scope:
            scope.set_transaction_name(ctx.func_path, source="task")
            scope.set_tag("omniq.queue", ctx.queue)
            scope.set_context(
                "omniq",
                {
                    "task_id": ctx.task_id,
                    "function": ctx.func_path,
                    "queue": ctx.queue,
                    "attempt": ctx.attempt,
                },
            )
            try:
                await call_next()
            except asyncio.CancelledError as error:
                # A task that was cancelled, or whose worker stops, has not failed.
                if error.args == TIMED_OUT:
                    scope.capture_message(f"{ctx.func_path} timed out", level="error")
                raise
            except Exception as error:
                if isinstance(error, TaskError):
                    scope.set_context(
                        "error", {"type": error.error_type, "traceback": error.traceback}
                    )
                if not isinstance(error, Signal):
                    scope.capture_exception(error)
                raise
