"""One run of a pool, from its start to its stop: everything is opened, run, and closed again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

from omniq import events, log
from omniq.concurrency.futures import finish
from omniq.errors import LeaseLost, LifespanFailed, OmniqError, PoolStopped, StorageError
from omniq.events import Dispatcher
from omniq.storage.base import BaseStorage
from omniq.storage.types import Renewal
from omniq.tasks.functions import FunctionCache
from omniq.tasks.passed_functions import PASSED
from omniq.worker.claim_loop import ClaimLoop
from omniq.worker.dead_hooks import DeadHooks
from omniq.worker.drain import Drain
from omniq.worker.executors.thread_executor import ThreadExecutor
from omniq.worker.failure_hooks import FailureHooks
from omniq.worker.fleet_alerts import FleetAlerts
from omniq.worker.heartbeat import Heartbeat
from omniq.worker.lease_watch import LeaseWatch, margin_of
from omniq.worker.lifespan import LifespanState, OpenLifespan
from omniq.worker.loop_watchdog import LoopWatchdog
from omniq.worker.maintenance import Maintenance
from omniq.worker.open_parts import OpenParts, make_execution, take_lease
from omniq.worker.pool_config import PoolConfig
from omniq.worker.problems import ProblemReports
from omniq.worker.recycling import Recycling
from omniq.worker.running_tasks import SHORT_GRACE, RunningTasks
from omniq.worker.schedule_loop import ScheduleLoop
from omniq.worker.stats_recorder import StatsRecorder
from omniq.worker.storage_session import StorageSession
from omniq.worker.task_services import EnqueueWrapper, TaskServices
from omniq.worker.unknown_functions import UnknownFunctions
from omniq.worker.worker_requests import WorkerRequests

_FORCE = (SHORT_GRACE * 3, 0.25, 0.25, 0.25, 0.25)
"""Seconds that a forced stop gives to the runs, and then to each step of closing the pool."""


class PoolRuntime:
    """Claims and runs tasks on the event loop it was made in, once.

    It is one asyncio task that opens what it needs, runs the claim loop until it is to stop, and
    closes everything however it ends. Its parts report to it: it implements `PoolEvents`.
    """

    _asked_stop: asyncio.Task[bool] | None = None
    _was_forced = _is_draining = False

    def __init__(
        self,
        storage: BaseStorage,
        session: StorageSession,
        config: PoolConfig,
        stats: StatsRecorder,
        dispatcher: Dispatcher,
        *,
        had_to_wait: bool,
        deaths: dict[int, str],
        wrappers: Sequence[EnqueueWrapper] = (),
        on_blocked_start: Callable[[LifespanFailed], None] | None = None,
        is_supervised: bool = False,
        is_replaced: bool = False,
    ) -> None:
        """`had_to_wait`: the store could not be reached when the pool was to start first. `deaths`: how workers of this machine died.

        `wrappers` surround each enqueue by a task. `on_blocked_start`: the lifespan blocks the loop. `is_supervised`: `omniq worker` stops it. `is_replaced`: see the pool.
        """
        self._storage = storage
        self._session = session
        self._clock = storage.clock
        self._config = config
        self._stats = stats
        self._wrappers = wrappers
        self._on_blocked_start = on_blocked_start
        self._is_supervised, self._is_replaced = is_supervised, is_replaced
        self._events = dispatcher
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        self.slots = config.concurrency
        """The number of tasks that may run at a time; an operator can change it."""
        self._started: asyncio.Future[None] = self._loop.create_future()
        self.stop_requested: asyncio.Future[None] = self._loop.create_future()
        self._error: Exception | None = None
        self._running: RunningTasks | None = None
        self._claim_loop: ClaimLoop | None = None
        self._maintenance: Maintenance | None = None
        self._problems = problems = ProblemReports(dispatcher, storage.clock)
        self._schedule_loop = ScheduleLoop(storage, dispatcher, config.poll_interval, problems)
        self._threads: ThreadExecutor | None = None
        leaked, most = (lambda: self.leaked_threads), config.max_leaked_threads
        self.recycling = Recycling(storage, dispatcher, leaked, most)
        self._watch = LeaseWatch(storage.clock, config.lease, self._has_outcomes, deaths)
        if had_to_wait:
            self._watch.had_to_wait()
        self._main = self._loop.create_task(self._run(), name="omniq-pool")

    # For the pool

    @property
    def running(self) -> bool:
        """Whether it claims tasks."""
        has_started = self._started.done() and self._started.exception() is None
        return has_started and not self.stop_requested.done()

    @property
    def is_stopping(self) -> bool:
        """Whether it was stopped, or has ended by itself."""
        return self.stop_requested.done()

    @property
    def has_ended(self) -> bool:
        """Whether everything it had opened is closed again, or its loop is closed with all of it."""
        return self._main.done() or self._loop.is_closed()

    @property
    def active(self) -> int:
        """How many tasks run now."""
        return 0 if self._running is None else len(self._running.active)

    @property
    def leaked_threads(self) -> int:
        """How many threads still run a call that was abandoned."""
        return 0 if self._threads is None else self._threads.leaked

    async def start(self) -> None:
        """Return once it claims tasks; raises when it cannot, with everything closed again."""
        try:
            await asyncio.wait((self._started,))
        except asyncio.CancelledError:
            self._main.cancel()
            await asyncio.wait((self._main,))
            raise
        if self._started.exception() is not None:
            # Closed before the caller sees the error: it may start the pool again immediately.
            await asyncio.wait((self._main,))
        self._started.result()
        if self.stop_requested.done():
            raise PoolStopped("the pool was stopped before it had started")

    async def stop(self, timeout: float | None, cancel_in_flight: bool) -> bool:
        """Stop, and wait for the end; returns whether it ended by itself within `timeout`."""
        if self.has_ended:
            return True
        finish(self.stop_requested)
        self._wake.set()
        if cancel_in_flight and self._running is not None:
            self._running.stop_all("shutdown")
        in_time = await self._clock.wait(self._main, timeout)
        if not in_time:
            await self._force()
        return in_time

    def is_run_by(self, task_id: str) -> bool:
        """Whether the caller is the run of that task in this pool, which then waits for the caller."""
        return self._running is not None and self._running.is_run_by(task_id)

    async def until_empty(self) -> int:
        """Run what is there; returns how many tasks other workers hold, as far as it has looked."""
        assert self._claim_loop is not None and self._maintenance is not None  # noqa: PT018
        self._is_draining = True
        drain = Drain(
            self._storage,
            self._events,
            self._claim_loop,
            self._maintenance,
            self._schedule_loop,
            self._main,
            lambda: self.running,
            self._config.queues,
        )
        return await (drain.run_with_killed() if self._is_supervised else drain.run())

    async def count_left(self) -> int:
        """How many tasks wait; reports which of their functions no live worker runs."""
        assert self._claim_loop
        return await self._claim_loop.count_left()

    async def wait(self) -> None:
        """Return when it has ended."""
        if not self.has_ended:
            await asyncio.wait((self._main,))

    def raise_error(self) -> None:
        """Raise the error that ended it, if one did, once."""
        error, self._error = self._error, None
        if isinstance(error, OmniqError):
            raise error
        if error is not None:
            raise PoolStopped(f"the pool died of an unexpected error: {error!r}") from error

    async def _force(self) -> None:
        """End it by force: its time is up, and the storage may not answer."""
        self._was_forced = True
        if self._running is not None:
            self._running.stop_all("shutdown", SHORT_GRACE)
        for patience in _FORCE:
            if await self._clock.wait(self._main, patience):
                return
            self._main.cancel()

    # For its parts: PoolEvents

    @property
    def is_ending(self) -> bool:
        return self._main.cancelling() > 0

    @property
    def is_recycling(self) -> bool:
        return self.recycling.check()

    def on_renewal(self, renewal: Renewal, asked_at: int) -> None:
        assert self._claim_loop is not None
        # In the heartbeat's thread: the pool's event loop may be blocked.
        self._watch.answered(is_renewal=True)
        self._call_on_loop(self._claim_loop.on_renewal, renewal, asked_at)

    def on_lease_lost(self, lost: LeaseLost) -> None:
        assert self._claim_loop is not None
        self._call_on_loop(self._claim_loop.on_lease_lost, lost)

    def on_heartbeat_failure(self, error: Exception) -> None:
        if type(error) is TimeoutError:
            error = StorageError(f"no answer to a renewal within {self._config.lease / 2:g} s")
        self._problems.report("heartbeat", error)

    def on_stop_request(self, *, restart: bool) -> None:
        self._events.emit(events.WorkerStopRequested(owner=self._storage.owner, restart=restart))
        if not self._is_supervised:
            self._call_on_loop(self._stop_as_asked)

    def _stop_as_asked(self) -> None:
        if self.stop_requested.done():
            return
        timeout = self._storage.settings.shutdown_timeout
        self._events.emit(events.WorkerStopping(owner=self._storage.owner, timeout=timeout))
        # Referenced until it ends: the event loop holds only a weak reference.
        self._asked_stop = self._loop.create_task(self.stop(timeout, False))

    def on_slots_request(self, slots: int) -> None:
        self._call_on_loop(self._resize, slots)

    def _resize(self, slots: int) -> None:
        assert self._claim_loop is not None
        before, self.slots = self.slots, slots
        self._claim_loop.resize(slots)
        self._events.emit(
            events.WorkerResized(owner=self._storage.owner, slots=slots, before=before)
        )

    def on_cancel(self, task_id: str) -> None:
        assert self._claim_loop is not None
        self._call_on_loop(self._claim_loop.on_cancel, task_id)

    def on_finished(self) -> None:
        self._wake.set()

    def on_leaked_threads_change(self) -> None:
        self.recycling.check()
        self._wake.set()

    def _call_on_loop(self, call: Callable[..., None], *args: Any) -> None:
        """Call it on the pool's event loop, from the heartbeat's or from a caller's thread."""
        # A loop that was closed under the pool has nothing to stop any more.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)

    # From start to end

    async def _run(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                claim_loop = await self._set_up(stack)
                self._started.set_result(None)
                await self._run_claim_loop(claim_loop)
        except Exception as error:
            if self._started.done():
                self._error = self._error or error
            else:
                self._started.set_exception(error)
        finally:
            if not self._started.done():
                # Cancelled: stopped by force, or the event loop is being closed.
                self._started.set_exception(
                    PoolStopped("the pool was stopped before it had started")
                )
            # Marks the error as retrieved: the caller of `start` may have given up waiting for it.
            self._started.exception()
            finish(self.stop_requested)

    async def _run_claim_loop(self, claim_loop: ClaimLoop) -> None:
        try:
            await claim_loop.run()
        except Exception as error:
            # Broken beyond repair: end, and raise the error to the caller that stops the pool.
            self._error = error
            self._problems.report_final("pool", error)
        finally:
            finish(self.stop_requested)

    async def _set_up(self, stack: AsyncExitStack) -> ClaimLoop:
        """Open everything. What is open is on the stack, to be closed in reverse order."""
        storage, config = self._storage, self._config
        parts = OpenParts(stack, self._clock, self._problems, self._closing_limit)
        parts.callback(log.attach(self._events))
        parts.on_exit("close storage", self._session.close)
        await self._session.open()
        functions = FunctionCache(config.allow)
        for failed in functions.import_allowed():
            self._problems.report_final("import", failed)
        functions.check_names()
        state = await self._enter_lifespan(parts)
        unknown = UnknownFunctions(storage, functions, self._events)
        await take_lease(storage, config, unknown.runnable)
        self._watch.answered()
        parts.callback(self._report_stopped, storage.owner, self._stats.released)
        self._stats.hooks = hooks = FailureHooks(functions, self._events)
        self._stats.dead_hooks = dead_hooks = DeadHooks(storage, functions, hooks)
        storage.know_hooks(dead_hooks.may_have_hook)
        self._maintenance = maintenance = Maintenance(
            storage,
            self._events,
            FleetAlerts(storage, self._events, self._stats),
            dead_hooks,
            self._watch,
            lease=config.lease,
            poll_interval=config.poll_interval,
            problems=self._problems,
        )
        self._stats.count_in(maintenance.history.for_modules(config.allow))
        running = self._make_running_tasks(parts, maintenance, functions, unknown, state)
        self._running = running
        self._claim_loop = claim_loop = self._make_claim_loop(running, unknown)
        parts.on_exit("retire", claim_loop.retire)
        self._start_heartbeat(parts, running, unknown, functions)
        parts.on_exit("store progress and history", maintenance.store_rest)
        # Before the lease ends: then other workers take over the hooks of this one.
        parts.on_exit("finish hooks", hooks.finish)
        parts.callback(storage.on_cancel(self.on_cancel))
        parts.callback(PASSED.subscribe(partial(self._call_on_loop, claim_loop.on_new_function)))
        parts.on_exit("release tasks", claim_loop.release_all)
        self._start_loops(parts, claim_loop, unknown)
        self._session.report_start(config, functions.description)
        return claim_loop

    async def _enter_lifespan(self, parts: OpenParts) -> LifespanState:
        """Before the lease: a worker that does not start holds nothing."""
        state = LifespanState()
        if self._config.lifespan is not None:
            lifespan = OpenLifespan(self._config.lifespan)
            timeout = self._storage.settings.start_timeout
            state.set(await lifespan.enter(timeout, self._on_blocked_start))
            parts.on_exit("close lifespan", lifespan.leave, is_limited=True)
        return state

    def _start_loops(
        self, parts: OpenParts, claim_loop: ClaimLoop, unknown: UnknownFunctions
    ) -> None:
        storage, running, maintenance = self._storage, self._running, self._maintenance
        assert running is not None
        assert maintenance is not None
        if self._is_replaced:
            self.recycling.limit(lambda: sum(self._stats.totals()) + len(claim_loop.outcomes()))
        parts.start_loops(
            listen=claim_loop.listen,
            count=claim_loop.counter.run,
            sweep=lambda: running.sweep(storage, margin_of(self._config.lease)),
            maintenance=maintenance.run,
            output=running.outputs.run,
            scheduling=self._schedule_loop.run,
            report=claim_loop.report_left_forever,
        )
        if (pause := unknown.pause) is not None:
            parts.start_loops(unknown=lambda: claim_loop.end_unknown_forever(pause))

    def _make_running_tasks(
        self,
        parts: OpenParts,
        maintenance: Maintenance,
        functions: FunctionCache,
        unknown: UnknownFunctions,
        state: LifespanState,
    ) -> RunningTasks:
        storage, config = self._storage, self._config
        self._threads = threads = ThreadExecutor(self.on_leaked_threads_change)
        parts.callback(threads.close)
        execution = make_execution(parts, storage, config, functions, threads)
        return RunningTasks(
            execution,
            self._stats,
            self._clock,
            self,
            services=TaskServices(
                storage,
                self._events,
                threads,
                execution,
                maintenance,
                state,
                wrappers=self._wrappers,
                problems=self._problems,
            ),
            unknown=unknown,
        )

    def _make_claim_loop(self, running: RunningTasks, unknown: UnknownFunctions) -> ClaimLoop:
        return ClaimLoop(
            self._storage,
            running,
            self._stats,
            self._events,
            self,
            unknown,
            self._watch,
            self._problems,
            concurrency=self._config.concurrency,
            poll_interval=self._config.poll_interval,
            queues=self._config.queues,
            wake=self._wake,
            stop_requested=self.stop_requested,
        )

    def _start_heartbeat(
        self,
        parts: OpenParts,
        running: RunningTasks,
        unknown: UnknownFunctions,
        functions: FunctionCache,
    ) -> None:
        watchdog = LoopWatchdog(
            self._storage, self._events, running, patience=self._config.loop_patience
        )
        heartbeat = Heartbeat(
            self._storage,
            self,
            watchdog,
            lease=self._config.lease,
            concurrency=lambda: self.slots,
            queues=self._config.queues or (),
            runnable=unknown.reported_runnable,
            requests=WorkerRequests(functions, self),
            runs=self._stats.totals,
        )
        heartbeat.start()
        parts.on_exit("stop heartbeat", heartbeat.stop)

    def _closing_limit(self) -> float | None:
        """Of a pool that ends by itself: a `stop` has a timeout for all of it."""
        if not self._is_draining:
            return None
        return max(self._storage.settings.shutdown_timeout, SHORT_GRACE)

    def _has_outcomes(self) -> bool:
        return self._claim_loop is not None and bool(self._claim_loop.outcomes())

    def _report_stopped(self, owner: str, released_before: int) -> None:
        released = self._stats.released - released_before
        self._session.report_stop(owner, released, timed_out=self._was_forced)
