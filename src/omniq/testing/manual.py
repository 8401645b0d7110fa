"""A queue for tests of your own code: in memory, with the real codec, claims, leases and retries.

    async def test_a_new_user_gets_a_mail(async_omniq_queue):
        await sign_up(async_omniq_queue, "a@b")

        assert await async_omniq_queue.enqueued(send, to="a@b")
        await async_omniq_queue.run()                     # what is due, and what that makes due
        await async_omniq_queue.run_for(days=30)          # a month of retries and schedules

Nothing runs and no time passes until the test says so. `ManualQueue` is the same for blocking code.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, NoReturn

from omniq.errors import StorageRefused
from omniq.models import Task, TaskStatus
from omniq.queue.async_queue import AsyncTaskQueue
from omniq.queue.blocking_queue import TaskQueue
from omniq.settings import Settings
from omniq.storage.memory import MemoryStorage
from omniq.tasks.context import TaskContext
from omniq.tasks.functions import path_of
from omniq.testing.clock import ManualClock
from omniq.testing.faults import FaultyStorage, Verb
from omniq.worker import AsyncWorkerPool

_LEASE = 1e9
"""Longer than any test: a clock that jumps must not end a lease that nobody wants ended."""

_REAL_PATIENCE = 0.02
_PAGE = 500
_WAITING = (TaskStatus.PENDING, TaskStatus.RETRYING)


class WorkerKilled(BaseException):
    """Raised by `kill_here` in the task's own code, which cannot go on: its worker is dead."""


class Enqueued(list[Task]):
    """The tasks that were looked for. When there are none, it shows what there is instead."""

    def __init__(self, found: list[Task], wanted: str, others: list[Task]) -> None:
        super().__init__(found)
        self._wanted = wanted
        self._others = others

    def __repr__(self) -> str:
        if self:
            return f"<{len(self)} × {self._wanted}>"
        others = ", ".join(_call(task.func_path, task.args, task.kwargs) for task in self._others)
        return f"<no {self._wanted}; enqueued: {others or 'nothing'}>"


class Stage:
    """Where a test's tasks live and run: the store, its clock, its faults, and the worker."""

    def __init__(self, clock: ManualClock | None, settings: Settings | None) -> None:
        self.clock = clock or ManualClock()
        # Not as the environment or a file says: a test is the same everywhere.
        self._memory = MemoryStorage(clock=self.clock, settings=settings or Settings())
        self.faults = FaultyStorage(self._memory)
        self._worker: FaultyStorage | None = None

    async def enqueued(
        self, func: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Enqueued:
        path = path_of(func)
        tasks = await self._tasks(None)
        found = [
            task for task in tasks if task.func_path == path and _fits(func, task, args, kwargs)
        ]
        return Enqueued(found, _call(path, args, kwargs), tasks)

    async def run(self, until: datetime | None, concurrency: int) -> None:
        """Run what is due now, then at each instant up to `until` at which something is."""
        while True:
            storage = self._worker = self.faults.beside(self._memory.another())
            pool = AsyncWorkerPool(storage, concurrency, lease=_LEASE)
            acted = storage.acted
            try:
                await self._drive(pool, self._work(pool, until))
                if storage.acted == acted:
                    return
                # A claim whose reply was lost came back when the worker left: it is due, too.
            except StorageRefused:
                if storage.killed_as is None:
                    raise
                # What it held goes on with another worker, charged with a crash.
                await self._take_over(storage.killed_as)
            finally:
                self._worker = None

    def kill_here(self) -> NoReturn:
        if self._worker is None:
            raise RuntimeError("kill_here: no worker runs; call it from a task's own code")
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
            memory.leases.pop(owner, None)
        await self._memory.give_back_abandoned()

    async def _work(self, pool: AsyncWorkerPool, until: datetime | None) -> None:
        await pool.start()
        try:
            engine = pool._engine
            assert engine is not None
            await engine.until_empty()
            while pool.running and until is not None:
                instant = await self._next_instant()
                if instant is None or instant > until:
                    break
                self.clock.advance(instant - self.clock.now())
                await engine.until_empty()
        finally:
            await pool.stop()
        if until is not None and until > self.clock.now():
            self.clock.advance(until - self.clock.now())

    async def _drive(self, pool: AsyncWorkerPool, work: Any) -> None:
        """Wait for it; a worker that waits for time to pass, after a fault, gets it."""
        job = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait((job,), timeout=_REAL_PATIENCE))[0]:
                if not pool.stats().active_workers:
                    self.clock.advance(_REAL_PATIENCE)
        except asyncio.CancelledError:
            job.cancel()
            raise
        await job

    async def _next_instant(self) -> datetime | None:
        """When something is due next."""
        now = self.clock.now()
        waiting = [task.eta for status in _WAITING for task in await self._tasks(status)]
        # Not through the storage, which copies them: this is asked at every instant.
        schedules = self._memory._memory.schedules.values()
        times = waiting + [each.next_at for each in schedules if not each.paused]
        return min((time for time in times if time is not None and time > now), default=None)

    async def _tasks(self, status: TaskStatus | None) -> list[Task]:
        found: list[Task] = []
        after = None
        while page := await self._memory.list_tasks(status=status, limit=_PAGE, after=after):
            found += page
            after = page[-1].id
        return found


class Directed:
    """What a test can do to a queue of either face."""

    _stage: Stage

    @property
    def clock(self) -> ManualClock:
        """Its time. `clock.advance(seconds)` lets it pass without running anything."""
        return self._stage.clock

    @property
    def faults(self) -> FaultyStorage:
        """What goes wrong with the storage: `faults.fail("record", at=3)` is the third write of outcomes."""
        return self._stage.faults

    def kill_here(self) -> NoReturn:
        """In a task's own code: the worker dies here. Another takes over, and a crash is charged."""
        self._stage.kill_here()

    def kill_at(self, verb: Verb, *, at: int = 1) -> None:
        """The worker dies when it is about to make the `at`-th call of that verb from now."""
        self._stage.kill_at(verb, at)

    def lose_lease(self, *, at: int = 1) -> None:
        """Another worker has been given the tasks when this one records outcomes for the `at`-th time."""
        self._stage.lose_lease(at)


class AsyncManualQueue(Directed, AsyncTaskQueue):
    """A queue in memory whose tasks run, and whose time passes, when a test says so."""

    def __init__(
        self, *, clock: ManualClock | None = None, settings: Settings | None = None
    ) -> None:
        self._stage = Stage(clock, settings)
        super().__init__(self._stage.faults)

    async def enqueued(
        self, func: Callable[..., Any] | str, /, *args: Any, **kwargs: Any
    ) -> Enqueued:
        """The tasks of this function, in any state, that were given at least these arguments.

        It does not matter which were given by name. Empty, and so false, when there are none.
        """
        return await self._stage.enqueued(func, args, kwargs)

    async def run(self, *, concurrency: int = 10) -> None:
        """Run what is due now, and what that makes due. No time passes; retries wait for theirs."""
        await self._stage.run(None, concurrency)

    async def run_for(self, *, concurrency: int = 10, **duration: float) -> None:
        """Let time pass, `days=30` or `hours=1, minutes=30`, and run each thing when it comes due."""
        await self._stage.run(self.clock.now() + timedelta(**duration), concurrency)


class ManualQueue(Directed, TaskQueue):
    """The same for blocking code."""

    def __init__(
        self, *, clock: ManualClock | None = None, settings: Settings | None = None
    ) -> None:
        self._stage = Stage(clock, settings)
        super().__init__(self._stage.faults)

    def enqueued(self, func: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> Enqueued:
        """The tasks of this function, in any state, that were given at least these arguments."""
        return self._portal.run(self._stage.enqueued(func, args, kwargs))

    def run(self, *, concurrency: int = 10) -> None:
        """Run what is due now, and what that makes due. No time passes; retries wait for theirs."""
        self._portal.run(self._stage.run(None, concurrency))

    def run_for(self, *, concurrency: int = 10, **duration: float) -> None:
        """Let time pass, `days=30` or `hours=1, minutes=30`, and run each thing when it comes due."""
        self._portal.run(self._stage.run(self.clock.now() + timedelta(**duration), concurrency))


def _fits(
    func: Callable[..., Any] | str, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether the task was given at least these arguments, by name or by place."""
    if isinstance(func, str):
        return task.args[: len(args)] == args and kwargs.items() <= task.kwargs.items()
    signature = _signature(func)
    given = signature.bind_partial(*task.args, **task.kwargs).arguments
    wanted = signature.bind_partial(*args, **kwargs).arguments
    return all(name in given and given[name] == value for name, value in wanted.items())


def _signature(func: Callable[..., Any]) -> inspect.Signature:
    """What `enqueue` takes for this function: all but the context."""
    signature = inspect.signature(func)
    parameters = list(signature.parameters.values())
    if parameters and parameters[0].annotation in (TaskContext, "TaskContext", "omniq.TaskContext"):
        return signature.replace(parameters=parameters[1:])
    return signature


def _call(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    given = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
    return f"{path}({', '.join(given)})"
