"""Handles of enqueued tasks: status, result, cancel and progress, for async and blocking code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar, cast

from omniq._blocking import BlockingFace, blocking
from omniq._portal import Portal
from omniq.durations import Duration, seconds_of
from omniq.errors import ResultTimeout, TaskCancelled, TaskFailed, TaskNotFound
from omniq.models import Progress, TaskStatus

if TYPE_CHECKING:
    from omniq.storage.base import BaseStorage

R = TypeVar("R")


class AsyncTaskHandle(Generic[R]):
    """An enqueued task. It holds no connection."""

    def __init__(self, storage: BaseStorage, task_id: str) -> None:
        self._storage = storage
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
        has no record of the task.
        """
        seconds = seconds_of("timeout", timeout)
        result = await self._storage.wait_for_result(self.id, seconds)
        if result is None:
            if seconds is not None and await self._storage.get_task(self.id) is not None:
                raise ResultTimeout(self.id, seconds)
            raise TaskNotFound(self.id)
        if result.status is TaskStatus.FAILED:
            raise TaskFailed(self.id, result.error)
        if result.status is TaskStatus.CANCELLED:
            raise TaskCancelled(self.id, result.reason or "")
        return cast(R, result.result)

    async def cancel(self) -> bool:
        """Cancel a waiting task, or ask a running one to stop; False when it has ended."""
        return await self._storage.cancel(self.id)

    async def progress(self) -> Progress | None:
        """Return what the running task last reported; None when it reported nothing."""
        return await self._storage.get_progress(self.id)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"


class TaskHandle(BlockingFace[AsyncTaskHandle[R]]):
    """An enqueued task. The blocking form of `AsyncTaskHandle`."""

    def __init__(self, portal: Portal, handle: AsyncTaskHandle[R]) -> None:
        super().__init__(portal, handle)
        self.id = handle.id

    status = blocking(AsyncTaskHandle.status)
    cancel = blocking(AsyncTaskHandle.cancel)
    progress = blocking(AsyncTaskHandle.progress)

    def result(self, timeout: Duration | None = None) -> R:
        """Wait for the function's return value; without `timeout`, wait without limit.

        Raises `TaskFailed`, `TaskCancelled`, `ResultTimeout`, or `TaskNotFound` when the storage
        has no record of the task.
        """
        return self._run(self._async_face.result(timeout))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"
