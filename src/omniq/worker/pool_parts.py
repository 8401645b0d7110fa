"""The parts of a pool: how they are made, connected, opened and closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from omniq import log
from omniq.errors import LifespanFailed
from omniq.events import Dispatcher
from omniq.storage.base import BaseStorage
from omniq.tasks.functions import FunctionCache
from omniq.tasks.passed_functions import PASSED
from omniq.worker.claim_loop import ClaimLoop
from omniq.worker.dead_hooks import DeadHooks
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
from omniq.worker.pool_events import PoolEvents
from omniq.worker.problems import ProblemReports
from omniq.worker.recycling import Recycling
from omniq.worker.running_tasks import SHORT_GRACE, RunningTasks
from omniq.worker.schedule_loop import ScheduleLoop
from omniq.worker.stats_recorder import StatsRecorder
from omniq.worker.storage_session import StorageSession
from omniq.worker.task_services import EnqueueWrapper, TaskServices
from omniq.worker.unknown_functions import UnknownFunctions
from omniq.worker.worker_requests import WorkerRequests


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolContext:
    """What one run of a pool is given."""

    storage: BaseStorage
    session: StorageSession
    config: PoolConfig
    stats: StatsRecorder
    events: Dispatcher
    had_to_wait: bool
    """The store could not be reached when the pool was to start first."""
    deaths: dict[int, str]
    """How workers of this machine died."""
    wrappers: Sequence[EnqueueWrapper] = ()
    """They surround each enqueue by a task."""
    on_blocked_start: Callable[[LifespanFailed], None] | None = None
    """Called when the lifespan blocks the event loop."""
    is_supervised: bool = False
    """`omniq worker` stops the pool when an operator asks for it."""
    is_replaced: bool = False
    """A new process replaces this one when it has run enough tasks or uses too much memory."""


class PoolParts:
    """The parts of one run of a pool. `open` opens them, and they are closed in reverse order."""

    running: RunningTasks | None = None
    claim_loop: ClaimLoop | None = None
    maintenance: Maintenance | None = None
    is_draining = False
    """Whether the pool ends when nothing is left to run."""
    was_forced = False
    """Whether the pool was not stopped in time."""
    _threads: ThreadExecutor | None = None

    def __init__(self, context: PoolContext, pool: PoolEvents) -> None:
        storage, config, dispatcher = context.storage, context.config, context.events
        self._context = context
        self._pool = pool
        self.wake = asyncio.Event()
        """Set when the claim loop has something to do."""
        self.stop_requested: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.slots = config.concurrency
        """The number of tasks that may run at a time; an operator can change it."""
        self.problems = ProblemReports(dispatcher, storage.clock)
        self.schedule_loop = ScheduleLoop(storage, dispatcher, config.poll_interval, self.problems)
        self.recycling = Recycling(
            storage, dispatcher, lambda: self.leaked_threads, config.max_leaked_threads
        )
        self.watch = LeaseWatch(storage.clock, config.lease, self._has_outcomes, context.deaths)
        if context.had_to_wait:
            self.watch.had_to_wait()

    @property
    def leaked_threads(self) -> int:
        """How many threads still run a call that was abandoned."""
        return 0 if self._threads is None else self._threads.leaked

    def resize(self, slots: int) -> None:
        """Run that many tasks at a time from now on."""
        assert self.claim_loop is not None
        self.slots = slots
        self.claim_loop.resize(slots)

    async def open(self, stack: AsyncExitStack) -> None:
        """Open everything. What is open is on the stack, to be closed in reverse order."""
        context = self._context
        storage, config = context.storage, context.config
        parts = OpenParts(stack, storage.clock, self.problems, self._closing_limit)
        parts.callback(log.attach(context.events))
        parts.on_exit("close storage", context.session.close)
        await context.session.open()
        functions = FunctionCache(config.allow)
        for failed in functions.import_allowed():
            self.problems.report_final("import", failed)
        functions.check_names()
        state = await self._enter_lifespan(parts)
        unknown = UnknownFunctions(storage, functions, context.events)
        await take_lease(storage, config, unknown.runnable)
        self.watch.answered()
        parts.callback(self._report_stopped, storage.owner, context.stats.released)
        context.stats.hooks = hooks = FailureHooks(functions, context.events)
        context.stats.dead_hooks = dead_hooks = DeadHooks(storage, functions, hooks)
        storage.know_hooks(dead_hooks.may_have_hook)
        self.maintenance = maintenance = Maintenance(
            storage,
            context.events,
            FleetAlerts(storage, context.events, context.stats),
            dead_hooks,
            self.watch,
            lease=config.lease,
            poll_interval=config.poll_interval,
            problems=self.problems,
        )
        context.stats.count_in(maintenance.history.for_modules(config.allow))
        running = self._make_running_tasks(parts, maintenance, functions, unknown, state)
        self.running = running
        self.claim_loop = claim_loop = self._make_claim_loop(running, unknown)
        parts.on_exit("retire", claim_loop.retire)
        self._start_heartbeat(parts, running, unknown, functions)
        parts.on_exit("store progress and history", maintenance.store_rest)
        # Before the lease ends: then other workers take over the hooks of this one.
        parts.on_exit("finish hooks", hooks.finish)
        self._subscribe(parts, claim_loop)
        parts.on_exit("release tasks", claim_loop.release_all)
        self._start_loops(parts, claim_loop, unknown)
        context.session.report_start(config, functions.description)

    async def _enter_lifespan(self, parts: OpenParts) -> LifespanState:
        """Before the lease: a worker that does not start holds nothing."""
        context, state = self._context, LifespanState()
        if context.config.lifespan is not None:
            lifespan = OpenLifespan(context.config.lifespan)
            timeout = context.storage.settings.start_timeout
            state.set(await lifespan.enter(timeout, context.on_blocked_start))
            parts.on_exit("close lifespan", lifespan.leave, is_limited=True)
        return state

    def _subscribe(self, parts: OpenParts, claim_loop: ClaimLoop) -> None:
        on_new_function = partial(self._pool.call_on_loop, claim_loop.on_new_function)
        parts.callback(self._context.storage.on_cancel(self._pool.on_cancel))
        parts.callback(PASSED.subscribe(on_new_function))

    def _start_loops(
        self, parts: OpenParts, claim_loop: ClaimLoop, unknown: UnknownFunctions
    ) -> None:
        context, running, maintenance = self._context, self.running, self.maintenance
        assert running is not None
        assert maintenance is not None
        if context.is_replaced:
            self.recycling.limit(lambda: sum(context.stats.totals()) + len(claim_loop.outcomes()))
        parts.start_loops(
            listen=claim_loop.listen,
            count=claim_loop.counter.run,
            sweep=lambda: running.sweep(context.storage, margin_of(context.config.lease)),
            maintenance=maintenance.run,
            output=running.outputs.run,
            scheduling=self.schedule_loop.run,
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
        context = self._context
        storage, config = context.storage, context.config
        self._threads = threads = ThreadExecutor(self._pool.on_leaked_threads_change)
        parts.callback(threads.close)
        execution = make_execution(parts, storage, config, functions, threads)
        return RunningTasks(
            execution,
            context.stats,
            storage.clock,
            self._pool,
            services=TaskServices(
                storage,
                context.events,
                threads,
                execution,
                maintenance,
                state,
                wrappers=context.wrappers,
                problems=self.problems,
            ),
            unknown=unknown,
        )

    def _make_claim_loop(self, running: RunningTasks, unknown: UnknownFunctions) -> ClaimLoop:
        context = self._context
        config = context.config
        return ClaimLoop(
            context.storage,
            running,
            context.stats,
            context.events,
            self._pool,
            unknown,
            self.watch,
            self.problems,
            concurrency=config.concurrency,
            poll_interval=config.poll_interval,
            queues=config.queues,
            wake=self.wake,
            stop_requested=self.stop_requested,
        )

    def _start_heartbeat(
        self,
        parts: OpenParts,
        running: RunningTasks,
        unknown: UnknownFunctions,
        functions: FunctionCache,
    ) -> None:
        context = self._context
        storage, config = context.storage, context.config
        watchdog = LoopWatchdog(storage, context.events, running, patience=config.loop_patience)
        heartbeat = Heartbeat(
            storage,
            self._pool,
            watchdog,
            lease=config.lease,
            concurrency=lambda: self.slots,
            queues=config.queues or (),
            runnable=unknown.reported_runnable,
            requests=WorkerRequests(functions, self._pool),
            runs=context.stats.totals,
        )
        heartbeat.start()
        parts.on_exit("stop heartbeat", heartbeat.stop)

    def _has_outcomes(self) -> bool:
        return self.claim_loop is not None and bool(self.claim_loop.outcomes())

    def _closing_limit(self) -> float | None:
        """How many seconds the application's code may take to close what it has opened.

        Of a pool that ends by itself: a `stop` has a timeout for all of it.
        """
        if not self.is_draining:
            return None
        return max(self._context.storage.settings.shutdown_timeout, SHORT_GRACE)

    def _report_stopped(self, owner: str, released_before: int) -> None:
        released = self._context.stats.released - released_before
        self._context.session.report_stop(owner, released, timed_out=self.was_forced)
