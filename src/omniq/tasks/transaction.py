"""The transaction of a task: its writes are committed together with its success, or not at all."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from omniq.errors import InvalidTask, StaleClaim
from omniq.models import Task
from omniq.tasks.steps import WorkerServices

if TYPE_CHECKING:
    from omniq.tasks.context import TaskContext
    from omniq.tasks.enqueued_ids import EnqueuedIds

_OPENING = object()
"""Stands for the connection until it is there."""


class Transaction:
    """The context manager of `ctx.transaction()`: `async with` in async tasks, `with` in others.

    Both return the connection. It can be used once.
    """

    def __init__(self, task: Task, context: TaskContext, services: WorkerServices) -> None:
        self._task = task
        self._context = context
        self._services = services
        self._entered: AbstractAsyncContextManager[Any] | None = None
        self._enqueued: EnqueuedIds | None = None

    async def __aenter__(self) -> Any:
        if not self._is_on_services_loop() and self._services.loop is not None:
            raise InvalidTask("in a task that runs in a thread, use `with ctx.transaction()`")
        return await self._begin(blocking=False)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return await self._end(kind, error, trace)

    def __enter__(self) -> Any:
        if self._is_on_services_loop():
            raise InvalidTask("in an async task, use `async with ctx.transaction()`")
        return self._services.submit(self._begin(blocking=True)).result()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self._services.submit(self._end(kind, error, trace)).result()

    def _is_on_services_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._services.loop
        except RuntimeError:
            return False

    # On the services' event loop

    async def _begin(self, *, blocking: bool) -> Any:
        context = self._context
        if context.completed is not None:
            raise InvalidTask("the task is complete: its transaction has been committed")
        if context.in_transaction:
            raise InvalidTask("the task is in a transaction already; it can be in one at a time")
        if context.cancelled:
            # Another run may have begun.
            raise StaleClaim(self._task.id, self._task.token)
        transaction = self._services.transaction(self._task, context, blocking=blocking)
        context.connection, self._enqueued = _OPENING, context.enqueued
        if context.enqueued is not None:
            context.enqueued = context.enqueued.copy()
        context.connection_lock = asyncio.Lock()
        # What is enqueued meanwhile waits for the connection.
        async with context.connection_lock:
            try:
                context.connection = connection = await transaction.__aenter__()
            except BaseException:
                self._leave()
                raise
        self._entered = transaction
        return connection

    async def _end(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        assert self._entered is not None
        try:
            return await self._entered.__aexit__(kind, error, trace)
        finally:
            self._leave()

    def _leave(self) -> None:
        context = self._context
        context.connection = None
        if context.completed is None:
            # What it enqueued was rolled back, and may be enqueued again.
            context.enqueued = self._enqueued
