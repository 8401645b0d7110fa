"""What a worker offers to the tasks that it runs: checkpoints, progress, threads, transactions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from omniq import events
from omniq._backoff import backoff
from omniq.errors import (
    StaleClaim,
    StorageClosed,
    StorageCorrupt,
    StorageError,
    StorageRefused,
)
from omniq.events import Dispatcher
from omniq.models import Task
from omniq.outcomes import Succeeded
from omniq.storage.base import BaseStorage
from omniq.tasks.context import TaskContext
from omniq.worker.executors.execution import Execution
from omniq.worker.executors.thread_executor import ThreadExecutor
from omniq.worker.maintenance import Maintenance
from omniq.worker.stats_recorder import event_fields

_T = TypeVar("_T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


class TaskServices:
    """Serves all tasks of one pool, on the event loop that it is made in.

    It waits for a storage that is unreachable as long as the lease lasts: a step whose result is not
    stored would have to run again.
    """

    def __init__(
        self,
        storage: BaseStorage,
        dispatcher: Dispatcher,
        threads: ThreadExecutor,
        execution: Execution,
        maintenance: Maintenance,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.clock = storage.clock
        self.serializer = storage.serializer
        self.report = maintenance.report
        self._storage = storage
        self._events = dispatcher
        self._threads = threads
        self._execution = execution

    def report_skipped_step(self, task: Task, step: str, error: str) -> None:
        if self._events.wants(events.StepSkipped):
            skipped = events.StepSkipped(**event_fields(task), step=step, error=error)
            # Listeners are called on the loop, wherever the task runs.
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._events.emit, skipped)

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        try:
            return asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError as error:
            # The loop is closed; without this Python warns of a coroutine that was never awaited.
            work.close()
            raise StorageClosed("the worker has ended") from error

    async def in_thread(self, call: Callable[[], _T]) -> _T:
        value: _T = await self._threads.call(call, explain=_unchanged)
        return value

    @asynccontextmanager
    async def transaction(
        self, task: Task, context: TaskContext, *, blocking: bool
    ) -> AsyncIterator[Any]:
        outcomes: list[Succeeded] = []

        def success() -> Succeeded:
            outcomes.append(self._execution.success_of(task, context))
            return outcomes[-1]

        async with self._storage.transaction(
            task.id, task.token, success, blocking=blocking
        ) as connection:
            yield connection
        context.completed = outcomes[-1]

    async def load_checkpoint(self, task_id: str) -> bytes | None:
        return await self._retrying(lambda: self._storage.load_checkpoint(task_id))

    async def save_checkpoint(self, task_id: str, token: int, checkpoint: bytes) -> None:
        def save() -> Awaitable[None]:
            if self._storage.lease_remaining <= 0:
                raise StaleClaim(task_id, token)
            return self._storage.save_checkpoint(task_id, token, checkpoint)

        await self._retrying(save)

    async def _retrying(self, call: Callable[[], Awaitable[_T]]) -> _T:
        failures = 0
        while True:
            try:
                return await call()
            except (StorageClosed, StorageCorrupt, StorageRefused):
                raise
            except StorageError as error:
                self._events.emit(events.ChoreFailed.of("checkpoint", error))
                if self._storage.lease_remaining <= 0:
                    raise
            await self.clock.sleep(backoff(failures, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE))
            failures += 1


def _unchanged(error: BaseException) -> BaseException:
    return error
