"""A queue for tests of your own code: in memory, with the real serializer, claims, leases and retries.

    async def test_a_new_user_gets_a_mail(async_omniq_queue):
        await sign_up(async_omniq_queue, "a@b")

        assert await async_omniq_queue.enqueued(send, to="a@b")
        await async_omniq_queue.run()                     # due tasks, and tasks that they enqueue
        await async_omniq_queue.run_for(days=30)          # a month of retries and schedules

Tasks run and time passes only when the test calls these methods. `ManualQueue` is the same for
blocking code.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime, timedelta
from typing import Any, NoReturn, TypeVar

import msgspec

from omniq.errors import ResultTimeout, StorageRefused
from omniq.models import Task, TaskResult, TaskStatus
from omniq.queue.async_queue import AsyncTaskQueue
from omniq.queue.blocking_queue import TaskQueue
from omniq.settings import Settings
from omniq.storage.backend import Changes
from omniq.storage.memory import MemoryStorage
from omniq.storage.row_rules import Row, task_of
from omniq.storage.tables import Tables
from omniq.tasks.arguments import FunctionTypes
from omniq.tasks.functions import path_of
from omniq.tasks.task_output import OutputPage, OutputPosition
from omniq.testing.clock import ManualClock
from omniq.testing.faults import FaultyStorage, Verb
from omniq.worker import AsyncWorkerPool
from omniq.worker.lifespan import Lifespan
from omniq.worker.middleware import Middleware
from omniq.worker.task_services import EnqueueWrapper, TaskServices

_T = TypeVar("_T")

_LEASE = 1e9
"""Seconds, longer than any test: moving the clock must not end the worker's lease."""

_REAL_WAIT = 0.02
_STORAGE_WAIT = 1.0
_NOT_RUN = (
    "it has not ended, and a manual queue runs tasks and lets time pass only in run() and run_for(): "
    "call one of them first; after a failure, run_for(…) until the retry is due"
)
_PAGE = 500
_WAITING = (TaskStatus.PENDING, TaskStatus.RETRYING)


class WorkerKilled(BaseException):
    """Raised by `kill_here` inside a task: its worker is dead, so the task cannot continue."""


class Enqueued(list[Task]):
    """The tasks that match. If none does, its repr lists all enqueued tasks instead."""

    def __init__(self, found: list[Task], wanted: str, others: list[Task]) -> None:
        super().__init__(found)
        self._wanted = wanted
        self._others = others

    def __repr__(self) -> str:
        if self:
            return f"<{len(self)} × {self._wanted}>"
        others = ", ".join(
            _format_call(task.func_path, task.args, task.kwargs) for task in self._others
        )
        return f"<no {self._wanted}; enqueued: {others or 'nothing'}>"


class _EndedTables(Tables):
    """The tables of a store that also keep the rows of ended tasks, after their records have expired."""

    def __init__(self) -> None:
        super().__init__()
        # By nonce too: an id may be used again later, and a dead letter may be retried.
        self._ended: dict[tuple[str, str], Row] = {}

    def all_rows(self) -> list[Row]:
        """Every row that was ever inserted, as it is now or was at its end, in id order."""
        live = {(row.id, row.nonce): row for row in self.rows.values()}
        return sorted({**self._ended, **live}.values(), key=lambda row: (row.id, row.seq))

    def _apply(self, changes: Changes, now: int) -> None:
        super()._apply(changes, now)
        for ended in changes.ended:
            row = ended.finished.row
            self._ended[row.id, row.nonce] = row


class _ManualStorage(FaultyStorage):
    """The storage of a manual queue, where a wait for a result ends when no worker runs."""

    def __init__(self, inner: MemoryStorage, has_worker: Callable[[], bool]) -> None:
        super().__init__(inner)
        self._has_worker = has_worker

    async def wait_for_result(
        self, task_id: str, timeout: float | None = None
    ) -> TaskResult | None:
        return await self._wait(super().wait_for_result(task_id, timeout), task_id, timeout)

    async def wait_for_output(
        self,
        task_id: str,
        after: OutputPosition | None = None,
        *,
        all_runs: bool = False,
        timeout: float | None = None,
    ) -> OutputPage | None:
        waits = super().wait_for_output(task_id, after, all_runs=all_runs, timeout=timeout)
        return await self._wait(waits, task_id, timeout)

    async def _wait(self, work: Coroutine[Any, Any, _T], task_id: str, timeout: float | None) -> _T:
        # Neither time nor a task proceeds without a call of the test, so the wait would never end.
        waiting = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait((waiting,), timeout=_REAL_WAIT))[0]:
                if not self._has_worker():
                    raise ResultTimeout(task_id, timeout or 0, _NOT_RUN)
            return waiting.result()
        finally:
            waiting.cancel()


class ManualRuntime:
    """The store of a test, its clock, its faults, and the worker that runs its tasks."""

    def __init__(
        self,
        clock: ManualClock | None,
        settings: Settings | None,
        lifespan: Lifespan | str | None = None,
        middleware: Sequence[Middleware | str] | None = None,
    ) -> None:
        self.lifespan = lifespan
        self.middleware = middleware
        self.wrappers: Sequence[EnqueueWrapper] = ()
        self.clock = clock or ManualClock()
        # Not from the environment or a file: a test must behave the same everywhere.
        self._memory = MemoryStorage(clock=self.clock, settings=settings or Settings())
        self._memory._memory.tables = self._tables = _EndedTables()
        self.faults: FaultyStorage = _ManualStorage(self._memory, lambda: self._worker is not None)
        self._worker: FaultyStorage | None = None

    async def enqueued(
        self, func: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Enqueued:
        path = path_of(func)
        with self._memory._memory.lock:
            rows = self._tables.all_rows()
        tasks = [task_of(row, self._memory.serializer.decode_task(row.body)) for row in rows]
        found = [
            task
            for task in tasks
            if task.func_path == path and _has_arguments(func, task, args, kwargs)
        ]
        return Enqueued(found, _format_call(path, args, kwargs), tasks)

    async def run(self, until: datetime | None, concurrency: int) -> None:
        """Run the tasks that are due now, then those due at each later instant up to `until`."""
        while True:
            storage = self._worker = self.faults.share_faults(self._memory.another())
            pool = AsyncWorkerPool(
                storage,
                concurrency,
                lease=_LEASE,
                lifespan=self.lifespan,
                middleware=self.middleware,
            )
            pool.enqueue_wrappers = self.wrappers
            triggered = storage.triggered
            try:
                await self._await_with_clock(pool, self._run_pool(pool, until))
                if storage.triggered == triggered:
                    return
                # The worker released a claim whose reply was lost when it stopped: run that, too.
            except StorageRefused:
                if storage.killed_owner is None:
                    raise
                # Another worker runs the killed worker's tasks, charged with a crash.
                await self._take_over(storage.killed_owner)
            finally:
                self._worker = None

    def kill_here(self) -> NoReturn:
        if self._worker is None:
            raise RuntimeError("kill_here: no worker runs; call it inside a task")
        self._worker.kill()
        raise WorkerKilled

    def kill_at(self, verb: Verb, at: int) -> None:
        async def kill(storage: FaultyStorage) -> None:
            storage.kill()

        self.faults.before(verb, act=kill, at=at)

    def lose_lease(self, at: int) -> None:
        async def take_over(storage: FaultyStorage) -> None:
            await self._take_over(storage.owner)

        self.faults.before("record", act=take_over, at=at)

    async def _take_over(self, owner: str) -> None:
        memory = self._memory._memory
        with memory.lock:
            lease = memory.tables.leases.get(owner)
            if lease is not None:
                memory.tables.put("lease", owner, msgspec.structs.replace(lease, until=0))
        await self._memory.give_back_abandoned()

    async def _run_pool(self, pool: AsyncWorkerPool, until: datetime | None) -> None:
        await pool.start()
        try:
            runtime = pool._runtime
            assert runtime is not None
            await runtime.until_empty()
            while pool.running and until is not None:
                instant = await self._next_instant()
                if instant is None or instant > until:
                    break
                self.clock.advance(instant - self.clock.now())
                await runtime.until_empty()
        finally:
            await pool.stop()
        if until is not None and until > self.clock.now():
            self.clock.advance(until - self.clock.now())

    async def _await_with_clock(self, pool: AsyncWorkerPool, work: Any) -> None:
        """Await `work`, and move the clock while the worker sleeps, as it does after a fault."""
        job = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait((job,), timeout=_REAL_WAIT))[0]:
                if _waits_for_storage(pool):
                    self.clock.advance(_STORAGE_WAIT)
                elif not pool.stats().active_workers:
                    self.clock.advance(_REAL_WAIT)
        except asyncio.CancelledError:
            job.cancel()
            raise
        await job

    async def _next_instant(self) -> datetime | None:
        """The next instant at which a task or a schedule is due."""
        now = self.clock.now()
        waiting = [task.eta for status in _WAITING for task in await self._list(status)]
        schedules = await self._memory.list_schedules()
        times = waiting + [each.next_at for each in schedules if not each.paused]
        return min((time for time in times if time is not None and time > now), default=None)

    async def _list(self, status: TaskStatus) -> list[Task]:
        found: list[Task] = []
        after = None
        while page := await self._memory.list_tasks(status=status, limit=_PAGE, after=after):
            found += page
            after = page[-1].id
        return found


class ManualControls:
    """The clock, the faults and the crashes of both queues."""

    _runtime: ManualRuntime

    @property
    def clock(self) -> ManualClock:
        """The clock of the queue. `clock.advance(seconds)` moves it and runs nothing."""
        return self._runtime.clock

    @property
    def faults(self) -> FaultyStorage:
        """The faults of the storage: `faults.fail("record", at=3)` fails the third write of outcomes."""
        return self._runtime.faults

    def use(
        self,
        *,
        lifespan: Lifespan | str | None = None,
        middleware: Sequence[Middleware | str] | None = None,
    ) -> None:
        """Run later tasks with this lifespan and middleware, as `queue.worker(…)` does.

        Each `run` is a new worker, which enters the lifespan and makes its resources.
        """
        self._runtime.lifespan = lifespan
        self._runtime.middleware = middleware

    def kill_here(self) -> NoReturn:
        """Kill the worker; call it inside a task. Another worker takes over and charges a crash."""
        self._runtime.kill_here()

    def kill_at(self, verb: Verb, *, at: int = 1) -> None:
        """Kill the worker right before its `at`-th call of that verb from now."""
        self._runtime.kill_at(verb, at)

    def lose_lease(self, *, at: int = 1) -> None:
        """Let another worker take over the tasks before this one records outcomes the `at`-th time."""
        self._runtime.lose_lease(at)


class AsyncManualQueue(ManualControls, AsyncTaskQueue):
    """A queue in memory whose tasks run, and whose time passes, when the test says so."""

    def __init__(
        self,
        *,
        clock: ManualClock | None = None,
        settings: Settings | None = None,
        lifespan: Lifespan | str | None = None,
        middleware: Sequence[Middleware | str] | None = None,
    ) -> None:
        self._runtime = ManualRuntime(clock, settings, lifespan, middleware)
        super().__init__(self._runtime.faults)
        self._runtime.wrappers = self._wrappers

    async def enqueued(
        self, func: Callable[..., Any] | str, /, *args: Any, **kwargs: Any
    ) -> Enqueued:
        """The tasks of this function that were ever enqueued, in any state, whose arguments include these.

        Also those whose records have expired. Positional and keyword arguments are treated alike. Empty,
        and so false, if no task matches.
        """
        return await self._runtime.enqueued(func, args, kwargs)

    async def run(self, *, concurrency: int = 10) -> None:
        """Run the due tasks, and the due tasks that they enqueue. No time passes, so retries wait."""
        await self._runtime.run(None, concurrency)

    async def run_for(self, *, concurrency: int = 10, **duration: float) -> None:
        """Let time pass, `days=30` or `hours=1, minutes=30`, and run each task when it is due."""
        await self._runtime.run(self.clock.now() + timedelta(**duration), concurrency)


class ManualQueue(ManualControls, TaskQueue):
    """The same for blocking code."""

    def __init__(
        self,
        *,
        clock: ManualClock | None = None,
        settings: Settings | None = None,
        lifespan: Lifespan | str | None = None,
        middleware: Sequence[Middleware | str] | None = None,
    ) -> None:
        self._runtime = ManualRuntime(clock, settings, lifespan, middleware)
        super().__init__(self._runtime.faults)
        self._runtime.wrappers = self._queue._wrappers

    def enqueued(self, func: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> Enqueued:
        """The tasks of this function that were ever enqueued, in any state, whose arguments include these."""
        return self._portal.run(self._runtime.enqueued(func, args, kwargs))

    def run(self, *, concurrency: int = 10) -> None:
        """Run the due tasks, and the due tasks that they enqueue. No time passes, so retries wait."""
        self._portal.run(self._runtime.run(None, concurrency))

    def run_for(self, *, concurrency: int = 10, **duration: float) -> None:
        """Let time pass, `days=30` or `hours=1, minutes=30`, and run each task when it is due."""
        self._portal.run(self._runtime.run(self.clock.now() + timedelta(**duration), concurrency))


def _waits_for_storage(pool: AsyncWorkerPool) -> bool:
    """Whether a task waits for its step or its enqueue to be stored, as it does after a fault."""
    running = None if pool._runtime is None else pool._runtime.parts.running
    services = None if running is None else running._services
    return isinstance(services, TaskServices) and services.waiting > 0


def _has_arguments(
    func: Callable[..., Any] | str, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether the task's arguments include these, by name or by position."""
    if isinstance(func, str):
        return task.args[: len(args)] == args and kwargs.items() <= task.kwargs.items()
    signature = _signature(func)
    given = signature.bind_partial(*task.args, **task.kwargs).arguments
    wanted = signature.bind_partial(*args, **kwargs).arguments
    return all(name in given and given[name] == value for name, value in wanted.items())


def _signature(func: Callable[..., Any]) -> inspect.Signature:
    """The parameters that `enqueue` takes for this function: all but the context and resources."""
    signature = inspect.signature(func)
    types = FunctionTypes(func, func.__qualname__)
    parameters = list(signature.parameters.values())[types.takes_context :]
    resources = {each.name for each in types.resources}
    return signature.replace(parameters=[each for each in parameters if each.name not in resources])


def _format_call(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    given = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
    return f"{path}({', '.join(given)})"
