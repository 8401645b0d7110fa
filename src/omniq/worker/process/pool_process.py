"""One worker process: a pool on an event loop and a thread of its own.

The thread that hears signals is another one. It never runs a task, so that no task, however it
blocks, can keep a worker from being stopped.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from omniq import log
from omniq._event_loop import run_to_the_end
from omniq.errors import (
    OmniqError,
    SettingsError,
    ShutdownTimeout,
    StorageCorrupt,
    StorageError,
    StorageRefused,
)
from omniq.events import ChoreFailed, Dispatcher, Event, WorkerRecycling, WorkerStuck
from omniq.outcomes import Released
from omniq.scheduling.schedules import AsyncSchedules
from omniq.storage import BaseStorage
from omniq.tasks.task_builder import TaskBuilder
from omniq.worker import AsyncWorkerPool

_GRACE = 0.6
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_RELEASE_SECONDS = 0.4
"""How long a forced stop may take to give tasks back; with the exit itself it is under a second."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker process is to do. Crosses to child processes as JSON."""

    modules: tuple[str, ...]
    concurrency: int
    poll_interval: float
    base_retry_delay: float
    lease: float
    shutdown_timeout: float
    queues: tuple[str, ...] | None = None
    listeners: tuple[str, ...] = ()
    """Paths of functions without arguments, each of which returns a listener for the pool's events."""


class Ready(msgspec.Struct, frozen=True):
    """The crew claims tasks."""


class Ended(msgspec.Struct, frozen=True):
    """The crew has ended: as it was told, or because of `error`, or its processes' exit `code`."""

    error: BaseException | None = None
    code: int = 0


class Recycle(msgspec.Struct, frozen=True):
    """The process should be replaced by a fresh one: too many of its threads hang.

    `stuck`: at once, since its event loop hangs as well, in the task `task_id` if that is known.
    """

    stuck: bool = False
    task_id: str = ""


Notice = Ready | Ended | Recycle


class Crew(Protocol):
    """Who does the work: this process, or several others. Tells of `Ready` and, once, of `Ended`."""

    grace: float
    """Seconds after the time to stop that it may take to give back what still runs."""

    def start(self) -> None:
        """Begin; returns at once."""

    def stop(self, timeout: float | None) -> None:
        """Claim no more, and end when all runs have, or after `timeout`. Returns at once."""

    def cut_off(self, guilty: str = "") -> bool:
        """End now, within a second, whatever runs; whether its tasks could be given back.

        All but `guilty`, the one because of which it ends: that is charged to it, as a crash.
        """

    def join(self, timeout: float) -> bool:
        """After `Ended`: whether nothing of it is left running."""


class Serving:
    """The crew that is this process."""

    grace = _GRACE

    def __init__(self, storage: BaseStorage, plan: Plan, tell: Callable[[Notice], None]) -> None:
        self._storage = storage
        self._clock = storage.clock
        self._plan = plan
        self._tell = tell
        self._pool = AsyncWorkerPool(
            storage,
            plan.concurrency,
            plan.poll_interval,
            plan.base_retry_delay,
            queues=plan.queues,
            lease=plan.lease,
            allow=plan.modules,
        )
        self._pool.events.subscribe(self._on_event, kinds=(WorkerRecycling, WorkerStuck))
        for path in plan.listeners:
            self._pool.events.subscribe(_listener_at(path))
        self._events = Dispatcher()
        log.attach(self._events)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_working = False
        self._end: asyncio.Task[None] | None = None
        self._timeout: float | None = None
        self._stop_asked = False
        self._cut_off_tasks = False
        self._thread = threading.Thread(target=self._run, name="omniq-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float | None) -> None:
        with self._lock:
            if not self._stop_asked:
                self._stop_asked, self._timeout = True, timeout
                if self._loop is not None:
                    # The loop may have ended by itself a moment ago.
                    with suppress(RuntimeError):
                        self._loop.call_soon_threadsafe(self._heed_stop)

    def cut_off(self, guilty: str = "") -> bool:
        released = threading.Event()
        # From a thread that may be left behind: the storage may be what everything hangs on.
        threading.Thread(target=self._release, args=(released, guilty), daemon=True).start()
        return released.wait(_RELEASE_SECONDS)

    def join(self, timeout: float) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive() and not self._cut_off_tasks

    def _run(self) -> None:
        runner = asyncio.Runner(loop_factory=_loop_factory())
        try:
            run_to_the_end(runner, self._serve())
        except BaseException as error:
            # The edge of the thread: whoever waits for it decides what the error means.
            self._tell(Ended(error))
        else:
            self._tell(Ended())
        # After telling: this waits for threads that tasks may have left in the loop's executor.
        runner.close()

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        with self._lock:
            self._loop = asyncio.get_running_loop()
            if self._stop_asked:
                self._stopping.set()
        owns_storage = not self._storage.is_open
        try:
            if await _done_before(self._stopping, self._begin()):
                await self._work()
        finally:
            if owns_storage:
                await self._storage.close()

    async def _work(self) -> None:
        """From the moment the pool runs until it has ended, as it was told or by itself."""
        self._tell(Ready())
        self._is_working = True
        if self._stopping.is_set():
            self._heed_stop()
        try:
            await self._pool.wait()
        finally:
            if self._end is not None:
                await self._end

    def _heed_stop(self) -> None:
        # The pool hears of it in its loop's next round, before it can claim anything more.
        self._stopping.set()
        if self._is_working and self._end is None:
            self._end = asyncio.create_task(self._stop_pool())

    async def _begin(self) -> None:
        """Open the storage and start the pool; wait for a server that is away."""
        pause = 0.0
        while True:
            try:
                if not self._storage.is_open:
                    await self._storage.open()
                await self._declare_schedules()
                await self._pool.start()
                return
            except StorageError as error:
                is_server = self._storage.capabilities.reach == "fleet"
                if not is_server or isinstance(error, StorageCorrupt | StorageRefused):
                    raise
                if not pause:
                    self._events.emit(ChoreFailed.of("open storage", error))
            pause = min(max(pause * 2, _FIRST_PAUSE), _LONGEST_PAUSE)
            await self._clock.sleep(pause * (0.5 + self._clock.random() / 2))

    async def _declare_schedules(self) -> None:
        """Keep what `@task(cron=…)` says in the worker's modules and in what they consist of."""
        prefixes = tuple(f"{name}." for name in self._plan.modules)
        modules = [
            module
            for name, module in sorted(sys.modules.items())
            if name in self._plan.modules or name.startswith(prefixes)
        ]
        builder = TaskBuilder(self._storage.settings, self._storage.clock)
        await AsyncSchedules(self._storage, builder).declare(*modules)

    async def _stop_pool(self) -> None:
        try:
            await self._pool.stop(self._timeout)
        except ShutdownTimeout:
            # Said in the log, task by task; being stopped in time is all that was asked for.
            self._cut_off_tasks = True

    def _on_event(self, event: Event) -> None:
        match event:
            case WorkerRecycling():
                self._tell(Recycle())
            case WorkerStuck(id=task_id):
                self._tell(Recycle(stuck=True, task_id=task_id))

    def _release(self, released: threading.Event, guilty: str) -> None:
        """Give back what this worker holds, over a connection and a loop of its own."""
        with suppress(OmniqError, OSError):
            asyncio.run(self._give_back(guilty))
            released.set()

    async def _give_back(self, guilty: str) -> None:
        owner = self._storage.owner
        if not owner or not self._storage.is_open:
            return
        async with self._storage.sibling() as sibling:
            held = await sibling.held_by(owner)
            held.pop(guilty, None)
            await sibling.record([Released(task_id, token) for task_id, token in held.items()])


async def _done_before(stopping: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do the work, or drop it when `stopping` is set first; whether it was done."""
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
    if importlib.util.find_spec("uvloop") is None:
        return None
    uvloop: Any = importlib.import_module("uvloop")
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
