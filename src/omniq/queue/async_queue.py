"""The queue for async code: enqueue tasks, read and change them. `blocking_queue` blocks instead."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import ExitStack
from datetime import datetime, timedelta
from types import TracebackType
from typing import (
    Any,
    Concatenate,
    ParamSpec,
    Self,
    TypedDict,
    TypeVar,
    TypeVarTuple,
    Unpack,
    overload,
)

from omniq import log
from omniq._deprecation import warn_renamed
from omniq.clock import SYSTEM_CLOCK, Clock
from omniq.errors import InvalidValue
from omniq.events import OrphanedStateDeleted
from omniq.models import (
    Attempt,
    BreakerRule,
    Limit,
    OnConflict,
    QueueStats,
    Task,
    TaskResult,
    TaskStatus,
)
from omniq.operations.check import CheckReport
from omniq.operations.flow_handle import AsyncFlowHandle
from omniq.operations.handle import AsyncTaskHandle
from omniq.operations.health import Health, HealthLimits, health_of
from omniq.operations.task_changes import change_task, run_task_now
from omniq.queue.bulk import AsyncBulk
from omniq.queue.dead_letters import AsyncDeadLetters
from omniq.queue.operators import (
    AsyncBreakers,
    AsyncFunctions,
    AsyncLimits,
    AsyncQueues,
    AsyncWorkers,
)
from omniq.retry import Backoff
from omniq.scheduling.schedules import AsyncSchedules
from omniq.serialization import Serializer
from omniq.settings import Settings
from omniq.storage import BaseStorage, open_storage
from omniq.tasks.context import TaskContext
from omniq.tasks.durations import Duration, instant_before, seconds_of
from omniq.tasks.flow import Flow
from omniq.tasks.import_guard import is_importing, refuse_enqueue
from omniq.tasks.options import SequenceOnFailure
from omniq.tasks.task_builder import (
    NO_OPTIONS,
    CallOptions,
    TaskBuilder,
    builder_for,
    call_options,
)
from omniq.tasks.task_enqueuer import calls_of
from omniq.worker.maintenance import tasks_left
from omniq.worker.pool import AsyncWorkerPool, PoolOptions
from omniq.worker.pool_config import refuse_unknown_options
from omniq.worker.task_services import EnqueueWrapper

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
Ts = TypeVarTuple("Ts")

Function = Callable[..., Any] | str
Call = Sequence[Any]
"""(func, args, kwargs); kwargs may be left out, or both args and kwargs."""


class EnqueueOptions(TypedDict, total=False):
    """The options of `options(…)`; `omniq.tasks.options` explains each. Durations: seconds or `timedelta`.

    `connection` is the caller's connection to the database of the tasks. The enqueue is then part
    of the caller's open transaction: the task exists once the caller commits, and never existed if
    the caller rolls back. Until then a handle finds no task.
    """

    connection: object
    after: Sequence[Any] | None
    after_any: Sequence[Any] | None
    eta: datetime | None
    delay: Duration | None
    interval: Duration | None
    reschedule_on_failure: bool | None
    cron: str | None
    tz: str | None
    priority: int | None
    queue: str | None
    max_retries: int | None
    max_crashes: int | None
    retry: Backoff | Sequence[Duration] | None
    timeout: Duration | None
    task_id: str | None
    unique: str | Callable[..., str] | bool | None
    on_conflict: OnConflict | None
    max_wait: Duration | None
    unique_for: Duration | None
    expires: Duration | datetime | None
    result_ttl: Duration | None
    task_type: str | None
    version: int | None
    metadata: dict[str, Any] | None
    breaker: str | BreakerRule | Iterable[str | BreakerRule] | None
    rate: str | tuple[int, Duration] | None
    max_running: int | None
    limit_key: str | Callable[..., str] | None
    cost: float | Callable[..., float] | None
    limits: Iterable[Limit] | Callable[..., Iterable[Limit]] | None
    sequence: str | Callable[..., str] | None
    sequence_on_failure: SequenceOnFailure | None
    fair_key: str | Callable[..., str] | None
    fair_weight: float | Callable[..., float] | None
    ageing: Duration | None


class AsyncEnqueuer:
    """Enqueues tasks with fixed options. `options(…)` returns one, and a queue is one."""

    def __init__(
        self,
        storage: BaseStorage,
        builder: TaskBuilder,
        call: CallOptions,
        connection: object = None,
        wrappers: Sequence[EnqueueWrapper] = (),
    ) -> None:
        self._storage = storage
        self._builder = builder
        self._call = call
        self.connection = connection
        """The caller's connection; the tasks are part of its transaction."""
        self._wrappers = wrappers

    @property
    def may_run_in_caller(self) -> bool:
        """Whether the thread of a blocking caller may run an enqueue without an event loop, now."""
        return self.connection is None and self._storage.is_idle

    @overload
    async def enqueue(
        self,
        func: Callable[Concatenate[TaskContext, P], Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> AsyncTaskHandle[R]: ...

    @overload
    async def enqueue(
        self,
        func: Callable[Concatenate[TaskContext, P], R],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> AsyncTaskHandle[R]: ...

    @overload
    async def enqueue(
        self, func: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncTaskHandle[R]: ...

    @overload
    async def enqueue(
        self, func: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncTaskHandle[R]: ...

    @overload
    async def enqueue(self, func: str, /, *args: Any, **kwargs: Any) -> AsyncTaskHandle[Any]: ...

    async def enqueue(self, func: Function, /, *args: Any, **kwargs: Any) -> AsyncTaskHandle[Any]:
        """Store a call of the function. A worker makes it as soon as one is free.

        The task is stored when this returns. Raises `InvalidTask` for a call that cannot be stored.
        """
        task = self._builder.build(func, args, kwargs, self._call)
        (task_id,) = await self._store([task])
        return AsyncTaskHandle(self._storage, task_id, self._builder.types_of(func))

    @overload
    async def enqueue_many(
        self,
        calls: Callable[[TaskContext, Unpack[Ts]], Coroutine[Any, Any, R]],
        args: Iterable[tuple[*Ts]],
    ) -> list[AsyncTaskHandle[R]]: ...

    @overload
    async def enqueue_many(
        self, calls: Callable[[TaskContext, A], Coroutine[Any, Any, R]], args: Iterable[A]
    ) -> list[AsyncTaskHandle[R]]: ...

    @overload
    async def enqueue_many(
        self,
        calls: Callable[[Unpack[Ts]], Coroutine[Any, Any, R]],
        args: Iterable[tuple[*Ts]],
    ) -> list[AsyncTaskHandle[R]]: ...

    @overload
    async def enqueue_many(
        self, calls: Callable[[A], Coroutine[Any, Any, R]], args: Iterable[A]
    ) -> list[AsyncTaskHandle[R]]: ...

    @overload
    async def enqueue_many(
        self,
        calls: Callable[[TaskContext, Unpack[Ts]], R],
        args: Iterable[tuple[*Ts]],
    ) -> list[AsyncTaskHandle[R]]: ...

    @overload
    async def enqueue_many(
        self, calls: Callable[[TaskContext, A], R], args: Iterable[A]
    ) -> list[AsyncTaskHandle[R]]: ...

    @overload
    async def enqueue_many(
        self,
        calls: Callable[[Unpack[Ts]], R],
        args: Iterable[tuple[*Ts]],
    ) -> list[AsyncTaskHandle[R]]: ...

    @overload
    async def enqueue_many(
        self, calls: Callable[[A], R], args: Iterable[A]
    ) -> list[AsyncTaskHandle[R]]: ...

    @overload
    async def enqueue_many(self, calls: str, args: Iterable[Any]) -> list[AsyncTaskHandle[Any]]: ...

    @overload
    async def enqueue_many(self, calls: Iterable[Call]) -> list[AsyncTaskHandle[Any]]: ...

    async def enqueue_many(
        self, calls: Iterable[Call] | Function, args: Iterable[Any] | None = None
    ) -> list[AsyncTaskHandle[Any]]:
        """Store many calls with few round trips and one durability barrier: all or none.

        `enqueue_many([(func, args, kwargs), …])`, or `enqueue_many(func, args)` with the arguments
        of each call: a tuple, or a single argument that is not a tuple. Type checkers know the
        arguments and the results of the second form.
        """
        storage, builder, now = self._storage, self._builder, self._storage.clock.now()
        each_call = calls_of(calls, args)
        tasks = (builder.build(*each, self._call, now) for each in each_call)
        return [
            AsyncTaskHandle(storage, task_id, builder.types_of(func))
            for task_id, (func, _, _) in zip(await self._store(tasks), each_call, strict=True)
        ]

    async def start(
        self, flow: Flow, *, unique: str | None = None, flow_id: str | None = None
    ) -> AsyncFlowHandle[Any]:
        """Store all nodes of the flow: all or none. Workers run them as what they wait for ends.

        While a flow with the same `unique` key has not ended, its handle is returned, and nothing is stored.
        Raises `InvalidTask` for a flow that cannot be stored.
        """
        from omniq.operations.start_flow import start_flow

        root_id = await start_flow(
            self._storage,
            self._builder,
            self._store,
            flow,
            unique=unique,
            flow_id=flow_id,
            in_transaction=self.connection is not None,
        )
        return AsyncFlowHandle(self._storage, root_id)

    async def _store(self, tasks: Iterable[Task]) -> list[str]:
        if not self._wrappers:
            return await self._write(tasks)
        with ExitStack() as stack:
            wrapped = list(tasks)
            for wrapper in self._wrappers:
                wrapped = stack.enter_context(wrapper(wrapped))
            return await self._write(wrapped)
        raise AssertionError("a wrapper of an enqueue has hidden an exception")

    def _write(self, tasks: Iterable[Task]) -> Coroutine[Any, Any, list[str]]:
        if self.connection is None:
            return self._storage.enqueue_many(tasks)
        return self._storage.enqueue_within(self.connection, tasks)


class AsyncTaskQueue(AsyncEnqueuer):
    """A queue of function calls. Use it as `async with AsyncTaskQueue(url) as queue`.

    Several coroutines may enter one queue at the same time: the first opens it, and the last closes it. A queue
    that was opened by `open` stays open until `close`.
    """

    def __init__(
        self,
        url: str | BaseStorage | None = None,
        *,
        settings: Settings | None = None,
        serializer: Serializer | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        storage = (
            url
            if isinstance(url, BaseStorage)
            else open_storage(url, settings=settings, serializer=serializer, clock=clock)
        )
        # One list, which the queue, its options and its workers share.
        self._all_wrappers: list[EnqueueWrapper] = []
        super().__init__(storage, builder_for(storage), NO_OPTIONS, wrappers=self._all_wrappers)
        self._pid = os.getpid()
        self._entered = 0
        # Whether the last one to leave closes the storage: a block has opened it.
        self._closes = False
        self._lock: asyncio.Lock | None = None
        self._lock_loop: asyncio.AbstractEventLoop | None = None
        self.dead = AsyncDeadLetters(storage)
        self.bulk = AsyncBulk(storage)
        self.schedules = AsyncSchedules(storage, self._builder)
        self.queues = AsyncQueues(storage)
        self.functions = AsyncFunctions(storage)
        self.workers = AsyncWorkers(storage)
        self.breakers = AsyncBreakers(storage)
        self.limits = AsyncLimits(storage)

    @property
    def storage(self) -> BaseStorage:
        """The storage that holds the tasks."""
        return self._storage

    async def open(self) -> None:
        """Open the storage. Entering the queue as a context manager calls this."""
        if is_importing():
            self.wrap_enqueue(refuse_enqueue)
        await self._storage.open()

    async def close(self) -> None:
        """Close the storage. May be called twice. Tasks that a memory storage loses are logged."""
        if self._storage.is_open and log.is_enabled():
            left = await tasks_left(self._storage)
            if left is not None:
                log.write(left)
        await self._storage.close()

    @property
    def is_entered(self) -> bool:
        """Whether a block of `async with` uses the queue, in this process."""
        return self._entered > 0 and self._pid == os.getpid()

    @property
    def _entering(self) -> asyncio.Lock:
        """One coroutine opens or closes at a time. A lock belongs to an event loop, a queue does not."""
        loop = asyncio.get_running_loop()
        if self._lock is None or self._lock_loop is not loop:
            self._lock, self._lock_loop = asyncio.Lock(), loop
        return self._lock

    async def __aenter__(self) -> Self:
        async with self._entering:
            is_forked = self._pid != os.getpid()
            if is_forked:
                # What is open, and who has entered it, is the parent's.
                self._pid, self._entered, self._closes = os.getpid(), 0, False
            if is_forked or not self._storage.is_open:
                await self.open()
                self._closes = True
            self._entered += 1
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Before it waits: a wait may be cancelled.
        self._entered -= 1
        async with self._entering:
            if self._closes and not self.is_entered:
                self._closes = False
                await self.close()

    def options(self, **options: Unpack[EnqueueOptions]) -> AsyncEnqueuer:
        """Return this queue with options for the calls that follow. They are checked immediately."""
        connection = options.pop("connection", None)
        call = call_options(**options)
        return AsyncEnqueuer(self._storage, self._builder, call, connection, self._wrappers)

    def wrap_enqueue(self, wrapper: EnqueueWrapper) -> None:
        """Enter this context manager around every later enqueue, also by `options(…)` and `ctx.enqueue`.

        Several are entered in the order in which they were added, each with the tasks of the one before.
        """
        self._all_wrappers.append(wrapper)

    def surround(self, around: EnqueueWrapper) -> None:
        """Deprecated: use `wrap_enqueue`."""
        warn_renamed("surround()", "wrap_enqueue()")
        self.wrap_enqueue(around)

    async def get_task(self, task_id: str) -> Task | None:
        """Return the task as it is now; None when the storage has no record of it."""
        return await self._storage.get_task(task_id)

    async def get_result(self, task_id: str, timeout: Duration | None = None) -> TaskResult | None:
        """Return the current result. With `timeout`, wait that long for the final one, else None."""
        seconds = seconds_of("timeout", timeout)
        if seconds is None:
            return await self._storage.get_result(task_id)
        return await self._storage.wait_for_result(task_id, seconds)

    async def cancel(self, task_id: str) -> bool:
        """Cancel a waiting task, or ask a running one to stop; False when it has ended."""
        return await self._storage.cancel(task_id)

    async def send_event(self, event: str, value: Any = None, *, to: Any = None) -> bool:
        """Give a task or a flow the event that it waits for, or will; `to` is its handle or its id.

        Without `to`, the event is for all that wait for it by its name, and is kept for its `result_ttl`. The
        first value counts: False when there is one already, or the task has ended. Raises `TaskNotFound`.
        """
        from omniq.operations.start_flow import send_event

        return await send_event(self._storage, event, value, to)

    def flow(self, flow_id: str) -> AsyncFlowHandle[Any]:
        """Return a handle for a flow that was started earlier or by another process."""
        return AsyncFlowHandle(self._storage, flow_id)

    async def change(
        self,
        task_id: str,
        *,
        priority: int | None = None,
        queue: str | None = None,
        eta: datetime | None = None,
        delay: Duration | None = None,
    ) -> Task:
        """Give a waiting task another priority, queue or eta; return the task as it is now.

        `delay` is an eta that many seconds from now. Raises `TaskNotWaiting` for a task that a
        worker has or that has ended, and `TaskNotFound` for one without a record.
        """
        return await change_task(
            self._storage, task_id, priority=priority, queue=queue, eta=eta, delay=delay
        )

    async def run_now(self, task_id: str) -> Task:
        """Make a waiting task due now, also one that waits for its retry; return it.

        A paused queue and limits still hold it. Raises `TaskNotWaiting` as `change` does.
        """
        return await run_task_now(self._storage, task_id)

    async def list_tasks(
        self,
        *,
        status: TaskStatus | None = None,
        queue: str | None = None,
        func_path: str | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> list[Task]:
        """Return tasks in id order; `after` is the last id of the previous page."""
        return await self._storage.list_tasks(
            status=status, queue=queue, func_path=func_path, limit=limit, after=after
        )

    async def stats(self) -> QueueStats:
        """Count the tasks by status and by queue, and the dead letters."""
        return await self._storage.stats()

    async def history(self, task_id: str) -> list[Attempt]:
        """Return the task's runs that did not succeed, oldest first, each with its error."""
        return await self._storage.history(task_id)

    async def health(
        self,
        *,
        stalled_after: Duration | None = None,
        stuck_grace: Duration | None = None,
        endless_after: Duration | None = None,
    ) -> Health:
        """Report what is wrong now: stalled workers, stuck tasks, open breakers, paused queues.

        A worker is stalled if its last heartbeat is older than `stalled_after`. A task is stuck if its
        run exceeds its timeout by `stuck_grace` or, without a timeout, lasts for `endless_after`. What
        is not given comes from the settings of the same names.
        """
        limits = HealthLimits.of(
            self._storage.settings,
            stalled_after=stalled_after,
            stuck_grace=stuck_grace,
            endless_after=endless_after,
        )
        return await health_of(self._storage, limits)

    async def check(
        self, modules: Sequence[str] | None = None, *, dead: bool = True
    ) -> CheckReport:
        """Report which stored tasks, schedules and dead letters a worker with these modules cannot run.

        It imports the modules as `omniq worker` does, and reads everything that has not ended; it runs no
        task and changes nothing. Without modules it checks the functions that this program has imported,
        and without `dead` it leaves dead letters out. `omniq check` does the same before a deploy.
        """
        from omniq.queue.deploy_check import check_deploy

        return await check_deploy(self._storage, self.schedules, modules, dead=dead)

    async def purge_results(self, older_than: Duration | datetime) -> int:
        """Delete tasks that finished before an instant, or longer ago than that; return how many."""
        return await self._storage.purge_results(
            instant_before("older_than", older_than, self._storage.clock.now())
        )

    async def cleanup_orphaned_state(
        self, older_than: Duration | datetime = timedelta(days=1)
    ) -> int:
        """Delete old state whose task is gone: checkpoints saved before an instant, or longer ago.

        Those of tasks that have not ended, and of dead letters, stay. Returns how many were deleted, and
        logs it. Every worker does this too, for checkpoints older than a day.
        """
        storage = self._storage
        instant = instant_before("older_than", older_than, storage.clock.now(), error=InvalidValue)
        count = await storage.purge_checkpoints(instant)
        if log.is_enabled():
            log.write(OrphanedStateDeleted(count=count, older_than=instant))
        return count

    def worker(self, **options: Unpack[PoolOptions]) -> AsyncWorkerPool:
        """Return a pool on this queue that is not started: use it as `async with queue.worker(…)`.

        Options that are not given come from the settings.
        """
        refuse_unknown_options("queue.worker(…)", options)
        settings = self._storage.settings
        merged: PoolOptions = {
            "concurrency": settings.concurrency,
            "poll_interval": settings.poll_interval,
            "base_retry_delay": settings.base_retry_delay,
            **options,
        }
        pool = AsyncWorkerPool(self._storage, **merged)
        pool.enqueue_wrappers = self._wrappers
        return pool

    @overload
    def handle(self, task_id: str) -> AsyncTaskHandle[Any]: ...

    @overload
    def handle(
        self, task_id: str, func: Callable[..., Coroutine[Any, Any, R]]
    ) -> AsyncTaskHandle[R]: ...

    @overload
    def handle(self, task_id: str, func: Callable[..., R]) -> AsyncTaskHandle[R]: ...

    def handle(self, task_id: str, func: Callable[..., Any] | None = None) -> AsyncTaskHandle[Any]:
        """Return a handle for a task that was enqueued earlier or by another process.

        With the function of the task, the result has the type that the function declares.
        """
        types = None if func is None else self._builder.types_of(func)
        return AsyncTaskHandle(self._storage, task_id, types)
