"""The queue for blocking code: the same names as `queue`, through one portal to the event loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack, overload

from omniq._portal import Portal, run_here
from omniq.clock import SYSTEM_CLOCK, Clock
from omniq.durations import Duration
from omniq.models import (
    Attempt,
    DeadLetter,
    QueueStats,
    Task,
    TaskResult,
    TaskStatus,
    WorkerInfo,
)
from omniq.queue.async_queue import (
    Around,
    AsyncEnqueuer,
    AsyncTaskQueue,
    Call,
    EnqueueOptions,
    Function,
)
from omniq.queue.dead_letters import AsyncDeadLetters, JsonRecord
from omniq.scheduling.schedules import Schedules
from omniq.serialization import Serializer
from omniq.settings import Settings
from omniq.storage import BaseStorage
from omniq.storage.health import BreakerInfo, Health
from omniq.tasks.context import TaskContext
from omniq.tasks.handle import TaskHandle
from omniq.worker.pool import PoolOptions, WorkerPool

P = ParamSpec("P")
R = TypeVar("R")


class DeadLetters:
    """The tasks that failed for good. The blocking face of `AsyncDeadLetters`."""

    def __init__(self, portal: Portal, dead: AsyncDeadLetters) -> None:
        self._portal = portal
        self._dead = dead

    def list(
        self,
        limit: int = 100,
        *,
        task_type: str | None = None,
        reason: str | None = None,
        since: Duration | datetime | None = None,
        until: Duration | datetime | None = None,
        after: str | None = None,
    ) -> list[DeadLetter]:
        """Dead letters in id order, `after` the last id of the page before."""
        return self._portal.run(
            self._dead.list(
                limit, task_type=task_type, reason=reason, since=since, until=until, after=after
            )
        )

    def get(self, task_id: str) -> DeadLetter | None:
        """One of them, with its checkpoint."""
        return self._portal.run(self._dead.get(task_id))

    def get_task(self, task_id: str) -> Task | None:
        """The task as it would be retried, with its arguments; also when its result has gone."""
        return self._portal.run(self._dead.get_task(task_id))

    def attempts(self, task_id: str) -> Sequence[Attempt]:
        """Every failed run of it with its error and traceback: the first, and the newest ones."""
        return self._portal.run(self._dead.attempts(task_id))

    def retry(
        self,
        task_id: str,
        *,
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        from_start: bool = False,
    ) -> bool:
        """Run the task again under its id, with other arguments if given; False if it is not dead."""
        return self._portal.run(
            self._dead.retry(task_id, args=args, kwargs=kwargs, from_start=from_start)
        )

    def retry_all(
        self,
        *,
        task_type: str | None = None,
        reason: str | None = None,
        since: Duration | datetime | None = None,
        until: Duration | datetime | None = None,
        from_start: bool = False,
    ) -> int:
        """Run all of them again, or those that the filters name; how many."""
        return self._portal.run(
            self._dead.retry_all(
                task_type=task_type,
                reason=reason,
                since=since,
                until=until,
                from_start=from_start,
            )
        )

    def delete(self, task_id: str) -> bool:
        """Forget one for good; False if there is none."""
        return self._portal.run(self._dead.delete(task_id))

    def purge(self, older_than: Duration | datetime) -> int:
        """Forget those that failed before that instant, or longer ago than that; how many."""
        return self._portal.run(self._dead.purge(older_than))

    def export(
        self,
        *,
        task_type: str | None = None,
        reason: str | None = None,
        since: Duration | datetime | None = None,
        until: Duration | datetime | None = None,
    ) -> Iterator[JsonRecord]:
        """All that is known of each, for JSON lines: the letter, the call, every attempt."""
        records = self._dead.export(task_type=task_type, reason=reason, since=since, until=until)
        while (record := self._portal.run(anext(records, None))) is not None:
            yield record


class Enqueuer:
    """Enqueues with the options it was made with. What `options(…)` gives, and what a queue is."""

    def __init__(self, portal: Portal, enqueuer: AsyncEnqueuer) -> None:
        self._portal = portal
        self._enqueuer = enqueuer

    @overload
    def enqueue(
        self,
        func: Callable[Concatenate[TaskContext, P], Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> TaskHandle[R]: ...

    @overload
    def enqueue(
        self,
        func: Callable[Concatenate[TaskContext, P], R],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> TaskHandle[R]: ...

    @overload
    def enqueue(
        self, func: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> TaskHandle[R]: ...

    @overload
    def enqueue(
        self, func: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> TaskHandle[R]: ...

    @overload
    def enqueue(self, func: str, /, *args: Any, **kwargs: Any) -> TaskHandle[Any]: ...

    def enqueue(self, func: Any, /, *args: Any, **kwargs: Any) -> TaskHandle[Any]:
        """Keep a call of the function, to be made by a worker as soon as one is free.

        When this returns, the task is safe. Raises `InvalidTask` for what cannot be kept.
        """
        return TaskHandle(self._portal, self._run(self._enqueuer.enqueue(func, *args, **kwargs)))

    def enqueue_many(
        self, calls: Iterable[Call] | Function, args: Iterable[Any] | None = None
    ) -> list[TaskHandle[Any]]:
        """Keep many calls with few round trips and one durability barrier; all or none.

        `enqueue_many([(func, args, kwargs), …])`, or `enqueue_many(func, args)` with the arguments
        of each call: a tuple, or a single argument that is not a tuple.
        """
        handles = self._run(self._enqueuer.enqueue_many(calls, args))
        return [TaskHandle(self._portal, handle) for handle in handles]

    def _run(self, work: Coroutine[Any, Any, R]) -> R:
        connection = self._enqueuer.connection
        if connection is None:
            return self._portal.run(work)
        # A caller's connection belongs to their thread, and so does what is done with it.
        return run_here(work, connection)


class TaskQueue(Enqueuer):
    """A queue of function calls for blocking code. Use it as `with TaskQueue(url) as queue`.

    It may be used from any thread, and inside a running event loop, which it blocks meanwhile. A
    process that was forked opens a queue of its own.
    """

    def __init__(
        self,
        url: str | BaseStorage | None = None,
        *,
        settings: Settings | None = None,
        serializer: Serializer | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._queue = AsyncTaskQueue(url, settings=settings, serializer=serializer, clock=clock)
        super().__init__(Portal(), self._queue)
        self.dead = DeadLetters(self._portal, self._queue.dead)
        self.schedules = Schedules(self._portal, self._queue.schedules)

    @property
    def storage(self) -> BaseStorage:
        """Where the tasks live."""
        return self._queue.storage

    def open(self) -> None:
        """Open the storage. `with` does it."""
        self._portal.run(self._queue.open())

    def close(self) -> None:
        """Close the storage. May be called twice."""
        try:
            if self._portal.usable:
                self._portal.run(self._queue.close())
        finally:
            self._portal.close()

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self._portal.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def options(self, **options: Unpack[EnqueueOptions]) -> Enqueuer:
        """The same queue with options for the calls that follow. Checked at once."""
        return Enqueuer(self._portal, self._queue.options(**options))

    def surround(self, around: Around) -> None:
        """Have this surround the keeping of tasks from now on, also by `options(…)` asked for later."""
        self._queue.surround(around)

    def get_task(self, task_id: str) -> Task | None:
        """The task as it is now; None when no record of it is kept."""
        return self._portal.run(self._queue.get_task(task_id))

    def get_result(self, task_id: str, timeout: Duration | None = None) -> TaskResult | None:
        """The result there is now; with `timeout`, the final one as soon as it is there, or None."""
        return self._portal.run(self._queue.get_result(task_id, timeout))

    def cancel(self, task_id: str) -> bool:
        """A waiting task never runs, a running one is told to stop; False when it has ended."""
        return self._portal.run(self._queue.cancel(task_id))

    def list_tasks(
        self,
        *,
        status: TaskStatus | None = None,
        queue: str | None = None,
        func_path: str | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> list[Task]:
        """Tasks in id order; `after` is the last id of the page before."""
        return self._portal.run(
            self._queue.list_tasks(
                status=status, queue=queue, func_path=func_path, limit=limit, after=after
            )
        )

    def stats(self) -> QueueStats:
        """How much of what there is."""
        return self._portal.run(self._queue.stats())

    def history(self, task_id: str) -> list[Attempt]:
        """The task's runs that did not succeed, oldest first, each with its error."""
        return self._portal.run(self._queue.history(task_id))

    def breakers(self) -> list[BreakerInfo]:
        """The circuit breakers that tasks have named, by name, each with its state and why."""
        return self._portal.run(self._queue.breakers())

    def health(self) -> Health:
        """What is wrong right now: stalled workers, stuck tasks, open breakers, paused queues."""
        return self._portal.run(self._queue.health())

    def workers(self) -> list[WorkerInfo]:
        """Workers that are alive, with what they run; `stalled` are those that do not get on."""
        return self._portal.run(self._queue.workers())

    def purge_results(self, older_than: Duration | datetime) -> int:
        """Forget tasks that finished before that instant, or longer ago than that; how many."""
        return self._portal.run(self._queue.purge_results(older_than))

    def worker(self, **options: Unpack[PoolOptions]) -> WorkerPool:
        """A pool on this queue, not started yet: use it as `with queue.worker(…)`."""
        return WorkerPool.on(self._portal, self._queue.worker(**options))

    def handle(self, task_id: str) -> TaskHandle[Any]:
        """A handle for a task enqueued earlier or elsewhere."""
        return TaskHandle(self._portal, self._queue.handle(task_id))
