"""What a worker offers to the tasks that it runs: checkpoints, progress, threads, transactions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, suppress
from typing import Any, TypeVar

from omniq import events
from omniq.concurrency.backoff import backoff
from omniq.errors import (
    StaleClaim,
    StorageClosed,
    StorageCorrupt,
    StorageError,
    StorageRefused,
)
from omniq.events import Dispatcher
from omniq.models import Task
from omniq.operations.handle import AsyncTaskHandle, TaskHandle
from omniq.outcomes import Succeeded
from omniq.storage.base import BaseStorage
from omniq.tasks.arguments import FunctionTypes
from omniq.tasks.context import TaskContext
from omniq.tasks.enqueued_ids import EnqueuedIds
from omniq.tasks.task_builder import TaskBuilder, builder_for
from omniq.tasks.task_enqueuer import NewTasks
from omniq.worker.executors.execution import Execution
from omniq.worker.executors.thread_executor import ThreadExecutor
from omniq.worker.flow_access import StoredFlows
from omniq.worker.lifespan import LifespanState
from omniq.worker.maintenance import Maintenance
from omniq.worker.output_writer import OutputWriter
from omniq.worker.problems import ProblemReports
from omniq.worker.stats_recorder import event_fields
from omniq.worker.task_handles import LoopPortal, OtherLoopHandle

_T = TypeVar("_T")

EnqueueWrapper = Callable[[list[Task]], AbstractContextManager[list[Task]]]

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
        state: LifespanState,
        *,
        wrappers: Sequence[EnqueueWrapper] = (),
        problems: ProblemReports | None = None,
    ) -> None:
        """`wrappers` are entered around each enqueue by a task, the first outermost."""
        self.loop = asyncio.get_running_loop()
        self.clock = storage.clock
        self.serializer = storage.serializer
        self.report = maintenance.report
        self.storage = storage
        self._events = dispatcher
        self._problems = problems or ProblemReports(dispatcher, storage.clock)
        self.outputs = outputs = OutputWriter(storage, self._problems)
        self.add_output, self.wait_for_room = outputs.add, outputs.wait_for_room
        self._threads = threads
        self._execution = execution
        self._state = state
        self._wrappers: Sequence[EnqueueWrapper] = wrappers
        self.flows = StoredFlows(storage, self._retrying)
        self._waiting = 0
        self._builder: TaskBuilder | None = None
        self._portal: LoopPortal | None = None

    @property
    def waiting(self) -> int:
        """How many calls wait for a storage that is unreachable."""
        return self._waiting + self.outputs.waiting

    @property
    def builder(self) -> TaskBuilder:
        if self._builder is None:
            self._builder = builder_for(self.storage)
        return self._builder

    async def enqueue(self, task: Task, context: TaskContext, new: NewTasks) -> list[str]:
        if self.storage.lease_remaining <= 0:
            raise StaleClaim(task.id, task.token)
        if context.enqueued is None:
            context.enqueued = EnqueuedIds(task, self.builder, self.serializer)
        ids = context.enqueued
        tasks, keys = ids.assign(new)
        try:
            with ExitStack() as wrapped:
                for wrapper in self._wrappers:
                    tasks = wrapped.enter_context(wrapper(tasks))
                stored = await self._store(tasks, ids.nonce, context)
        except BaseException:
            ids.release(keys)
            raise
        return stored

    async def _store(self, tasks: list[Task], nonce: str, context: TaskContext) -> list[str]:
        storage = self.storage
        if context.in_transaction:
            # A connection does one thing at a time, and coroutines and threads may enqueue at the same time.
            async with context.connection_lock:
                connection = context.connection
                if connection is not None:
                    # That of a thread stands for one that belongs to this event loop.
                    connection = getattr(connection, "async_connection", connection)
                    return await storage.enqueue_within(connection, tasks, nonce=nonce)
            # The transaction ended while this call waited.
            context.check_incomplete()
        return await self._retrying("enqueue", lambda: storage.enqueue_many(tasks, nonce=nonce))

    def handle(
        self, task_id: str, types: FunctionTypes | None, *, blocking: bool
    ) -> AsyncTaskHandle[Any] | TaskHandle[Any]:
        if not blocking:
            return OtherLoopHandle(self, self.storage, task_id, types)
        if self._portal is None:
            self._portal = LoopPortal(self)
        return TaskHandle(self._portal, AsyncTaskHandle(self.storage, task_id, types))

    @property
    def state(self) -> Any:
        return self._state.get()

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
        # The commit ends the task, and nothing is stored after that.
        await self.outputs.flush(task)

        def success() -> Succeeded:
            outcomes.append(self._execution.success_of(task, context))
            return outcomes[-1]

        async with self.storage.transaction(
            task.id, task.token, success, blocking=blocking
        ) as connection:
            yield connection
        context.completed = outcomes[-1]

    async def load_checkpoint(self, task_id: str) -> bytes | None:
        return await self._retrying("checkpoint", lambda: self.storage.load_checkpoint(task_id))

    async def save_checkpoint(self, task_id: str, token: int, checkpoint: bytes) -> None:
        def save() -> Awaitable[None]:
            if self.storage.lease_remaining <= 0:
                raise StaleClaim(task_id, token)
            return self.storage.save_checkpoint(task_id, token, checkpoint)

        await self._retrying("checkpoint", save)

    async def _retrying(self, activity: str, call: Callable[[], Awaitable[_T]]) -> _T:
        failures = 0
        while True:
            try:
                return await call()
            except (StorageClosed, StorageCorrupt, StorageRefused):
                raise
            except StorageError as error:
                self._problems.report(activity, error)
                if self.storage.lease_remaining <= 0:
                    raise
            self._waiting += 1
            try:
                pause = backoff(failures, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE)
                await self.clock.sleep(pause)
            finally:
                self._waiting -= 1
            failures += 1


def _unchanged(error: BaseException) -> BaseException:
    return error
