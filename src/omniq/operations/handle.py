"""Handles of enqueued tasks: status, result, cancel and progress, for async and blocking code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from omniq.concurrency.blocking import BlockingFace, blocking
from omniq.concurrency.portal import Portal
from omniq.errors import (
    OmniqError,
    RemoteTraceback,
    ResultTimeout,
    TaskCancelled,
    TaskFailed,
    TaskNotFound,
)
from omniq.models import Progress, Task, TaskStatus
from omniq.operations.output_stream import OutputIterator, OutputStream
from omniq.operations.task_changes import change_task, run_task_now
from omniq.tasks.arguments import FunctionTypes
from omniq.tasks.durations import Duration, seconds_of
from omniq.tasks.task_output import OutputChunk

if TYPE_CHECKING:
    from omniq.storage.base import BaseStorage

R = TypeVar("R")

_EXPLAIN_SECONDS = 2.0


class AsyncTaskHandle(Generic[R]):
    """An enqueued task. It holds no connection.

    With the `types` of its function, the result has the type that the function declares.
    """

    def __init__(
        self, storage: BaseStorage, task_id: str, types: FunctionTypes | None = None
    ) -> None:
        self._storage = storage
        self._types = types
        self.id = task_id

    async def status(self) -> TaskStatus:
        """Return the task's status. Raises `TaskNotFound` when the storage has no record of it."""
        task = await self._storage.get_task(self.id)
        if task is None:
            raise TaskNotFound(self.id)
        return task.status

    async def result(self, timeout: Duration | None = None) -> R:
        """Wait for the function's return value; without `timeout`, wait without limit.

        Raises `TaskFailed`, `TaskCancelled`, `ResultTimeout`, or `TaskNotFound` when the storage
        has no record of the task. Raises `SerializationError` when the stored value does not fit
        the type that the function declares here.
        """
        seconds = seconds_of("timeout", timeout)
        result = await self._storage.wait_for_result(self.id, seconds)
        if result is None:
            if seconds is not None and await self._storage.get_task(self.id) is not None:
                raise ResultTimeout(self.id, seconds, await self._first_reason())
            raise TaskNotFound(self.id)
        if result.status is TaskStatus.FAILED:
            error = result.error
            cause = RemoteTraceback(error.traceback) if error and error.traceback else None
            raise TaskFailed(self.id, error) from cause
        if result.status is TaskStatus.CANCELLED:
            raise TaskCancelled(self.id, result.reason or "")
        value = result.result if self._types is None else self._types.load_result(result.result)
        return cast(R, value)

    async def _first_reason(self) -> str:
        """Why the task has no result yet; empty when that cannot be found out."""
        # Imported late: it needs many modules that a program without such an error does not.
        from omniq.operations.explain import explain

        with suppress(OmniqError, TimeoutError):
            async with asyncio.timeout(_EXPLAIN_SECONDS):
                first = (await explain(self._storage, self.id)).reasons[0]
            return f"{first.text}; {first.hint}" if first.hint else first.text
        return ""

    async def cancel(self) -> bool:
        """Cancel a waiting task, or ask a running one to stop; False when it has ended."""
        return await self._storage.cancel(self.id)

    async def change(
        self,
        *,
        priority: int | None = None,
        queue: str | None = None,
        eta: datetime | None = None,
        delay: Duration | None = None,
    ) -> Task:
        """Give the waiting task another priority, queue or eta; return the task as it is now.

        Raises `TaskNotWaiting` when a worker has it or it has ended.
        """
        return await change_task(
            self._storage, self.id, priority=priority, queue=queue, eta=eta, delay=delay
        )

    async def run_now(self) -> Task:
        """Make the waiting task due now; return it. Raises `TaskNotWaiting` as `change` does."""
        return await run_task_now(self._storage, self.id)

    async def progress(self) -> Progress | None:
        """Return what the running task last reported; None when it reported nothing."""
        return await self._storage.get_progress(self.id)

    def stream(
        self, *, logs: bool = False, all_runs: bool = False, timeout: Duration | None = None
    ) -> AsyncIterator[OutputChunk]:
        """Iterate over what the task streams: the chunks that are there, then each as it comes, until the task ends.

        When the task runs again, the iteration goes on with the newest run as soon as that has output:
        `chunk.is_first` is then True, and `chunk.attempt` higher. With `all_runs`, the runs follow each other as a
        whole. `logs`: also the lines of `ctx.log`. `timeout` is how long to wait for the next chunk.

        Raises `TaskNotFound` when the storage has no record of the task, and `ResultTimeout`. How the task has
        ended is what `result()` says.
        """
        return OutputIterator(self._output(logs, all_runs, timeout))

    def _output(self, logs: bool, all_runs: bool, timeout: Duration | None) -> OutputStream:
        seconds = seconds_of("timeout", timeout)
        return OutputStream(self._storage, self.id, logs=logs, all_runs=all_runs, timeout=seconds)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AsyncTaskHandle):
            return NotImplemented
        return self.id == other.id and self._storage is other._storage

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"


class TaskHandle(BlockingFace[AsyncTaskHandle[R]]):
    """An enqueued task. The blocking form of `AsyncTaskHandle`."""

    def __init__(self, portal: Portal, handle: AsyncTaskHandle[R]) -> None:
        super().__init__(portal, handle)
        self.id = handle.id

    status = blocking(AsyncTaskHandle.status)
    cancel = blocking(AsyncTaskHandle.cancel)
    change = blocking(AsyncTaskHandle.change)
    run_now = blocking(AsyncTaskHandle.run_now)
    progress = blocking(AsyncTaskHandle.progress)

    def stream(
        self, *, logs: bool = False, all_runs: bool = False, timeout: Duration | None = None
    ) -> Iterator[OutputChunk]:
        """Iterate over what the task streams: the chunks that are there, then each as it comes, until the task ends.

        When the task runs again, the iteration goes on with the newest run as soon as that has output:
        `chunk.is_first` is then True, and `chunk.attempt` higher. With `all_runs`, the runs follow each other as a
        whole. `logs`: also the lines of `ctx.log`. `timeout` is how long to wait for the next chunk.

        Raises `TaskNotFound` when the storage has no record of the task, and `ResultTimeout`. How the task has
        ended is what `result()` says.
        """
        output = self._async_face._output(logs, all_runs, timeout)
        while (chunks := self._run(output.next(), None)) is not None:
            yield from chunks

    def result(self, timeout: Duration | None = None) -> R:
        """Wait for the function's return value; without `timeout`, wait without limit.

        Raises `TaskFailed`, `TaskCancelled`, `ResultTimeout`, or `TaskNotFound` when the storage
        has no record of the task. Raises `SerializationError` when the stored value does not fit
        the type that the function declares here.
        """
        wait = seconds_of("timeout", timeout)
        return self._run(self._async_face.result(timeout), wait)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TaskHandle):
            return NotImplemented
        return self._async_face == other._async_face

    def __hash__(self) -> int:
        return hash(self._async_face)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"
