"""One life of a pool, from its start to its stop: everything opened, run, and closed again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import msgspec

from omniq import events, log
from omniq.errors import LeaseLost, OmniqError, PoolStopped
from omniq.events import Dispatcher
from omniq.storage.base import BaseStorage
from omniq.tasks.error_rules import ErrorRules
from omniq.tasks.functions import FunctionCache
from omniq.worker.claim_loop import Turns
from omniq.worker.executors.execution import Execution
from omniq.worker.executors.process_executor import ProcessSlots
from omniq.worker.executors.thread_executor import ThreadSlots
from omniq.worker.failure_hooks import Hooks
from omniq.worker.fleet_alerts import Lookout
from omniq.worker.heartbeat import Heartbeat
from omniq.worker.loop_watchdog import Watchdog
from omniq.worker.maintenance import Maintenance
from omniq.worker.pool_stats import Tally
from omniq.worker.running_tasks import SHORT_GRACE, Runs
from omniq.worker.schedule_loop import Scheduling
from omniq.worker.task_services import PoolHost

_LEASE_MARGIN, _SHORT_LEASE_MARGIN, _ENOUGH_MARGIN = 0.1, 0.25, 0.5
"""The parts of a lease, long or short, that are not trusted, and the seconds that are enough.

Runs are stopped so long before the lease ends: on a busy machine that takes its time.
"""

_RESTART_PAUSE = 0.1

_FORCE = (SHORT_GRACE * 3, 0.25, 0.25, 0.25, 0.25)
"""Seconds that an engine out of time has for its runs, and then for each step of its end."""


class EnginePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool was told."""

    concurrency: int
    poll_interval: float
    base_retry_delay: float
    queues: tuple[str, ...] | None
    lease: float
    allow: list[str] | None
    errors: ErrorRules | None
    max_leaked_threads: int
    loop_patience: float


class Engine:
    """Claims and runs tasks on the event loop it was made in, once.

    It is one asyncio task that opens what it needs, takes turns until it is to stop, and closes
    everything however it ends.
    """

    def __init__(
        self,
        storage: BaseStorage,
        plan: EnginePlan,
        tally: Tally,
        dispatcher: Dispatcher,
        *,
        open_storage: Callable[[], Awaitable[None]],
        close_storage: Callable[[], Awaitable[None]],
    ) -> None:
        self._storage = storage
        self._clock = storage.clock
        self._plan = plan
        self._tally = tally
        self._events = dispatcher
        self._open_storage = open_storage
        self._close_storage = close_storage
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._stop_asked: asyncio.Future[None] = self._loop.create_future()
        self._error: Exception | None = None
        self._runs: Runs | None = None
        self._turns: Turns | None = None
        self._scheduling = Scheduling(storage, dispatcher, plan.poll_interval)
        self._threads: ThreadSlots | None = None
        self._is_recycling_told = False
        self._life = self._loop.create_task(self._live(), name="omniq-pool")

    # What the pool asks of it

    @property
    def running(self) -> bool:
        """Whether it claims tasks."""
        has_begun = self._started.done() and self._started.exception() is None
        return has_begun and not self._stop_asked.done()

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to stop, or has ended by itself."""
        return self._stop_asked.done()

    @property
    def has_ended(self) -> bool:
        """Whether everything it had opened is closed again, or its loop is gone with all of it."""
        return self._life.done() or self._loop.is_closed()

    @property
    def active(self) -> int:
        """How many tasks run now."""
        return 0 if self._runs is None else len(self._runs.active)

    @property
    def leaked_threads(self) -> int:
        """Threads that still run what was given up."""
        return 0 if self._threads is None else self._threads.leaked

    @property
    def is_recycling(self) -> bool:
        """Whether too many threads hang in calls that were given up to begin with any more."""
        return self.leaked_threads >= self._plan.max_leaked_threads

    async def begin(self) -> None:
        """Return once it claims tasks; raises when that cannot be, with everything closed again."""
        try:
            await asyncio.wait((self._started,))
        except asyncio.CancelledError:
            self._life.cancel()
            await asyncio.wait((self._life,))
            raise
        if self._started.exception() is not None:
            # Closed before the caller hears of it: it may want to begin anew at once.
            await asyncio.wait((self._life,))
        self._started.result()
        if self._stop_asked.done():
            raise PoolStopped("the pool was stopped before it had started")

    async def end(self, timeout: float | None, cancel_in_flight: bool) -> bool:
        """Have it stop, and wait for that; whether it stopped of itself within `timeout`."""
        if self.has_ended:
            return True
        if not self._stop_asked.done():
            self._stop_asked.set_result(None)
        self._wake.set()
        if cancel_in_flight and self._runs is not None:
            self._runs.stop_all("shutdown")
        in_time = await self._clock.wait(self._life, timeout)
        if not in_time:
            await self._force()
        return in_time

    async def until_empty(self) -> None:
        """Return when nothing is due and nothing runs, or when it has ended."""
        assert self._turns is not None
        await self._scheduling.turn()
        ends = (self._turns.until_drained(), self._life)
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)

    async def wait(self) -> None:
        """Return when it has ended."""
        if not self.has_ended:
            await asyncio.wait((self._life,))

    def raise_error(self) -> None:
        """Raise what it died of, if it did, once."""
        error, self._error = self._error, None
        if isinstance(error, OmniqError):
            raise error
        if error is not None:
            raise PoolStopped(f"the pool died of an unexpected error: {error!r}") from error

    async def _force(self) -> None:
        """End it although it is out of time, and the storage perhaps does not answer."""
        if self._runs is not None:
            self._runs.stop_all("shutdown", SHORT_GRACE)
        for patience in _FORCE:
            if await self._clock.wait(self._life, patience):
                return
            self._life.cancel()

    # The life itself

    async def _live(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                turns = await self._set_up(stack)
                self._started.set_result(None)
                await self._take_turns(turns)
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
            # Whoever waited for it may have given up: nobody else needs to hear of it.
            self._started.exception()
            if not self._stop_asked.done():
                self._stop_asked.set_result(None)

    async def _take_turns(self, turns: Turns) -> None:
        try:
            await turns.run()
        except Exception as error:
            # Broken beyond what it can repair: end, and say so to whoever stops the pool.
            self._error = error
            self._tell_failure("pool", error)
        finally:
            if not self._stop_asked.done():
                self._stop_asked.set_result(None)

    async def _set_up(self, stack: AsyncExitStack) -> Turns:
        """Open everything; whatever was opened is on the stack, to be closed in reverse order."""
        storage, plan = self._storage, self._plan
        stack.callback(log.attach(self._events))
        self._on_exit(stack, "close storage", self._close_storage)
        await self._open_storage()
        await self._take_lease()
        stack.callback(self._say_goodbye, storage.owner, self._tally.released)
        functions = FunctionCache(plan.allow)
        self._tally.hooks = hooks = Hooks(functions, self._events)
        maintenance = Maintenance(
            storage,
            self._events,
            Lookout(storage, self._events, lambda: self._tally.breakers),
            hooks,
            lease=plan.lease,
            poll_interval=plan.poll_interval,
        )
        self._runs = runs = self._make_runs(stack, maintenance, functions)
        self._on_exit(stack, "finish hooks", hooks.finish)
        self._turns = turns = self._make_turns(runs)
        self._on_exit(stack, "retire", turns.retire)
        self._start_heartbeat(stack, runs, turns)
        self._on_exit(stack, "pass on progress", maintenance.pass_on_progress)
        stack.callback(storage.on_cancel(lambda task_id: self._in_loop(turns.on_cancel, task_id)))
        self._on_exit(stack, "hand back", turns.hand_back)
        short = min(plan.lease * _SHORT_LEASE_MARGIN, _ENOUGH_MARGIN)
        margin = max(plan.lease * _LEASE_MARGIN, short)
        self._start_side_loops(
            stack,
            listen=turns.listen,
            count=turns.count_queue,
            sweep=lambda: runs.sweep(lambda: storage.lease_remaining, margin),
            maintenance=maintenance.run,
            scheduling=self._scheduling.run,
        )
        self._events.emit(events.WorkerStarted(owner=storage.owner, concurrency=plan.concurrency))
        return turns

    async def _take_lease(self) -> None:
        plan = self._plan
        for is_last in (False, True):
            try:
                await self._storage.renew(
                    lease=plan.lease, concurrency=plan.concurrency, queues=plan.queues or ()
                )
                return
            except LeaseLost:
                # What used this storage before was fenced; the storage has a fresh id now.
                if is_last:
                    raise

    def _make_runs(
        self, stack: AsyncExitStack, maintenance: Maintenance, functions: FunctionCache
    ) -> Runs:
        storage, plan = self._storage, self._plan
        self._threads = threads = ThreadSlots(self._on_leak)
        stack.callback(threads.close)
        processes = ProcessSlots(
            storage.settings, storage.serializer, plan.allow, self._clock, errors=plan.errors
        )
        self._on_exit(stack, "close processes", processes.close)
        execution = Execution(
            functions,
            clock=self._clock,
            serializer=storage.serializer,
            base_retry_delay=plan.base_retry_delay,
            errors=plan.errors,
            threads=threads,
            processes=processes,
        )
        return Runs(
            execution,
            self._tally,
            self._clock,
            host=PoolHost(storage, self._events, threads, execution, maintenance.report),
            default_timeout=storage.settings.default_timeout,
            wake=self._wake.set,
            is_ending=lambda: self._life.cancelling() > 0,
        )

    def _make_turns(self, runs: Runs) -> Turns:
        return Turns(
            self._storage,
            runs,
            self._tally,
            self._events,
            concurrency=self._plan.concurrency,
            poll_interval=self._plan.poll_interval,
            queues=self._plan.queues,
            wake=self._wake,
            stop_asked=self._stop_asked,
            is_recycling=lambda: self.is_recycling,
        )

    def _start_heartbeat(self, stack: AsyncExitStack, runs: Runs, turns: Turns) -> None:
        watchdog = Watchdog(
            self._clock,
            self._events,
            patience=self._plan.loop_patience,
            active=runs.active.values,
            owner=lambda: self._storage.owner,
        )
        heartbeat = Heartbeat(
            self._storage,
            lease=self._plan.lease,
            concurrency=self._plan.concurrency,
            queues=self._plan.queues or (),
            on_renewal=lambda renewal: self._in_loop(turns.on_renewal, renewal),
            on_loss=lambda: self._in_loop(turns.on_loss),
            on_failure=lambda error: self._tell_failure("heartbeat", error),
            may_beat=watchdog.may_beat,
            is_stalled=watchdog.is_blocked,
            beside=watchdog.watch,
        )
        heartbeat.start()
        self._on_exit(stack, "stop heartbeat", heartbeat.stop)

    def _start_side_loops(
        self, stack: AsyncExitStack, **loops: Callable[[], Awaitable[None]]
    ) -> None:
        for name, loop in loops.items():
            side_task = self._loop.create_task(self._keep_going(name, loop), name=f"omniq-{name}")
            stack.push_async_callback(_cancel, side_task)

    async def _keep_going(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        """Do it for as long as the pool lives; when it fails, that is told and it begins again."""
        while True:
            try:
                await loop()
            except Exception as error:
                self._tell_failure(name, error)
            await self._clock.sleep(_RESTART_PAUSE)

    def _on_exit(
        self, stack: AsyncExitStack, name: str, close: Callable[[], Awaitable[None]]
    ) -> None:
        """Close that at the end; a failure is told of, and the rest is closed as well."""

        async def close_and_tell() -> None:
            try:
                await close()
            except Exception as error:
                self._tell_failure(name, error)

        stack.push_async_callback(close_and_tell)

    def _in_loop(self, call: Callable[..., None], *args: Any) -> None:
        """From the heartbeat's thread, or from whoever cancels: do it on the pool's own loop."""
        # A loop that was closed under the pool has nothing to stop any more.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)

    def _on_leak(self) -> None:
        if self.is_recycling and not self._is_recycling_told:
            self._events.emit(
                events.WorkerRecycling(
                    owner=self._storage.owner, leaked_threads=self.leaked_threads
                )
            )
        self._is_recycling_told = self.is_recycling
        self._wake.set()

    def _say_goodbye(self, owner: str, released_before: int) -> None:
        released = self._tally.released - released_before
        self._events.emit(events.WorkerStopped(owner=owner, released=released))

    def _tell_failure(self, chore: str, error: Exception) -> None:
        self._events.emit(events.ChoreFailed.of(chore, error))


async def _cancel(side_task: asyncio.Task[None]) -> None:
    side_task.cancel()
    await asyncio.wait((side_task,))
