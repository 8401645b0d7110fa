"""Handles of the tasks that a running task has enqueued, for the thread or event loop of that task."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from omniq.concurrency.portal import Portal
from omniq.models import Progress, Task, TaskStatus
from omniq.operations.handle import AsyncTaskHandle
from omniq.operations.output_stream import OutputIterator
from omniq.storage.base import BaseStorage
from omniq.tasks.arguments import FunctionTypes
from omniq.tasks.durations import Duration
from omniq.tasks.steps import WorkerServices, run_on_loop_of
from omniq.tasks.task_output import OutputChunk

R = TypeVar("R")
_T = TypeVar("_T")


class LoopPortal(Portal):
    """Runs coroutines on the event loop of the worker, while a thread of a task waits.

    Only the timeout of the task limits how long.
    """

    def __init__(self, services: WorkerServices) -> None:
        super().__init__()
        self._services = services

    def run(self, coroutine: Coroutine[Any, Any, _T], wait: float | None = 0.0) -> _T:
        return self._services.submit(coroutine).result()


class OtherLoopHandle(AsyncTaskHandle[R]):
    """A handle for an event loop of the task itself: its calls run on that of the worker."""

    def __init__(
        self,
        services: WorkerServices,
        storage: BaseStorage,
        task_id: str,
        types: FunctionTypes | None,
    ) -> None:
        super().__init__(storage, task_id, types)
        self._services = services

    async def status(self) -> TaskStatus:
        return await run_on_loop_of(self._services, super().status())

    async def result(self, timeout: Duration | None = None) -> R:
        return await run_on_loop_of(self._services, super().result(timeout))

    async def cancel(self) -> bool:
        return await run_on_loop_of(self._services, super().cancel())

    async def change(
        self,
        *,
        priority: int | None = None,
        queue: str | None = None,
        eta: datetime | None = None,
        delay: Duration | None = None,
    ) -> Task:
        change = super().change(priority=priority, queue=queue, eta=eta, delay=delay)
        return await run_on_loop_of(self._services, change)

    async def run_now(self) -> Task:
        return await run_on_loop_of(self._services, super().run_now())

    async def progress(self) -> Progress | None:
        return await run_on_loop_of(self._services, super().progress())

    def stream(
        self, *, logs: bool = False, all_runs: bool = False, timeout: Duration | None = None
    ) -> AsyncIterator[OutputChunk]:
        output = self._output(logs, all_runs, timeout)
        return OutputIterator(output, partial(run_on_loop_of, self._services))
