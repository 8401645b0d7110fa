"""A task's own transaction: what it writes is committed together with its success, or not at all."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from omniq.errors import InvalidTask, StaleClaim
from omniq.models import Task
from omniq.tasks.steps import Host

if TYPE_CHECKING:
    from omniq.tasks.context import TaskContext


class Transaction:
    """What `ctx.transaction()` gives: for `async with` in async tasks, for `with` in others.

    Both give the connection. To be used once.
    """

    def __init__(self, task: Task, context: TaskContext, host: Host) -> None:
        self._task = task
        self._context = context
        self._host = host
        self._entered: AbstractAsyncContextManager[Any] | None = None

    async def __aenter__(self) -> Any:
        if not self._is_on_host_loop() and self._host.loop is not None:
            raise InvalidTask("in a task that runs in a thread, it is `with ctx.transaction()`")
        return await self._begin(blocking=False)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return await self._end(kind, error, trace)

    def __enter__(self) -> Any:
        if self._is_on_host_loop():
            raise InvalidTask("in an async task, it is `async with ctx.transaction()`")
        return self._host.submit(self._begin(blocking=True)).result()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self._host.submit(self._end(kind, error, trace)).result()

    def _is_on_host_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._host.loop
        except RuntimeError:
            return False

    # On the host's event loop

    async def _begin(self, *, blocking: bool) -> Any:
        context = self._context
        if context.completed is not None:
            raise InvalidTask("the task is complete: its transaction has been committed")
        if context.in_transaction:
            raise InvalidTask("the task is in a transaction already; it can be in one at a time")
        if context.cancelled:
            # Another run may be under way already.
            raise StaleClaim(self._task.id, self._task.token)
        transaction = self._host.transaction(self._task, context, blocking=blocking)
        context.in_transaction = True
        try:
            connection = await transaction.__aenter__()
        except BaseException:
            context.in_transaction = False
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
            self._context.in_transaction = False
