"""The queue for blocking code: the methods of the async queue, run through one portal.

An enqueue on SQLite and files runs in the thread of its caller instead, while the storage is idle.

A method that only waits for its async form is made by `blocking`. Those that return a handle or
another object are written out, and so are those with an argument that is deprecated: the warning
must name the line of the caller.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, TypeVarTuple, Unpack, overload

from omniq._deprecation import warn_renamed
from omniq.clock import SYSTEM_CLOCK, Clock
from omniq.concurrency.blocking import BlockingFace, blocking
from omniq.concurrency.portal import Portal, run_here
from omniq.errors import InvalidValue
from omniq.models import DeadLetter
from omniq.operations.flow_handle import FlowHandle
from omniq.operations.handle import TaskHandle
from omniq.queue.async_queue import AsyncEnqueuer, AsyncTaskQueue, Call, EnqueueOptions
from omniq.queue.blocking_operators import Breakers, Functions, Limits, Queues, Workers
from omniq.queue.bulk import Bulk
from omniq.queue.dead_letters import AsyncDeadLetters, JsonRecord
from omniq.scheduling.schedules import Schedules
from omniq.serialization import Serializer
from omniq.settings import Settings
from omniq.storage import BaseStorage
from omniq.tasks.context import TaskContext
from omniq.tasks.durations import Duration, seconds_of
from omniq.tasks.flow import Flow
from omniq.worker.pool import PoolOptions, WorkerPool
from omniq.worker.task_services import EnqueueWrapper

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
Ts = TypeVarTuple("Ts")


class DeadLetters(BlockingFace[AsyncDeadLetters]):
    """The tasks that failed for good. The blocking form of `AsyncDeadLetters`."""

    get = blocking(AsyncDeadLetters.get)
    get_task = blocking(AsyncDeadLetters.get_task)
    attempts = blocking(AsyncDeadLetters.attempts)
    retry = blocking(AsyncDeadLetters.retry)
    delete = blocking(AsyncDeadLetters.delete)
    purge = blocking(AsyncDeadLetters.purge)

    def retry_all(
        self,
        *,
        func_path: str | None = None,
        reason: str | None = None,
        since: Duration | datetime | None = None,
        until: Duration | datetime | None = None,
        from_start: bool = False,
        task_type: str | None = None,
    ) -> int:
        """Retry all dead letters, or those that match the filters; return how many.

        A dead letter whose unique key another task holds stays. A full queue raises `QueueFull`:
        the tasks that were retried before that are in the queue, the others stay dead.
        """
        return self._run(
            self._async_face.retry_all(
                func_path=func_path,
                reason=reason,
                since=since,
                until=until,
                from_start=from_start,
                task_type=task_type,
            )
        )

    def export(
        self,
        *,
        func_path: str | None = None,
        reason: str | None = None,
        since: Duration | datetime | None = None,
        until: Duration | datetime | None = None,
        task_type: str | None = None,
    ) -> Iterator[JsonRecord]:
        """Yield one JSON record for each dead letter: the letter, the call and every attempt.

        Values that JSON has no type for become text; bytes and the checkpoint become base64.
        """
        records = self._async_face.export(
            func_path=func_path, reason=reason, since=since, until=until, task_type=task_type
        )
        while (record := self._run(anext(records, None))) is not None:
            yield record

    def list(
        self,
        limit: int = 100,
        *,
        func_path: str | None = None,
        reason: str | None = None,
        since: Duration | datetime | None = None,
        until: Duration | datetime | None = None,
        after: str | None = None,
        task_type: str | None = None,
    ) -> list[DeadLetter]:
        """Return dead letters in id order; `after` is the last id of the previous page."""
        return self._run(
            self._async_face.list(
                limit,
                func_path=func_path,
                reason=reason,
                since=since,
                until=until,
                after=after,
                task_type=task_type,
            )
        )


class Enqueuer(BlockingFace[AsyncEnqueuer]):
    """Enqueues tasks with fixed options. `options(…)` returns one, and a queue is one."""

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
        """Store a call of the function. A worker makes it as soon as one is free.

        The task is stored when this returns. Raises `InvalidTask` for a call that cannot be stored.
        """
        handle = self._run_enqueue(lambda: self._async_face.enqueue(func, *args, **kwargs))
        return TaskHandle(self._portal, handle)

    def start(
        self, flow: Flow, *, unique: str | None = None, flow_id: str | None = None
    ) -> FlowHandle[Any]:
        """Store all nodes of the flow: all or none. Workers run them as what they wait for ends.

        While a flow with the same `unique` key has not ended, its handle is returned, and nothing is stored.
        Raises `InvalidTask` for a flow that cannot be stored.
        """
        handle = self._run(self._async_face.start(flow, unique=unique, flow_id=flow_id))
        return FlowHandle(self._portal, handle)

    @overload
    def enqueue_many(
        self,
        calls: Callable[[TaskContext, Unpack[Ts]], Coroutine[Any, Any, R]],
        args: Iterable[tuple[*Ts]],
    ) -> list[TaskHandle[R]]: ...

    @overload
    def enqueue_many(
        self, calls: Callable[[TaskContext, A], Coroutine[Any, Any, R]], args: Iterable[A]
    ) -> list[TaskHandle[R]]: ...

    @overload
    def enqueue_many(
        self,
        calls: Callable[[Unpack[Ts]], Coroutine[Any, Any, R]],
        args: Iterable[tuple[*Ts]],
    ) -> list[TaskHandle[R]]: ...

    @overload
    def enqueue_many(
        self, calls: Callable[[A], Coroutine[Any, Any, R]], args: Iterable[A]
    ) -> list[TaskHandle[R]]: ...

    @overload
    def enqueue_many(
        self,
        calls: Callable[[TaskContext, Unpack[Ts]], R],
        args: Iterable[tuple[*Ts]],
    ) -> list[TaskHandle[R]]: ...

    @overload
    def enqueue_many(
        self, calls: Callable[[TaskContext, A], R], args: Iterable[A]
    ) -> list[TaskHandle[R]]: ...

    @overload
    def enqueue_many(
        self,
        calls: Callable[[Unpack[Ts]], R],
        args: Iterable[tuple[*Ts]],
    ) -> list[TaskHandle[R]]: ...

    @overload
    def enqueue_many(self, calls: Callable[[A], R], args: Iterable[A]) -> list[TaskHandle[R]]: ...

    @overload
    def enqueue_many(self, calls: str, args: Iterable[Any]) -> list[TaskHandle[Any]]: ...

    @overload
    def enqueue_many(self, calls: Iterable[Call]) -> list[TaskHandle[Any]]: ...

    def enqueue_many(self, calls: Any, args: Any = None) -> list[TaskHandle[Any]]:
        """Store many calls with few round trips and one durability barrier: all or none.

        `enqueue_many([(func, args, kwargs), …])`, or `enqueue_many(func, args)` with the arguments
        of each call: a tuple, or a single argument that is not a tuple. Type checkers know the
        arguments and the results of the second form.
        """
        handles = self._run_enqueue(lambda: self._async_face.enqueue_many(calls, args))
        return [TaskHandle(self._portal, handle) for handle in handles]

    def _run(self, work: Coroutine[Any, Any, R], wait: float | None = 0.0) -> R:
        connection = self._async_face.connection
        if connection is None:
            return self._portal.run(work, wait)
        # A caller's connection belongs to the caller's thread, and so do all statements on it.
        return run_here(work, connection)

    def _run_enqueue(self, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Run an enqueue in this thread, if the storage can do that and is idle."""
        if self._async_face.may_run_in_caller:
            return self._portal.run_in_caller(work())
        return self._run(work())


class TaskQueue(Enqueuer):
    """A queue of function calls for blocking code. Use it as `with TaskQueue(url) as queue`.

    Any thread may use it, and enter it: the first opens it, and the last closes it. On SQLite and files an enqueue is made in the calling thread, if no other call is
    under way; a call from within it (a wrapper, a function of arguments, a signal handler) raises
    `StorageError`. A call inside a running event loop blocks that loop until it returns. A
    forked process opens a new queue. With the setting `call_timeout`, or in a block of `deadline`, a
    call that takes too long raises `CallTimeout`.
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
        self._entering = threading.RLock()
        storage = self._queue.storage
        portal = Portal(storage.settings.call_timeout, storage.callers_lock)
        super().__init__(portal, self._queue)
        self.dead = DeadLetters(self._portal, self._queue.dead)
        self.bulk = Bulk(self._portal, self._queue.bulk)
        self.schedules = Schedules(self._portal, self._queue.schedules)
        self.queues = Queues(self._portal, self._queue.queues)
        self.functions = Functions(self._portal, self._queue.functions)
        self.workers = Workers(self._portal, self._queue.workers)
        self.breakers = Breakers(self._portal, self._queue.breakers)
        self.limits = Limits(self._portal, self._queue.limits)

    get_task = blocking(AsyncTaskQueue.get_task)
    get_result = blocking(
        AsyncTaskQueue.get_result, lambda task_id, timeout=None: seconds_of("timeout", timeout or 0)
    )
    cancel = blocking(AsyncTaskQueue.cancel)
    send_event = blocking(AsyncTaskQueue.send_event)
    change = blocking(AsyncTaskQueue.change)
    run_now = blocking(AsyncTaskQueue.run_now)
    list_tasks = blocking(AsyncTaskQueue.list_tasks)
    stats = blocking(AsyncTaskQueue.stats)
    history = blocking(AsyncTaskQueue.history)
    health = blocking(AsyncTaskQueue.health)
    check = blocking(AsyncTaskQueue.check)
    purge_results = blocking(AsyncTaskQueue.purge_results)
    cleanup_orphaned_state = blocking(AsyncTaskQueue.cleanup_orphaned_state)
    open = blocking(AsyncTaskQueue.open)

    @property
    def storage(self) -> BaseStorage:
        """The storage that holds the tasks."""
        return self._queue.storage

    def deadline(self, seconds: Duration | None) -> AbstractContextManager[None]:
        """Bound the time that all calls in the block take together; None: as long as they need.

        `with queue.deadline(10): queue.enqueue(…)`. It is for the calls of this thread on this queue and
        what it has: handles, dead letters, schedules and pools. It replaces the setting `call_timeout`,
        which is for each call, and does not count the time for which a call waits on purpose. A call
        that takes longer raises `CallTimeout`, which says what is known of a write. An enqueue with
        `connection` is not bounded: its driver has timeouts for that.
        """
        return self._portal.deadline(seconds_of("deadline", seconds, error=InvalidValue))

    def close(self) -> None:
        """Close the storage. May be called twice. Tasks that a memory storage loses are logged."""
        self._leave(self._queue.close(), is_last=True)

    def _leave(self, closing: Coroutine[Any, Any, None], *, is_last: bool = False) -> None:
        try:
            if self._portal.usable:
                # Also after a deadline has passed: the storage gives back what it holds.
                with self._portal.deadline(self._portal.call_timeout):
                    self._portal.run(closing)
            else:
                closing.close()
        finally:
            if is_last or self._portal.forked or not self._queue.storage.is_open:
                self._portal.close()

    @property
    def _alone(self) -> AbstractContextManager[object]:
        """One thread enters or leaves at a time. In a forked process, nothing would release the lock."""
        return nullcontext() if self._portal.forked else self._entering

    def __enter__(self) -> Self:
        with self._alone:
            try:
                self._run(self._queue.__aenter__())
            except BaseException:
                if not self._queue.storage.is_open:
                    self._portal.close()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._alone:
            self._leave(self._queue.__aexit__(kind, error, trace))

    def flow(self, flow_id: str) -> FlowHandle[Any]:
        """Return a handle for a flow that was started earlier or by another process."""
        return FlowHandle(self._portal, self._queue.flow(flow_id))

    def options(self, **options: Unpack[EnqueueOptions]) -> Enqueuer:
        """Return this queue with options for the calls that follow. They are checked immediately."""
        return Enqueuer(self._portal, self._queue.options(**options))

    def wrap_enqueue(self, wrapper: EnqueueWrapper) -> None:
        """Enter this context manager around every later enqueue, also by `options(…)`."""
        self._queue.wrap_enqueue(wrapper)

    def surround(self, around: EnqueueWrapper) -> None:
        """Deprecated: use `wrap_enqueue`."""
        warn_renamed("surround()", "wrap_enqueue()")
        self._queue.wrap_enqueue(around)

    def worker(self, **options: Unpack[PoolOptions]) -> WorkerPool:
        """Return a pool on this queue that is not started: use it as `with queue.worker(…)`.

        Options that are not given come from the settings.
        """
        return WorkerPool.on(self._portal, self._queue.worker(**options))

    @overload
    def handle(self, task_id: str) -> TaskHandle[Any]: ...

    @overload
    def handle(
        self, task_id: str, func: Callable[..., Coroutine[Any, Any, R]]
    ) -> TaskHandle[R]: ...

    @overload
    def handle(self, task_id: str, func: Callable[..., R]) -> TaskHandle[R]: ...

    def handle(self, task_id: str, func: Any = None) -> TaskHandle[Any]:
        """Return a handle for a task that was enqueued earlier or by another process.

        With the function of the task, the result has the type that the function declares.
        """
        return TaskHandle(self._portal, self._queue.handle(task_id, func))
