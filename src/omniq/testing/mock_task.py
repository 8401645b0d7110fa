"""`MockTask`: a task for tests of pools and of code around tasks, which does what the test says."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from omniq.clock import SYSTEM_CLOCK
from omniq.errors import OmniqError
from omniq.tasks.context import TaskContext
from omniq.tasks.durations import Duration, seconds_of
from omniq.tasks.functions import task

if TYPE_CHECKING:
    from omniq.operations.handle import AsyncTaskHandle, TaskHandle
    from omniq.queue.async_queue import AsyncTaskQueue
    from omniq.queue.blocking_queue import TaskQueue

_MOCKS: dict[str, MockTask] = {}
"""The mock tasks of this process, by id: a stored task names a function, and carries plain data only."""


class MockTask:
    """A task that waits `execute_delay`, then calls `execute_fn(ctx)`, and counts what happens.

        mock = MockTask("task-1", execute_fn=lambda ctx: done.append(ctx.task_id))
        handle = await mock.enqueue(queue)

    It stops as soon as the task is cancelled, times out or loses its worker. `execute_fn` may be async;
    what it returns is the result. The delay is in real time. Workers of this process can run it.
    """

    def __init__(
        self,
        id: str | None = None,
        type: str = "test",
        execute_fn: Callable[[TaskContext], Any] | None = None,
        execute_delay: Duration = 0.0,
    ) -> None:
        self.id = id or SYSTEM_CLOCK.new_id()
        self.type = type
        self.execute_fn = execute_fn
        self.execute_delay = seconds_of("execute_delay", execute_delay)
        self.started = 0
        """How many runs have started."""
        self.finished = 0
        """How many runs have returned."""
        self.cancelled = 0
        """How many runs were stopped."""
        _MOCKS[self.id] = self

    @overload
    def enqueue(self, queue: TaskQueue, **options: Any) -> TaskHandle[Any]: ...

    @overload
    async def enqueue(self, queue: AsyncTaskQueue, **options: Any) -> AsyncTaskHandle[Any]: ...

    def enqueue(self, queue: Any, **options: Any) -> Any:
        """Enqueue it under its id and type; awaited for an `AsyncTaskQueue`. `options` are those of the queue."""
        chosen = {"task_id": self.id, "task_type": self.type, **options}
        return queue.options(**chosen).enqueue(run_mock_task, self.id)

    async def execute(self, ctx: TaskContext) -> Any:
        """Run it. A worker calls this."""
        self.started += 1
        try:
            if self.execute_delay:
                await asyncio.sleep(self.execute_delay)
            value = None if self.execute_fn is None else self.execute_fn(ctx)
            value = await value if inspect.isawaitable(value) else value
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.finished += 1
        return value


@task
async def run_mock_task(ctx: TaskContext, mock_id: str) -> Any:
    """The function that a `MockTask` is stored under."""
    mock = _MOCKS.get(mock_id)
    if mock is None:
        raise OmniqError(f"there is no MockTask {mock_id} in this process")
    return await mock.execute(ctx)
