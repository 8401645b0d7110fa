"""Worker pools: claim in batches, run any function, record in batches, stop cleanly."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar

from omniq import events
from omniq.concurrency.blocking import BlockingFace, any_wait, blocking
from omniq.concurrency.futures import finish
from omniq.concurrency.portal import Portal
from omniq.concurrency.running_task import running_task
from omniq.errors import (
    InvalidValue,
    LifespanFailed,
    PoolStopped,
    ShutdownTimeout,
    StorageError,
)
from omniq.events import Dispatcher
from omniq.models import check_int, check_name, check_names, check_seconds
from omniq.storage.base import BaseStorage
from omniq.tasks.error_rules import ErrorRules, rules_at
from omniq.tasks.import_guard import refuse_during_import
from omniq.tasks.task_builder import builder_for
from omniq.worker.lifespan import Lifespan, lifespan_of
from omniq.worker.loop_watchdog import PATIENCE
from omniq.worker.middleware import Middleware, middleware_of
from omniq.worker.pool_config import PoolConfig
from omniq.worker.pool_parts import PoolContext
from omniq.worker.pool_runtime import PoolRuntime
from omniq.worker.pool_stats import PoolStats
from omniq.worker.stats_recorder import StatsRecorder
from omniq.worker.storage_session import StartReport, StorageSession
from omniq.worker.task_services import EnqueueWrapper

_R = TypeVar("_R")


class PoolOptions(TypedDict, total=False):
    """The options of a pool, by name."""

    concurrency: int
    poll_interval: float
    base_retry_delay: float
    queues: Sequence[str] | None
    lease: float | None
    allow: Sequence[str] | None
    errors: ErrorRules | None
    lifespan: Lifespan | str | None
    middleware: Sequence[Middleware | str] | None
    max_leaked_threads: int | None
    loop_patience: float


class AsyncWorkerPool:
    """Runs the tasks of a storage, at most `concurrency` at a time, on this event loop.

    Sync functions run in threads of the pool, those with `executor="process"` in its child processes.
    It runs functions marked with `@task` in modules that the program has imported, and what this
    process has passed to a queue. With `allow`, a list of modules, it runs instead what those define,
    marked or public, and what is marked in modules below them. It claims no tasks of other functions,
    nor of those that it has found missing, which other workers may have.

    `lifespan` is an async context manager that is entered before the first claim and left after the
    last outcome is recorded; what it yields is `ctx.state`. `middleware` are called around each run, the
    first outermost. Both may be dotted paths, and come from the settings if they are not given.

    `errors` decides which exceptions are retried where the task does not; without it the settings do.
    `lease` is how long other workers wait for a renewal before they take over what this pool holds.

    A thread cannot be stopped: one whose call timed out is abandoned. While `max_leaked_threads` of
    them (by default as many as there are slots) have not returned, the pool claims nothing. An event
    loop that is blocked for more than `loop_patience` seconds is reported.
    """

    had_to_wait = False
    """Whether the store could not be reached when the pool was to start: see `lease_watch`."""
    is_supervised = False
    """Whether `omniq worker` runs the pool, stops it, and reports that."""
    is_replaced = False
    """Whether a new process takes over when this one has reached a limit of the settings."""
    enqueue_wrappers: Sequence[EnqueueWrapper] = ()
    """Those of the queue that the pool belongs to, for what tasks enqueue."""
    on_blocked_start: Callable[[LifespanFailed], None] | None = None
    """Called, in a thread, when the lifespan blocks the event loop for longer than it may take."""

    def __init__(
        self,
        storage: BaseStorage,
        concurrency: int = 1,
        poll_interval: float = 1.0,
        base_retry_delay: float = 1.0,
        *,
        queues: Sequence[str] | None = None,
        lease: float | None = None,
        allow: Sequence[str] | None = None,
        errors: ErrorRules | None = None,
        lifespan: Lifespan | str | None = None,
        middleware: Sequence[Middleware | str] | None = None,
        max_leaked_threads: int | None = None,
        loop_patience: float = PATIENCE,
    ) -> None:
        _check_storage(storage)
        check_int("concurrency", concurrency, low=1, error=InvalidValue)
        if max_leaked_threads is not None:
            check_int("max_leaked_threads", max_leaked_threads, low=1, error=InvalidValue)
        _check_all_names(queues, allow)
        self._storage = storage
        self._config = PoolConfig(
            concurrency=concurrency,
            poll_interval=poll_interval,
            base_retry_delay=base_retry_delay,
            queues=None if queues is None else tuple(queues),
            lease=storage.settings.lease if lease is None else lease,
            allow=None if allow is None else list(allow),
            errors=_rules(errors, storage),
            lifespan=_lifespan(lifespan, storage),
            middleware=middleware_of(
                storage.settings.middleware if middleware is None else middleware
            ),
            max_leaked_threads=max_leaked_threads or concurrency,
            loop_patience=loop_patience,
        )
        self._builder = builder_for(storage)
        self.events = Dispatcher()
        self._stats = StatsRecorder(self.events)
        storage.on_enqueue(self._stats)
        self._session = StorageSession(storage, self.events)
        self._runtime: PoolRuntime | None = None
        self.deaths: dict[int, str] = {}
        """How processes of this machine died that were workers: stored with the tasks they ran."""

    @property
    def running(self) -> bool:
        """Whether the pool claims tasks."""
        return self._runtime is not None and self._runtime.running

    @property
    def start_report(self) -> StartReport:
        """What the event of the pool's start says beyond what the pool knows; set it before `start`."""
        return self._session.start_report

    @start_report.setter
    def start_report(self, report: StartReport) -> None:
        self._session.start_report = report

    @property
    def recycle_requested(self) -> bool:
        """Whether the process should be replaced: too many threads hang in abandoned calls.

        The pool claims nothing meanwhile, and continues when they return. The event
        `WorkerRecycling` reports it. From any thread.
        """
        return self._runtime is not None and self._runtime.parts.recycling.is_due

    @property
    def has_ended(self) -> bool:
        """Whether the pool holds nothing open: not started yet, or stopped."""
        return (self._runtime is None or self._runtime.has_ended) and not self._session.is_owner

    async def start(self) -> None:
        """Start to claim and run tasks; returns once the pool runs.

        When it fails, what was opened is closed again. A stopped pool may be started again.
        """
        if self._runtime is not None and not self._runtime.has_ended:
            raise InvalidValue("the pool is already running; stop it before you start it again")
        refuse_during_import("starts a worker")
        context = PoolContext(
            storage=self._storage,
            session=self._session,
            config=self._config,
            stats=self._stats,
            events=self.events,
            had_to_wait=self.had_to_wait,
            deaths=self.deaths,
            wrappers=self.enqueue_wrappers,
            on_blocked_start=self.on_blocked_start,
            is_supervised=self.is_supervised,
            is_replaced=self.is_replaced,
        )
        self._runtime = runtime = PoolRuntime(context)
        self.had_to_wait = False
        try:
            await runtime.start()
        except BaseException:
            if self._runtime is runtime and runtime.has_ended:
                # As if never started: it accepts tasks, and may be started again.
                self._runtime = None
            raise

    async def stop(self, timeout: float | None = None, cancel_in_flight: bool = False) -> None:
        """Stop claiming, wait for the running tasks, and end.

        After `timeout` seconds, or immediately with `cancel_in_flight`, tasks that still run are
        stopped and released: PENDING, no attempt used. Raises `ShutdownTimeout` when the time ran
        out, and the error if one ended the pool. Never waits for a poll. May be called again, also
        while another call waits: each call can shorten the wait of the other.
        """
        check_seconds("timeout", timeout, error=InvalidValue)
        if timeout is None and not cancel_in_flight:
            self._refuse_in_own_task("stop")
        runtime = self._runtime
        if runtime is None:
            await self._session.close()
            return
        if runtime.running and not self.is_supervised:
            stopping = events.WorkerStopping(owner=self._storage.owner, timeout=timeout)
            self.events.emit(stopping)
        in_time = await runtime.stop(timeout, cancel_in_flight)
        runtime.raise_error()
        if not in_time:
            raise ShutdownTimeout

    def stop_claiming(self) -> None:
        """Claim nothing from now on; `stop` has to follow. For the process that supervises the pool."""
        if self._runtime is not None:
            finish(self._runtime.parts.stop_requested)

    async def wait(self) -> None:
        """Return when the pool has ended; raises the error if one ended it."""
        self._refuse_in_own_task("wait")
        runtime = self._runtime
        if runtime is not None:
            await runtime.wait()
            runtime.raise_error()

    async def run_until_empty(self) -> int:
        """Run everything that is due and that this pool may run, and what that makes due, then stop.

        Returns how many tasks of the storage still wait: those that are due later, such as a retry
        after its delay, are held back by a limit, or need another worker, since this pool does not
        have their function or does not serve their queue.
        """
        self._refuse_in_own_task("run_until_empty")
        if not self.running:
            await self.start()
        assert self._runtime is not None
        try:
            held = await self._runtime.until_empty()
            left = await self._count_left(held) if self.running else 0
        except asyncio.CancelledError:
            await self.stop(cancel_in_flight=True)
            raise
        await self.stop()
        return left

    def _refuse_in_own_task(self, method: str) -> None:
        """Raise `InvalidValue` in a task that this pool runs: the call would wait for the task itself."""
        task, runtime = running_task(), self._runtime
        if task is not None and runtime is not None and runtime.is_run_by(task.task_id):
            raise InvalidValue(
                f"pool.{method}(): task {task.task_id} runs in this pool, so the call would wait for "
                "itself; make it outside the pool's tasks"
            )

    async def _count_left(self, held: int) -> int:
        assert self._runtime is not None
        try:
            self._stats.counted(left := await self._runtime.count_left())
        except StorageError as error:
            self.events.emit(events.WorkerProblem.of("count tasks", error))
            return self._stats.queued
        if left or self.is_supervised:
            drained = events.WorkerDrained(owner=self._storage.owner, left=left, held=held)
            self.events.emit(drained)
        return left

    async def submit(self, func: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> str:
        """Enqueue a call on this pool's storage; returns the task id. Raises `QueueFull`."""
        if self._runtime is not None and self._runtime.is_stopping:
            raise PoolStopped("the pool has been stopped and takes no more tasks")
        task = self._builder.build(func, args, kwargs)
        await self._session.open()
        return await self._storage.enqueue(task)

    def stats(self) -> PoolStats:
        """The numbers of the pool. From any thread, and before the start as well."""
        stats, runtime = self._stats, self._runtime
        return PoolStats(
            workers_count=self._config.concurrency if runtime is None else runtime.parts.slots,
            active_workers=0 if runtime is None else runtime.active,
            queued_tasks=stats.queued,
            queue_high_water=stats.high_water,
            completed_tasks=stats.completed,
            failed_tasks=stats.failed,
            average_exec_time=stats.average_milliseconds,
            retried_runs=stats.retried,
            leaked_threads=0 if runtime is None else runtime.leaked_threads,
            stale_outcomes=stats.stale,
        )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop(cancel_in_flight=error is not None)


class WorkerPool(BlockingFace[AsyncWorkerPool]):
    """The same pool for blocking code, on a dedicated thread with an event loop.

    The thread ends with the pool; a stopped pool may be started again.
    """

    def __init__(
        self,
        storage: BaseStorage,
        concurrency: int = 1,
        poll_interval: float = 1.0,
        base_retry_delay: float = 1.0,
        *,
        queues: Sequence[str] | None = None,
        lease: float | None = None,
        allow: Sequence[str] | None = None,
        errors: ErrorRules | None = None,
        lifespan: Lifespan | str | None = None,
        middleware: Sequence[Middleware | str] | None = None,
        max_leaked_threads: int | None = None,
        loop_patience: float = PATIENCE,
    ) -> None:
        pool = AsyncWorkerPool(
            storage,
            concurrency,
            poll_interval,
            base_retry_delay,
            queues=queues,
            lease=lease,
            allow=allow,
            errors=errors,
            lifespan=lifespan,
            middleware=middleware,
            max_leaked_threads=max_leaked_threads,
            loop_patience=loop_patience,
        )
        portal = Portal(storage.settings.call_timeout, storage.callers_lock)
        self._set_up(portal, pool, owns_portal=True)

    # The life of a pool takes as long as its tasks: `call_timeout` is for calls of the storage.
    start = blocking(AsyncWorkerPool.start, any_wait)
    stop = blocking(AsyncWorkerPool.stop, any_wait)
    wait = blocking(AsyncWorkerPool.wait, any_wait)
    run_until_empty = blocking(AsyncWorkerPool.run_until_empty, any_wait)
    submit = blocking(AsyncWorkerPool.submit)

    @property
    def recycle_requested(self) -> bool:
        """Whether the process should be replaced: see `AsyncWorkerPool.recycle_requested`."""
        return self._async_face.recycle_requested

    @classmethod
    def on(cls, portal: Portal, pool: AsyncWorkerPool) -> WorkerPool:
        """The blocking API of a pool that runs on the event loop of that portal."""
        blocking_pool = cls.__new__(cls)
        blocking_pool._set_up(portal, pool, owns_portal=False)
        return blocking_pool

    def _set_up(self, portal: Portal, pool: AsyncWorkerPool, *, owns_portal: bool) -> None:
        super().__init__(portal, pool)
        self._owns_portal = owns_portal
        self._lock, self._calls = threading.Lock(), 0

    @property
    def running(self) -> bool:
        """Whether the pool claims tasks."""
        return self._async_face.running

    @property
    def events(self) -> Dispatcher:
        """The events of the pool and its tasks. Listeners are called on the pool's thread."""
        return self._async_face.events

    def stats(self) -> PoolStats:
        """The numbers of the pool."""
        return self._async_face.stats()

    def stop_claiming(self) -> None:
        """Claim nothing from now on; `stop` has to follow."""

        async def stop_claiming() -> None:
            self._async_face.stop_claiming()

        self._run(stop_claiming(), wait=None)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop(cancel_in_flight=error is not None)

    def _run(self, work: Coroutine[Any, Any, _R], wait: float | None = 0.0) -> _R:
        """Run the coroutine; the last call on an ended pool ends its thread."""
        with self._lock:
            self._calls += 1
            portal = self._portal
        try:
            return portal.run(work, wait)
        finally:
            with self._lock:
                self._calls -= 1
                if self._owns_portal and not self._calls and self._async_face.has_ended:
                    portal.close()
                    # A portal starts its thread when first used: a stopped pool has none.
                    self._portal = Portal(portal.call_timeout, portal.callers_lock)


def _check_storage(storage: object) -> None:
    if not isinstance(storage, BaseStorage):
        raise InvalidValue(
            f"a worker pool runs the tasks of a storage, not of a {type(storage).__name__}: write "
            "queue.worker(…), or pass queue.storage or omniq.storage.open_storage(url)"
        )


def _check_all_names(queues: Sequence[str] | None, modules: Sequence[str] | None) -> None:
    check_names("queues", queues)
    check_names("allow", modules)
    for queue in queues or ():
        check_name("queue", queue, error=InvalidValue)


def _lifespan(given: Lifespan | str | None, storage: BaseStorage) -> Lifespan | None:
    """The given lifespan, or that which the settings name."""
    chosen = storage.settings.lifespan if given is None else given
    return None if chosen is None else lifespan_of(chosen)


def _rules(errors: ErrorRules | None, storage: BaseStorage) -> ErrorRules | None:
    """The given rules, or those that the settings name."""
    if errors is None and storage.settings.errors is not None:
        return rules_at(storage.settings.errors)
    if errors is not None and not isinstance(errors, ErrorRules):
        raise InvalidValue("errors: expected ErrorRules(...)")
    return errors
