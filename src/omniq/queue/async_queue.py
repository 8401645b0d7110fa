"""The queue for async code: enqueue, ask, put right. `blocking` is the same for other code."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from types import TracebackType
from typing import (
    Any,
    Concatenate,
    ParamSpec,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from omniq import log
from omniq.clock import SYSTEM_CLOCK, Clock
from omniq.durations import Duration, instant_before, seconds_of
from omniq.errors import InvalidTask
from omniq.models import (
    Attempt,
    BreakerRule,
    QueueStats,
    Task,
    TaskResult,
    TaskStatus,
    WorkerInfo,
)
from omniq.queue.dead_letters import AsyncDeadLetters
from omniq.retry import Backoff
from omniq.scheduling.schedules import AsyncSchedules
from omniq.serialization import Serializer
from omniq.settings import Settings
from omniq.storage import BaseStorage, open_storage
from omniq.storage.health import BreakerInfo, Health, breakers_of, health_of, live_workers
from omniq.tasks.context import TaskContext
from omniq.tasks.handle import AsyncTaskHandle
from omniq.tasks.task_builder import NO_OPTIONS, CallOptions, TaskBuilder, call_options
from omniq.worker.maintenance import left_behind
from omniq.worker.pool import AsyncWorkerPool, PoolOptions

P = ParamSpec("P")
R = TypeVar("R")

Function = Callable[..., Any] | str
Call = Sequence[Any]
"""(func, args, kwargs); the last one, or the last two, may be left out."""

Around = Callable[[list[Task]], AbstractContextManager[list[Task]]]
"""Surrounds the keeping of tasks, such as a span does, and may put others in their place."""


class EnqueueOptions(TypedDict, total=False):
    """What `options(…)` takes. Durations are seconds or `timedelta`.

    `connection`: the caller's own, to the database of the tasks. Enqueueing is then a part of the
    transaction they have open on it: the task is there when they commit, and never was when they
    roll back. Until then a handle finds no task.
    """

    connection: object

    eta: datetime | None
    delay: Duration | None
    interval: Duration | None
    cron: str | None
    tz: str | None
    priority: int | None
    queue: str | None
    max_retries: int | None
    retry: Backoff | None
    timeout: Duration | None
    task_id: str | None
    unique: str | Callable[..., str] | bool | None
    expires: Duration | datetime | None
    result_ttl: Duration | None
    metadata: dict[str, Any] | None
    breaker: str | BreakerRule | Iterable[str | BreakerRule] | None
    rate: str | tuple[int, Duration] | None
    max_running: int | None
    limit_key: str | Callable[..., str] | None


class AsyncEnqueuer:
    """Enqueues with the options it was made with. What `options(…)` gives, and what a queue is."""

    def __init__(
        self,
        storage: BaseStorage,
        builder: TaskBuilder,
        call: CallOptions,
        connection: object = None,
        around: Around | None = None,
    ) -> None:
        self._storage = storage
        self._builder = builder
        self._call = call
        self.connection = connection
        """The caller's own, whose transaction the tasks are a part of."""
        self._around = around

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
        """Keep a call of the function, to be made by a worker as soon as one is free.

        When this returns, the task is safe. Raises `InvalidTask` for what cannot be kept.
        """
        task = self._builder.build(func, args, kwargs, self._call)
        (task_id,) = await self._keep([task])
        return AsyncTaskHandle(self._storage, task_id)

    async def enqueue_many(
        self, calls: Iterable[Call] | Function, args: Iterable[Any] | None = None
    ) -> list[AsyncTaskHandle[Any]]:
        """Keep many calls with few round trips and one durability barrier; all or none.

        `enqueue_many([(func, args, kwargs), …])`, or `enqueue_many(func, args)` with the arguments
        of each call: a tuple, or a single argument that is not a tuple.
        """
        build, now = self._builder.build, self._storage.clock.now()
        tasks = (build(*each, self._call, now) for each in _calls(calls, args))
        return [AsyncTaskHandle(self._storage, task_id) for task_id in await self._keep(tasks)]

    async def _keep(self, tasks: Iterable[Task]) -> list[str]:
        if self._around is None:
            return await self._write(tasks)
        with self._around(list(tasks)) as surrounded:
            return await self._write(surrounded)

    def _write(self, tasks: Iterable[Task]) -> Coroutine[Any, Any, list[str]]:
        if self.connection is None:
            return self._storage.enqueue_many(tasks)
        return self._storage.enqueue_within(self.connection, tasks)


class AsyncTaskQueue(AsyncEnqueuer):
    """A queue of function calls. Use it as `async with AsyncTaskQueue(url) as queue`."""

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
        super().__init__(storage, TaskBuilder(storage.settings, storage.clock), NO_OPTIONS)
        self.dead = AsyncDeadLetters(storage)
        self.schedules = AsyncSchedules(storage, self._builder)

    @property
    def storage(self) -> BaseStorage:
        """Where the tasks live."""
        return self._storage

    async def open(self) -> None:
        """Open the storage. `async with` does it."""
        await self._storage.open()

    async def close(self) -> None:
        """Close the storage. May be called twice. What a storage in memory loses is logged."""
        if self._storage.is_open and log.is_enabled():
            left = await left_behind(self._storage)
            if left is not None:
                log.write(left)
        await self._storage.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def options(self, **options: Unpack[EnqueueOptions]) -> AsyncEnqueuer:
        """The same queue with options for the calls that follow. Checked at once."""
        connection = options.pop("connection", None)
        call = call_options(**options)
        return AsyncEnqueuer(self._storage, self._builder, call, connection, self._around)

    def surround(self, around: Around) -> None:
        """Have this surround the keeping of tasks from now on, also by `options(…)` asked for later."""
        self._around = around

    async def get_task(self, task_id: str) -> Task | None:
        """The task as it is now; None when no record of it is kept."""
        return await self._storage.get_task(task_id)

    async def get_result(self, task_id: str, timeout: Duration | None = None) -> TaskResult | None:
        """The result there is now; with `timeout`, the final one as soon as it is there, or None."""
        seconds = seconds_of("timeout", timeout)
        if seconds is None:
            return await self._storage.get_result(task_id)
        return await self._storage.wait_for_result(task_id, seconds)

    async def cancel(self, task_id: str) -> bool:
        """A waiting task never runs, a running one is told to stop; False when it has ended."""
        return await self._storage.cancel(task_id)

    async def list_tasks(
        self,
        *,
        status: TaskStatus | None = None,
        queue: str | None = None,
        func_path: str | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> list[Task]:
        """Tasks in id order; `after` is the last id of the page before."""
        return await self._storage.list_tasks(
            status=status, queue=queue, func_path=func_path, limit=limit, after=after
        )

    async def stats(self) -> QueueStats:
        """How much of what there is."""
        return await self._storage.stats()

    async def history(self, task_id: str) -> list[Attempt]:
        """The task's runs that did not succeed, oldest first, each with its error."""
        return await self._storage.history(task_id)

    async def workers(self) -> list[WorkerInfo]:
        """Workers that are alive, with what they run; `stalled` are those that do not get on."""
        return await live_workers(self._storage)

    async def breakers(self) -> list[BreakerInfo]:
        """The circuit breakers that tasks have named, by name, each with its state and why."""
        return await breakers_of(self._storage)

    async def health(self) -> Health:
        """What is wrong right now: stalled workers, stuck tasks, open breakers, paused queues."""
        return await health_of(self._storage)

    async def purge_results(self, older_than: Duration | datetime) -> int:
        """Forget tasks that finished before that instant, or longer ago than that; how many."""
        return await self._storage.purge_results(
            instant_before("older_than", older_than, self._storage.clock.now())
        )

    def worker(self, **options: Unpack[PoolOptions]) -> AsyncWorkerPool:
        """A pool on this queue, not started yet: use it as `async with queue.worker(…)`.

        What is not said is as in the settings.
        """
        settings = self._storage.settings
        said: PoolOptions = {
            "concurrency": settings.concurrency,
            "poll_interval": settings.poll_interval,
            "base_retry_delay": settings.base_retry_delay,
            **options,
        }
        return AsyncWorkerPool(self._storage, **said)

    def handle(self, task_id: str) -> AsyncTaskHandle[Any]:
        """A handle for a task enqueued earlier or elsewhere."""
        return AsyncTaskHandle(self._storage, task_id)


def _calls(
    calls: Iterable[Call] | Function, args: Iterable[Any] | None
) -> list[tuple[Function, tuple[Any, ...], dict[str, Any]]]:
    """Both ways of naming many calls, as one list."""
    if isinstance(calls, str) or callable(calls):
        if args is None:
            raise InvalidTask("enqueue_many(func, args): say with which arguments, one item a call")
        return [(calls, item if isinstance(item, tuple) else (item,), {}) for item in args]
    if args is not None:
        raise InvalidTask("enqueue_many: give a function and its arguments, or a list of calls")
    return [_as_call(call) for call in calls]


def _as_call(call: Any) -> tuple[Function, tuple[Any, ...], dict[str, Any]]:
    match call:
        case (func,):
            return func, (), {}
        case (func, tuple() | list() as args):
            return func, tuple(args), {}
        case (func, tuple() | list() as args, dict() as kwargs):
            return func, tuple(args), kwargs
        case _:
            raise InvalidTask(
                "enqueue_many: expected (func, args, kwargs) for each call, args a tuple and "
                "kwargs a dictionary"
            )
