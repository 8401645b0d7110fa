"""One worker process: a pool on a dedicated thread with its event loop.

The main thread, which receives signals, never runs a task: a task that blocks cannot keep a worker
from being stopped.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from omniq import log
from omniq.concurrency.backoff import backoff
from omniq.concurrency.event_loop import run_until_done
from omniq.errors import (
    OmniqError,
    PoolStopped,
    SettingsError,
    ShutdownTimeout,
    StorageCorrupt,
    StorageError,
    StorageRefused,
)
from omniq.events import (
    Dispatcher,
    Event,
    ScheduleDeclared,
    WorkerAdvice,
    WorkerForced,
    WorkerRecycling,
    WorkerStarted,
    WorkerStopRequested,
    WorkerStuck,
)
from omniq.models import Schedule, Task
from omniq.outcomes import Outcome, Released
from omniq.scheduling.schedules import AsyncSchedules
from omniq.storage import BaseStorage
from omniq.tasks.task_builder import builder_for
from omniq.worker import AsyncWorkerPool
from omniq.worker.interruption import interruption
from omniq.worker.lifespan import Lifespan
from omniq.worker.middleware import Middleware
from omniq.worker.problems import ProblemReports
from omniq.worker.process.module_import import loaded_below
from omniq.worker.process.start_report import (
    functions_of,
    how_to_stop,
    module_advice,
    names_of,
    queue_advice,
    queues_of,
    summary,
)
from omniq.worker.storage_session import StartReport

_GRACE = 0.6
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_RELEASE_SECONDS = 0.4
"""How long a forced stop may take to release tasks; with the exit itself it is under a second."""

_MOST_NAMED = 10
"""How many unfinished tasks a forced stop names."""

_FOR_SUPERVISOR = (WorkerStarted, WorkerRecycling, WorkerStuck, WorkerStopRequested)
"""The events that the supervisor acts on."""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one worker process. Child processes receive it as JSON."""

    modules: tuple[str, ...]
    concurrency: int
    poll_interval: float
    base_retry_delay: float
    lease: float
    shutdown_timeout: float
    queues: tuple[str, ...] | None = None
    listeners: tuple[str, ...] = ()
    """Paths of functions without arguments, each of which returns a listener for the pool's events."""
    lifespan: str | None = None
    middleware: tuple[str, ...] = ()
    burst: bool = False
    """Whether it ends when nothing is left that it may run now."""
    reports: bool = True
    """Whether it says what it runs when it starts; the first of several processes does."""


class Ready(msgspec.Struct, frozen=True):
    """The runner claims tasks."""


class Ended(msgspec.Struct, frozen=True):
    """The runner has ended: as requested, or because of `error`, or with the exit `code` of a child."""

    error: BaseException | None = None
    code: int = 0


class Recycle(msgspec.Struct, frozen=True):
    """The process should be replaced by a new one: too many of its threads hang.

    `stuck`: immediately, since its event loop hangs too, in the task `task_id` if that is known. `is_planned`:
    nothing hangs, and the process has reached a limit of the settings.
    """

    stuck: bool = False
    task_id: str = ""
    is_planned: bool = False


class StopAsked(msgspec.Struct, frozen=True):
    """An operator has asked this worker to stop; with `restart`, a new process takes its place."""

    restart: bool = False


Notice = Ready | Ended | Recycle | StopAsked


class PoolRunner(Protocol):
    """Runs pools, in this process or in others. Sends the notice `Ready` and, once, `Ended`."""

    grace: float
    """Seconds after the shutdown timeout that it may take to release what still runs."""

    def start(self) -> None:
        """Start; returns immediately."""

    def stop(self, timeout: float | None) -> None:
        """Stop claiming, and end when all runs have ended, or after `timeout`. Returns immediately."""

    def release_and_end(self, stuck_task: str = "") -> bool:
        """End within a second, whatever runs; returns whether the tasks could be released.

        It does not release `stuck_task`, the task that made this necessary: that counts as a crash.
        """

    def join(self, timeout: float) -> bool:
        """After `Ended`: wait for the end; returns whether nothing of it still runs."""


class PoolProcess:
    """Runs one pool in this process."""

    grace = _GRACE

    def __init__(
        self,
        storage: BaseStorage,
        config: WorkerConfig,
        notify: Callable[[Notice], None],
        deaths: dict[int, str],
        address: str = "",
        *,
        lifespan: Lifespan | str | None = None,
        middleware: Sequence[Middleware | str] = (),
        before_claims: Callable[[], object] = lambda: None,
        is_replaced: bool = False,
    ) -> None:
        """`deaths`: how other workers of this machine died; the caller adds to it.

        `address`: where the storage is, for people. `before_claims` is called when it has started, before
        the first claim. `is_replaced`: a new process takes over when this one has reached a limit.
        """
        self._address = address
        self._before_claims = before_claims
        self._storage = storage
        self._clock = storage.clock
        self._config = config
        self._notify = notify
        self._pool = AsyncWorkerPool(
            storage,
            config.concurrency,
            config.poll_interval,
            config.base_retry_delay,
            queues=config.queues,
            lease=config.lease,
            allow=config.modules,
            lifespan=lifespan,
            middleware=middleware,
        )
        self._pool.deaths = deaths
        self._pool.on_blocked_start = lambda error: notify(Ended(error))
        self._pool.is_supervised, self._pool.is_replaced = True, is_replaced
        self._pool.events.subscribe(self._on_event, kinds=_FOR_SUPERVISOR)
        listeners = [_listener_at(path) for path in config.listeners]
        for listener in listeners:
            self._pool.events.subscribe(listener)
        # A listener may also trace what tasks enqueue.
        wrappers = [getattr(listener, "wrap_enqueue", None) for listener in listeners]
        self._pool.enqueue_wrappers = [wrapper for wrapper in wrappers if wrapper is not None]
        self._events = Dispatcher()
        log.attach(self._events)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._may_hold_tasks = False
        self._is_working = False
        self._unfinished: list[Task] = []
        self._end: asyncio.Task[None] | None = None
        self._timeout: float | None = None
        self._is_stop_requested = False
        self._was_timeout = False
        self._thread = threading.Thread(target=self._run, name="omniq-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float | None) -> None:
        with self._lock:
            if not self._is_stop_requested:
                self._is_stop_requested, self._timeout = True, timeout
                if self._loop is not None:
                    # The loop may have just ended by itself.
                    with suppress(RuntimeError):
                        self._loop.call_soon_threadsafe(self._begin_stop)

    def release_and_end(self, stuck_task: str = "") -> bool:
        released = threading.Event()
        # As long as the storage has not answered, these are all that could be unfinished.
        self._unfinished = [
            task for task in self._storage.register.tasks() if task.id != stuck_task
        ]
        with self._lock, suppress(RuntimeError):
            if self._loop is not None:
                # A pool with free slots would claim again what is released now.
                self._loop.call_soon_threadsafe(self._pool.stop_claiming)
        # From a thread that may be abandoned: perhaps everything hangs because of the storage.
        threading.Thread(target=self._release, args=(released, stuck_task), daemon=True).start()
        are_released = released.wait(_RELEASE_SECONDS)
        self._report_unfinished(are_released)
        return are_released

    def _report_unfinished(self, are_released: bool) -> None:
        unfinished = self._unfinished
        if not unfinished:
            return
        named = [f"{task.func_path} {task.id}" for task in unfinished[:_MOST_NAMED]]
        if more := len(unfinished) - len(named):
            named.append(f"and {more} more")
        dead = sum(task.runs_at_most_once for task in unfinished)
        self._events.emit(
            WorkerForced(
                owner=self._storage.owner,
                unfinished=len(unfinished),
                tasks=", ".join(named),
                dead=dead,
                released=are_released,
            )
        )

    def join(self, timeout: float) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive() and not self._was_timeout

    def _run(self) -> None:
        runner = asyncio.Runner(loop_factory=_loop_factory())
        try:
            run_until_done(runner, self._serve())
        except BaseException as error:
            # The edge of the thread: the supervisor decides what the error means.
            self._notify(Ended(error))
        else:
            self._notify(Ended())
        # After the notice: this waits for threads that tasks may have left in the default executor.
        runner.close()

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        with self._lock:
            self._loop = asyncio.get_running_loop()
            if self._is_stop_requested:
                self._stopping.set()
        owns_storage = not self._storage.is_open
        try:
            if await _done_before(self._stopping, self._begin()):
                await self._work()
        finally:
            if owns_storage:
                await self._storage.close()

    async def _work(self) -> None:
        """Wait until the running pool has ended, by request or by itself."""
        self._is_working = True
        with self._lock:
            is_stop_requested = self._is_stop_requested
        if is_stop_requested:
            self._begin_stop()
        try:
            if self._config.burst and not self._stopping.is_set():
                await self._pool.run_until_empty()
            else:
                await self._pool.wait()
        finally:
            if self._end is not None:
                await self._end

    def _begin_stop(self) -> None:
        if self._may_hold_tasks and not self._is_working:
            # The pool is about to return from its start, which must not be cancelled now: `_work` stops it.
            return
        self._stopping.set()
        if self._is_working and self._end is None:
            # Not only in the new task: a run that ends before that starts must not make room for another.
            self._pool.stop_claiming()
            self._end = asyncio.create_task(self._stop_pool())

    async def _begin(self) -> None:
        """Open the storage and start the pool; wait for a server that is unreachable.

        Not in a burst: a script must not wait without end.
        """
        failures, problems = 0, ProblemReports(self._events, self._clock)
        while True:
            try:
                if not self._storage.is_open:
                    await self._storage.open()
                await self._declare_schedules()
                advice = await self._prepare_report()
                await self._pool.start()
                problems.answered()
                for sentence in advice:
                    self._events.emit(WorkerAdvice(advice=sentence))
                return
            except PoolStopped:
                if not self._stopping.is_set():
                    raise
                # It has claimed nothing; `_work` waits until it has ended.
                return
            except StorageError as error:
                may_wait = self._storage.capabilities.reach == "fleet" and not self._config.burst
                if not may_wait or isinstance(error, StorageCorrupt | StorageRefused):
                    raise
                problems.report("open storage", error)
                self._pool.had_to_wait = True
            jitter = self._clock.random()
            await self._clock.sleep(
                backoff(failures, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE, jitter=jitter)
            )
            failures += 1

    async def _declare_schedules(self) -> None:
        """Store the schedules of `@task(cron=…)` in the worker's modules and their submodules."""
        modules = loaded_below(self._config.modules)
        schedules = AsyncSchedules(self._storage, builder_for(self._storage))
        before = _declared(await schedules.list())
        await schedules.declare(*modules)
        after = _declared(await schedules.list())
        for schedule_id in sorted(before.keys() | after.keys()):
            old, new = before.get(schedule_id), after.get(schedule_id)
            if old != new:
                change = "deleted" if new is None else "added" if old is None else "changed"
                self._events.emit(ScheduleDeclared(schedule_id=schedule_id, change=change))

    async def _prepare_report(self) -> list[str]:
        """Set what the pool reports when it starts; returns advice on what is probably a mistake."""
        storage, config = self._storage, self._config
        if not config.reports:
            self._pool.start_report = StartReport(is_short=True)
            return []
        functions = functions_of(config.modules)
        paths = sorted({path for found in functions.values() for path in found})
        schedules = await storage.list_schedules()
        self._pool.start_report = StartReport(
            storage=self._address,
            functions=summary(names_of(paths, config.modules)),
            schedules=summary([schedule.id for schedule in schedules]),
            stop=how_to_stop(config.shutdown_timeout),
        )
        filled = queues_of(paths, config.modules) | {each.task.queue for each in schedules}
        return [
            *module_advice(functions),
            *await queue_advice(storage, config.queues, filled),
        ]

    async def _stop_pool(self) -> None:
        try:
            await self._pool.stop(self._timeout)
        except ShutdownTimeout:
            # The log names each task that was released. The stop itself was in time.
            self._was_timeout = True

    def _on_event(self, event: Event) -> None:
        match event:
            case WorkerStarted():
                if self._stopping.is_set():
                    # The start is being cancelled.
                    self._pool.stop_claiming()
                    return
                # Before the first claim: from now on a stop waits for what was claimed.
                self._before_claims()
                self._may_hold_tasks = True
                self._notify(Ready())
            case WorkerRecycling(reason=reason):
                self._notify(Recycle(is_planned=reason != "threads"))
            case WorkerStuck(id=task_id):
                self._notify(Recycle(stuck=True, task_id=task_id))
            case WorkerStopRequested(restart=restart):
                self._notify(StopAsked(restart))

    def _release(self, released: threading.Event, stuck_task: str) -> None:
        """Release what this worker holds, over a separate connection and event loop."""
        with suppress(OmniqError, OSError):
            asyncio.run(self._release_held(stuck_task))
            released.set()

    async def _release_held(self, stuck_task: str) -> None:
        owner = self._storage.owner
        if not owner or not self._storage.is_open:
            return
        async with self._storage.sibling() as sibling:
            held = await sibling.held_by(owner)
            held.pop(stuck_task, None)
            self._unfinished = [task for task in self._unfinished if task.id in held]
            await sibling.record([self._released(*claim) for claim in held.items()])

    def _released(self, task_id: str, token: int) -> Outcome:
        """The outcome of a claim. Whether its run has begun is not known in this thread."""
        task = self._storage.register.task(task_id)
        if task is None or task.token != token:
            return Released(task_id, token)
        return interruption(task, "its worker was stopped by force", self._clock.now())


def _declared(schedules: Iterable[Schedule]) -> dict[str, Schedule]:
    """What the code says of each schedule that it declares; other workers may fire them meanwhile."""
    return {
        schedule.id: msgspec.structs.replace(
            schedule, next_at=None, last_at=None, paused=False, version=0
        )
        for schedule in schedules
        if schedule.declared
    }


async def _done_before(stopping: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do the work, or cancel it when `stopping` is set first; returns whether it was done."""
    tasks = task, waiting = asyncio.create_task(work), asyncio.create_task(stopping.wait())
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    is_done = task.done()
    for left in tasks:
        left.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    with suppress(asyncio.CancelledError):
        await task
    return is_done


def _listener_at(path: str) -> Callable[[Event], object]:
    module, _, name = path.rpartition(".")
    try:
        make: Callable[[], Callable[[Event], object]]
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(f"the listener {path} cannot be imported: {error}") from error
    return make()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    found = importlib.util.find_spec("uvloop")
    # Not a file of that name in the current folder, which is searched last.
    if found is None or Path.cwd() in Path(found.origin or "").parents[:2]:
        return None
    uvloop: Any = importlib.import_module("uvloop")
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
