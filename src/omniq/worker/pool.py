"""Worker pools: claim in batches, run anything, record together, stop cleanly."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypedDict

from omniq import events
from omniq._portal import Portal
from omniq.errors import InvalidValue, PoolStopped, ShutdownTimeout
from omniq.events import Dispatcher
from omniq.models import check_int, check_name, check_seconds
from omniq.storage.base import BaseStorage
from omniq.tasks.error_rules import ErrorRules, rules_at
from omniq.tasks.task_builder import TaskBuilder
from omniq.worker.loop_watchdog import PATIENCE
from omniq.worker.maintenance import left_behind
from omniq.worker.pool_runtime import Engine, EnginePlan
from omniq.worker.pool_stats import PoolStats, Tally, facts_of


class PoolOptions(TypedDict, total=False):
    """What a pool can be told, by name."""

    concurrency: int
    poll_interval: float
    base_retry_delay: float
    queues: Sequence[str] | None
    lease: float | None
    allow: Sequence[str] | None
    errors: ErrorRules | None
    max_leaked_threads: int | None
    loop_patience: float


class AsyncWorkerPool:
    """Runs the tasks of a storage, at most `concurrency` at a time, on this event loop.

    Sync functions run in its own threads, those with `executor="process"` in its own processes.
    `allow` restricts it to functions under these prefixes. `errors` says which exceptions are worth
    another try, where the task says nothing; else the settings do. `lease` is how long others wait for a
    sign of life before they take over what this pool holds.

    A thread cannot be stopped: one whose call timed out is left to itself. While
    `max_leaked_threads` of them (as many as slots, unless given) have not come back, nothing more
    is claimed. An event loop that is blocked for more than `loop_patience` seconds is told of.
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
        max_leaked_threads: int | None = None,
        loop_patience: float = PATIENCE,
    ) -> None:
        check_int("concurrency", concurrency, low=1, error=InvalidValue)
        check_seconds("poll_interval", poll_interval, above_zero=True, error=InvalidValue)
        check_seconds("base_retry_delay", base_retry_delay, error=InvalidValue)
        check_seconds("lease", lease, above_zero=True, error=InvalidValue)
        if max_leaked_threads is not None:
            check_int("max_leaked_threads", max_leaked_threads, low=1, error=InvalidValue)
        check_seconds("loop_patience", loop_patience, above_zero=True, error=InvalidValue)
        for queue in queues or ():
            check_name("queue", queue, error=InvalidValue)
        self._storage = storage
        self._plan = EnginePlan(
            concurrency=concurrency,
            poll_interval=poll_interval,
            base_retry_delay=base_retry_delay,
            queues=None if queues is None else tuple(queues),
            lease=storage.settings.lease if lease is None else lease,
            allow=None if allow is None else list(allow),
            errors=_rules(errors, storage),
            max_leaked_threads=max_leaked_threads or concurrency,
            loop_patience=loop_patience,
        )
        self._builder = TaskBuilder(storage.settings, storage.clock)
        self.events = Dispatcher()
        self._tally = Tally(self.events)
        self._engine: Engine | None = None
        self._opening = asyncio.Lock()
        self._opened_storage = False

    @property
    def running(self) -> bool:
        """Whether the pool claims tasks."""
        return self._engine is not None and self._engine.running

    @property
    def recycle_requested(self) -> bool:
        """Whether the process should be replaced: too many threads hang in what was given up.

        The pool claims nothing meanwhile, and goes on when they come back. `WorkerRecycling` tells
        of it. From any thread.
        """
        return self._engine is not None and self._engine.is_recycling

    @property
    def has_ended(self) -> bool:
        """Whether the pool holds nothing open: not started yet, or stopped."""
        return (self._engine is None or self._engine.has_ended) and not self._opened_storage

    async def start(self) -> None:
        """Begin to claim and run tasks; returns once the pool runs.

        What was opened is closed again when it fails. A pool that has stopped may be started anew.
        """
        if self._engine is not None and not self._engine.has_ended:
            raise InvalidValue("the pool is already running; stop it before you start it again")
        self._engine = engine = Engine(
            self._storage,
            self._plan,
            self._tally,
            self.events,
            open_storage=self._open_storage,
            close_storage=self._close_storage,
        )
        try:
            await engine.begin()
        except BaseException:
            if self._engine is engine and engine.has_ended:
                # As if never started; it takes tasks, and may be started again.
                self._engine = None
            raise

    async def stop(self, timeout: float | None = None, cancel_in_flight: bool = False) -> None:
        """Claim no more, let what runs finish, and end.

        After `timeout` seconds, or at once with `cancel_in_flight`, what still runs is stopped and
        given back unharmed: PENDING, no attempt spent. Raises `ShutdownTimeout` when the time ran
        out, and the error if the pool had died of one. Never waits for a poll. May be called
        again, also while another call waits: each may cut the other short.
        """
        check_seconds("timeout", timeout, error=InvalidValue)
        engine = self._engine
        if engine is None:
            await self._close_storage()
            return
        in_time = await engine.end(timeout, cancel_in_flight)
        engine.raise_error()
        if not in_time:
            raise ShutdownTimeout

    async def wait(self) -> None:
        """Return when the pool has ended; raises the error if it died of one."""
        engine = self._engine
        if engine is not None:
            await engine.wait()
            engine.raise_error()

    async def run_until_empty(self) -> None:
        """Run everything that is due, and what that makes due, then stop.

        What becomes due later, such as a retry after its delay, is left for the next time.
        """
        if not self.running:
            await self.start()
        assert self._engine is not None
        try:
            await self._engine.until_empty()
        except asyncio.CancelledError:
            await self.stop(cancel_in_flight=True)
            raise
        await self.stop()

    async def submit(self, func: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> str:
        """Enqueue a call on this pool's storage; its task id. `QueueFull` when there is no room."""
        if self._engine is not None and self._engine.is_stopping:
            raise PoolStopped("the pool has been stopped and takes no more tasks")
        task = self._builder.build(func, args, kwargs)
        await self._open_storage()
        task_id = await self._storage.enqueue(task)
        self._tally.queued += 1
        if self.events.wants(events.TaskEnqueued):
            self.events.emit(events.TaskEnqueued(**{**facts_of(task), "id": task_id, "attempt": 0}))
        return task_id

    def stats(self) -> PoolStats:
        """How the pool is doing. From any thread, and before the start as well."""
        tally, engine = self._tally, self._engine
        return PoolStats(
            workers_count=self._plan.concurrency,
            active_workers=0 if engine is None else engine.active,
            queued_tasks=tally.queued,
            completed_tasks=tally.completed,
            failed_tasks=tally.failed,
            average_exec_time=tally.average_milliseconds,
            retried_runs=tally.retried,
            leaked_threads=0 if engine is None else engine.leaked_threads,
            stale_outcomes=tally.stale,
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

    async def _open_storage(self) -> None:
        async with self._opening:
            if not self._storage.is_open:
                await self._storage.open()
                self._opened_storage = True

    async def _close_storage(self) -> None:
        if not self._opened_storage:
            return
        self._opened_storage = False
        # The next one may belong to another event loop.
        self._opening = asyncio.Lock()
        if self._storage.is_open:
            if (left := await left_behind(self._storage)) is not None:
                self.events.emit(left)
            await self._storage.close()


class WorkerPool:
    """The same pool for blocking code, on a thread and an event loop of its own.

    The thread ends with the pool; a pool that has stopped may be started anew.
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
        max_leaked_threads: int | None = None,
        loop_patience: float = PATIENCE,
    ) -> None:
        self._portal = Portal()
        self._owns_portal = True
        self._lock, self._calls = threading.Lock(), 0
        self._pool = AsyncWorkerPool(
            storage,
            concurrency,
            poll_interval,
            base_retry_delay,
            queues=queues,
            lease=lease,
            allow=allow,
            errors=errors,
            max_leaked_threads=max_leaked_threads,
            loop_patience=loop_patience,
        )

    @property
    def recycle_requested(self) -> bool:
        """Whether the process should be replaced: see `AsyncWorkerPool.recycle_requested`."""
        return self._pool.recycle_requested

    @classmethod
    def on(cls, portal: Portal, pool: AsyncWorkerPool) -> WorkerPool:
        """The blocking face of a pool that shares somebody else's event loop."""
        blocking = cls.__new__(cls)
        blocking._portal, blocking._owns_portal, blocking._pool = portal, False, pool
        blocking._lock, blocking._calls = threading.Lock(), 0
        return blocking

    @property
    def running(self) -> bool:
        """Whether the pool claims tasks."""
        return self._pool.running

    @property
    def events(self) -> Dispatcher:
        """What happens to the pool and its tasks, told on the pool's own thread."""
        return self._pool.events

    def start(self) -> None:
        """Begin to claim and run tasks; returns once the pool runs."""
        with self._call() as portal:
            portal.run(self._pool.start())

    def stop(self, timeout: float | None = None, cancel_in_flight: bool = False) -> None:
        """Claim no more, let what runs finish, and end: see `AsyncWorkerPool.stop`."""
        with self._call() as portal:
            portal.run(self._pool.stop(timeout, cancel_in_flight))

    def wait(self) -> None:
        """Return when the pool has ended; raises the error if it died of one."""
        with self._call() as portal:
            portal.run(self._pool.wait())

    def run_until_empty(self) -> None:
        """Run everything that is due, and what that makes due, then stop."""
        with self._call() as portal:
            portal.run(self._pool.run_until_empty())

    def submit(self, func: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> str:
        """Enqueue a call on this pool's storage; its task id. `QueueFull` when there is no room."""
        with self._call() as portal:
            return portal.run(self._pool.submit(func, *args, **kwargs))

    def stats(self) -> PoolStats:
        """How the pool is doing."""
        return self._pool.stats()

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

    @contextmanager
    def _call(self) -> Iterator[Portal]:
        """The way to the event loop; the last to leave a pool that has ended lets go of its thread."""
        with self._lock:
            self._calls += 1
            portal = self._portal
        try:
            yield portal
        finally:
            with self._lock:
                self._calls -= 1
                if self._owns_portal and not self._calls and self._pool.has_ended:
                    portal.close()
                    # Its thread is started when first needed: a pool that stays stopped has none.
                    self._portal = Portal()


def _rules(errors: ErrorRules | None, storage: BaseStorage) -> ErrorRules | None:
    """The rules that were given, or those that the settings name."""
    if errors is None and storage.settings.errors is not None:
        return rules_at(storage.settings.errors)
    if errors is not None and not isinstance(errors, ErrorRules):
        raise InvalidValue("errors: expected ErrorRules(...)")
    return errors
