"""Handles of enqueued tasks: status, result, cancel, progress; for async and for blocking code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar, cast

from omniq._portal import Portal
from omniq.durations import Duration, seconds_of
from omniq.errors import ResultTimeout, TaskCancelled, TaskFailed, TaskNotFound
from omniq.models import Progress, TaskStatus

if TYPE_CHECKING:
    from omniq.storage.base import BaseStorage

R = TypeVar("R")


class AsyncTaskHandle(Generic[R]):
    """An enqueued task, to ask about. Holds nothing open."""

    def __init__(self, storage: BaseStorage, task_id: str) -> None:
        self._storage = storage
        self.id = task_id

    async def status(self) -> TaskStatus:
        """Where the task is now. Raises `TaskNotFound` when its record has gone."""
        task = await self._storage.get_task(self.id)
        if task is None:
            raise TaskNotFound(self.id)
        return task.status

    async def result(self, timeout: Duration | None = None) -> R:
        """What the function returned, as soon as it has; without `timeout`, however long it takes.

        Raises `TaskFailed`, `TaskCancelled`, `ResultTimeout`, or `TaskNotFound` when no record is
        kept.
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
        """A waiting task never runs, a running one is told to stop; False when it has ended."""
        return await self._storage.cancel(self.id)

    async def progress(self) -> Progress | None:
        """What the running task last reported."""
        return await self._storage.get_progress(self.id)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"


class TaskHandle(Generic[R]):
    """An enqueued task, to ask about. The blocking face of `AsyncTaskHandle`."""

    def __init__(self, portal: Portal, handle: AsyncTaskHandle[R]) -> None:
        self._portal = portal
        self._handle = handle
        self.id = handle.id

    def status(self) -> TaskStatus:
        """Where the task is now. Raises `TaskNotFound` when its record has gone."""
        return self._portal.run(self._handle.status())

    def result(self, timeout: Duration | None = None) -> R:
        """What the function returned, as soon as it has; without `timeout`, however long it takes.

        Raises `TaskFailed`, `TaskCancelled`, `ResultTimeout`, or `TaskNotFound` when no record is
        kept.
        """
        return self._portal.run(self._handle.result(timeout))

    def cancel(self) -> bool:
        """A waiting task never runs, a running one is told to stop; False when it has ended."""
        return self._portal.run(self._handle.cancel())

    def progress(self) -> Progress | None:
        """What the running task last reported."""
        return self._portal.run(self._handle.progress())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"
