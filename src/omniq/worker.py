"""Worker pools: claim in batches, run anything, record together, stop cleanly."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypedDict

import msgspec

from omniq import events
from omniq._portal import Portal
from omniq.calls import TaskBuilder
from omniq.context import TaskContext
from omniq.errors import InvalidTask, LeaseLost, OmniqError, PoolStopped, ShutdownTimeout
from omniq.events import Dispatcher
from omniq.execution import Execution, Run, StopReason
from omniq.functions import FunctionCache
from omniq.heartbeat import Heartbeat
from omniq.maintenance import Maintenance
from omniq.models import Task, check_int, check_name, check_seconds
from omniq.outcomes import Cancelled, Failed, Outcome, Released, Retried, Snoozed, Succeeded
from omniq.processes import ProcessSlots
from omniq.storage.base import BaseStorage, Renewal
from omniq.threads import ThreadSlots

_STOP_GRACE = 1.0
"""Seconds a cancelled run has to end before it is cancelled once more, and then given up."""

_STOP_TRIES = 2
_LONGEST_BACKOFF = 5.0
_DURATIONS = 100
_FOREVER = float("inf")


class PoolStats(msgspec.Struct, frozen=True, kw_only=True):
    """How a pool is doing. `queued_tasks` is as of the last claim; times are milliseconds."""

    workers_count: int
    active_workers: int
    queued_tasks: int
    completed_tasks: int
    failed_tasks: int
    average_exec_time: float
    leaked_threads: int = 0
    stale_outcomes: int = 0


class PoolOptions(TypedDict, total=False):
    """What a pool can be told, by name."""

    concurrency: int
    poll_interval: float
    base_retry_delay: float
    queues: Sequence[str] | None
    lease: float | None
    allow: Sequence[str] | None


class AsyncWorkerPool:
    """Runs the tasks of a storage, at most `concurrency` at a time, on this event loop.

    Sync functions run in its own threads, those with `executor="process"` in its own processes.
    `allow` restricts it to functions under these prefixes. `lease` is how long others wait for a
    sign of life before they take over what this pool holds.
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
    ) -> None:
        check_int("concurrency", concurrency, low=1)
        check_seconds("poll_interval", poll_interval, above_zero=True)
        check_seconds("base_retry_delay", base_retry_delay)
        check_seconds("lease", lease, above_zero=True)
        for queue in queues or ():
            check_name("queue", queue)
        self._storage = storage
        self._clock = storage.clock
        self._concurrency = concurrency
        self._poll_interval = poll_interval
        self._base_retry_delay = base_retry_delay
        self._queues = None if queues is None else tuple(queues)
        self._lease = storage.settings.lease if lease is None else lease
        self._allow = None if allow is None else list(allow)
        self._default_timeout = storage.settings.default_timeout
        self._builder = TaskBuilder(storage.settings, storage.clock)
        self.events = Dispatcher()
        self.running = False
        self._is_stopped = False
        self._runs: dict[str, Run] = {}
        self._finished: list[Outcome] = []
        self._durations: deque[float] = deque(maxlen=_DURATIONS)
        self._counts = {"completed": 0, "failed": 0, "stale": 0, "queued": 0}

    # The life of a pool

    async def start(self) -> None:
        """Begin to claim and run tasks; returns once the pool runs."""
        if self.running:
            raise InvalidTask("the pool runs already")
        self._owns_storage = not self._storage.is_open
        if self._owns_storage:
            await self._storage.open()
        # Made here and not in __init__: they belong to the loop that runs the pool.
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._sweep_now: asyncio.Future[None] = loop.create_future()
        self._next_sweep = _FOREVER
        self._may_claim = True
        self._failures = 0
        self._unknown: dict[str, int] = {}
        self._turn_began = 0.0
        self._threads = ThreadSlots(self._concurrency)
        self._processes = ProcessSlots(
            self._storage.settings, self._storage.serializer, self._allow
        )
        self._execution = Execution(
            FunctionCache(self._allow),
            clock=self._clock,
            serializer=self._storage.serializer,
            base_retry_delay=self._base_retry_delay,
            threads=self._threads,
            processes=self._processes,
        )
        self._maintenance = Maintenance(self._storage, self.events, lease=self._lease)
        await self._storage.renew(
            lease=self._lease, concurrency=self._concurrency, queues=self._queues or ()
        )
        self._counts["queued"] = await self._storage.count_waiting()
        self._heartbeat = Heartbeat(
            self._storage,
            lease=self._lease,
            concurrency=self._concurrency,
            queues=self._queues or (),
            on_renewal=self._on_renewal,
            on_loss=self._on_loss,
            may_beat=self._may_beat,
        )
        self._heartbeat.start()
        self._stop_listening = self._storage.on_cancel(self._on_cancel)
        self._is_stopping = self._is_stopped = False
        self.running = True
        self._main = loop.create_task(self._run_loop(), name="omniq-pool")
        self._side_tasks = [
            loop.create_task(self._listen(), name="omniq-listener"),
            loop.create_task(self._sweep(), name="omniq-sweeper"),
            loop.create_task(self._maintenance.run(), name="omniq-maintenance"),
        ]
        self.events.emit(
            events.WorkerStarted(owner=self._storage.owner, concurrency=self._concurrency)
        )

    async def stop(self, timeout: float | None = None, cancel_in_flight: bool = False) -> None:
        """Claim no more, let what runs finish, and end.

        After `timeout` seconds, or at once with `cancel_in_flight`, what still runs is stopped and
        given back unharmed: PENDING, no attempt spent. Raises `ShutdownTimeout` when the time ran
        out. Never waits for a poll. May be called twice.
        """
        check_seconds("timeout", timeout)
        if not self.running:
            return
        self._is_stopping, self.running = True, False
        self._wake.set()
        if cancel_in_flight:
            self._stop_all("shutdown")
        ended = await self._clock.wait(self._main, timeout)
        if not ended:
            self._stop_all("shutdown")
            await self._clock.wait(self._main, _STOP_GRACE * (_STOP_TRIES + 2))
        await self._tear_down()
        if not ended:
            raise ShutdownTimeout

    async def _tear_down(self) -> None:
        self._stop_listening()
        for side_task in (*self._side_tasks, self._main):
            side_task.cancel()
        for side_task in (*self._side_tasks, self._main):
            with suppress(asyncio.CancelledError):
                await side_task
        self._threads.close()
        await self._processes.close()
        with suppress(OmniqError):
            await self._maintenance.pass_on_progress()
        await self._heartbeat.stop()
        self._is_stopped = True
        self.events.emit(events.WorkerStopped(owner=self._storage.owner, released=len(self._runs)))
        if self._owns_storage:
            await self._storage.close()

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

    async def run_until_empty(self) -> None:
        """Run everything that is due, and what that makes due, then stop."""
        if not self.running:
            await self.start()
        drained = self._loop.create_task(self._drained.wait())
        await asyncio.wait((drained, self._main), return_when=asyncio.FIRST_COMPLETED)
        drained.cancel()
        await self.stop()

    async def submit(self, func: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> str:
        """Enqueue a call on this pool's storage; its task id. `QueueFull` when there is no room."""
        if self._is_stopped:
            raise PoolStopped("the pool has been stopped and takes no more tasks")
        if not self._storage.is_open:
            await self._storage.open()
        task_id = await self._storage.enqueue(self._builder.build(func, args, kwargs))
        self._counts["queued"] += 1
        return task_id

    def stats(self) -> PoolStats:
        """How the pool is doing."""
        durations = self._durations
        average = sum(durations) / len(durations) * 1000 if durations else 0.0
        return PoolStats(
            workers_count=self._concurrency,
            active_workers=len(self._runs),
            queued_tasks=max(0, self._counts["queued"]),
            completed_tasks=self._counts["completed"],
            failed_tasks=self._counts["failed"],
            average_exec_time=average,
            leaked_threads=self._threads.leaked if hasattr(self, "_threads") else 0,
            stale_outcomes=self._counts["stale"],
        )

    # The loop

    async def _run_loop(self) -> None:
        while True:
            self._wake.clear()
            outcomes, self._finished = self._finished, []
            asked = 0
            if self._may_claim and not self._is_stopping:
                asked = self._concurrency - len(self._runs)
            claimed: list[Task] = []
            if outcomes or asked:
                claimed = await self._turn(outcomes, asked)
                for task in claimed:
                    self._start(task)
            if self._is_idle(asked, claimed):
                self._drained.set()
                if self._is_stopping:
                    return
            if not self._finished:
                await self._wake.wait()

    def _is_idle(self, asked: int, claimed: list[Task]) -> bool:
        nothing_left = not self._runs and not self._finished
        return nothing_left and (self._is_stopping or (asked > 0 and not claimed))

    async def _turn(self, outcomes: list[Outcome], limit: int) -> list[Task]:
        """Record what finished and claim into the free slots, in one step."""
        self._turn_began = self._clock.monotonic()
        try:
            recorded, claimed = await self._storage.record_and_reserve(
                outcomes, limit, queues=self._queues
            )
        except LeaseLost:
            # What had finished was given back with the rest; another worker runs it again.
            self._count_stale(outcomes)
            self._on_loss_in_loop()
            return []
        except OmniqError as error:
            self._finished[:0] = outcomes
            await self._back_off(error)
            return []
        finally:
            self._turn_began = 0.0
        self._failures = 0
        self._count(outcomes, recorded)
        if limit:
            self._counts["queued"] -= len(claimed)
            # Fewer than asked for: nothing more is due, until a hint or the next poll says so.
            self._may_claim = len(claimed) == limit
        return claimed

    async def _back_off(self, error: OmniqError) -> None:
        """The storage is in trouble: wait a little, longer each time, and go on."""
        self._failures += 1
        self.events.emit(events.ChoreFailed(chore="turn", error=str(error)))
        longest = min(_LONGEST_BACKOFF, 0.05 * 2 ** min(self._failures, 10))
        await self._clock.sleep(longest * (0.5 + self._clock.random() / 2))
        self._may_claim = True
        self._wake.set()

    async def _listen(self) -> None:
        """Let the loop claim again when there may be work, and at every poll."""
        while True:
            try:
                await self._storage.wait_for_work(self._poll_interval)
            except OmniqError:
                await self._clock.sleep(self._poll_interval)
            self._may_claim = True
            self._wake.set()

    # Runs

    def _start(self, task: Task) -> None:
        timeout = self._default_timeout if task.timeout is None else task.timeout
        run = Run(task, self._clock.monotonic(), timeout)
        self._runs[task.id] = run
        run.job = self._loop.create_task(self._execute(run, timeout))
        if run.deadline < self._next_sweep:
            self._sweep_soon()

    async def _execute(self, run: Run, timeout: float | None) -> None:
        if self.events.active:
            self.events.emit(events.TaskStarted(**_facts(run.task)))
        context = TaskContext(run.task, timeout, self._maintenance.report)
        outcome = await self._execution.run(run, context)
        if self._runs.get(run.task.id) is run:
            self._finish(run, outcome)

    def _finish(self, run: Run, outcome: Outcome) -> None:
        del self._runs[run.task.id]
        seconds = self._clock.monotonic() - run.started
        self._durations.append(seconds)
        if self.events.active:
            self._tell(run, outcome, seconds)
        self._finished.append(outcome)
        self._wake.set()

    def _stop_run(self, run: Run, reason: StopReason) -> None:
        """Have a run end, for that reason; the sweeper comes back to those that do not."""
        run.stop_reason = run.stop_reason or reason
        if run.context is None or run.stops >= _STOP_TRIES:
            # Never begun, or deaf to being cancelled: its outcome is decided without it.
            if run.job is not None:
                run.job.cancel()
            self._finish(run, self._execution.failure_of(run))
            return
        run.context.cancelled = True
        run.stops += 1
        run.deadline = self._clock.monotonic() + _STOP_GRACE
        if run.job is not None:
            run.job.cancel()
        self._sweep_soon()

    def _stop_all(self, reason: StopReason) -> None:
        for run in list(self._runs.values()):
            self._stop_run(run, reason)

    async def _sweep(self) -> None:
        """Stop the runs that are past their deadline, and all of them before the lease ends."""
        while True:
            now = self._clock.monotonic()
            for run in [run for run in self._runs.values() if run.deadline <= now]:
                self._stop_run(run, "timeout")
            if self._runs and self._storage.lease_remaining <= self._lease * 0.1:
                self._stop_all("lease")
            deadlines = [run.deadline - now for run in self._runs.values()]
            trust = self._storage.lease_remaining - self._lease * 0.1
            pause = max(0.001, min([*deadlines, max(trust, 0.05)]))
            self._next_sweep = now + pause
            await self._clock.wait(self._sweep_now, pause)
            self._sweep_now = self._loop.create_future()

    def _sweep_soon(self) -> None:
        if not self._sweep_now.done():
            self._sweep_now.set_result(None)

    # Leases and cancellation. The heartbeat calls from its own thread.

    def _on_renewal(self, renewal: Renewal) -> None:
        self._loop.call_soon_threadsafe(self._apply_renewal, renewal)

    def _on_loss(self) -> None:
        self._loop.call_soon_threadsafe(self._on_loss_in_loop)

    def _on_cancel(self, task_id: str) -> None:
        self._loop.call_soon_threadsafe(self._cancel_run, task_id)

    def _may_beat(self) -> bool:
        """Whether the event loop is alive, or blocked for no longer than its tasks may run."""
        return True

    def _apply_renewal(self, renewal: Renewal) -> None:
        for task_id in renewal.cancelled:
            self._cancel_run(task_id)
        waiting = {outcome.task_id for outcome in self._finished}
        unknown = {
            task_id: token
            for task_id, token in renewal.held.items()
            if task_id not in self._runs and task_id not in waiting
        }
        # Only what was unknown last time too, and with no claim under way whose reply may tell.
        if not self._turn_began:
            for task_id, token in unknown.items():
                if self._unknown.get(task_id) == token:
                    self._finished.append(Released(task_id, token))
                    self._wake.set()
        self._unknown = unknown

    def _cancel_run(self, task_id: str) -> None:
        run = self._runs.get(task_id)
        if run is not None and run.stop_reason is None:
            self._stop_run(run, "cancelled")

    def _on_loss_in_loop(self) -> None:
        self.events.emit(events.LeaseLost(owner=self._storage.owner))
        for run in list(self._runs.values()):
            self._stop_run(run, "lease")

    # Counting and telling

    def _count(self, outcomes: list[Outcome], recorded: list[bool]) -> None:
        counts = self._counts
        for outcome, was_recorded in zip(outcomes, recorded, strict=True):
            if not was_recorded:
                counts["stale"] += 1
                self.events.emit(events.StaleRefused(id=outcome.task_id, token=outcome.token))
            elif isinstance(outcome, Succeeded):
                counts["completed"] += 1
            elif isinstance(outcome, Retried | Failed):
                counts["failed"] += 1

    def _count_stale(self, outcomes: list[Outcome]) -> None:
        self._count(outcomes, [False] * len(outcomes))

    def _tell(self, run: Run, outcome: Outcome, seconds: float) -> None:
        facts = _facts(run.task)
        match outcome:
            case Succeeded():
                self.events.emit(events.TaskSucceeded(**facts, seconds=seconds))
            case Retried(error=error, eta=eta) if eta is not None:
                self.events.emit(events.TaskRetried(**facts, error=error.error_type, retry_at=eta))
            case Failed(error=error, reason=reason):
                self.events.emit(events.TaskFailed(**facts, error=error.error_type))
                self.events.emit(events.TaskDead(**facts, reason=reason))
            case Cancelled(reason=reason):
                self.events.emit(events.TaskCancelled(**facts, reason=reason))
            case Snoozed(eta=eta):
                self.events.emit(events.TaskSnoozed(**facts, until=eta))
            case _:
                self.events.emit(events.TaskReleased(**facts, reason=run.stop_reason or ""))


def _facts(task: Task) -> dict[str, Any]:
    return {
        "id": task.id,
        "func_path": task.func_path,
        "queue": task.queue,
        "attempt": task.attempts + 1,
    }


class WorkerPool:
    """The same pool for blocking code, on a thread and an event loop of its own."""

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
    ) -> None:
        self._portal = Portal()
        self._pool = AsyncWorkerPool(
            storage,
            concurrency,
            poll_interval,
            base_retry_delay,
            queues=queues,
            lease=lease,
            allow=allow,
        )

    @classmethod
    def on(cls, portal: Portal, pool: AsyncWorkerPool) -> WorkerPool:
        """The blocking face of a pool that shares somebody else's event loop."""
        blocking = cls.__new__(cls)
        blocking._portal, blocking._pool = portal, pool
        return blocking

    @property
    def running(self) -> bool:
        """Whether the pool claims tasks."""
        return self._pool.running

    def start(self) -> None:
        """Begin to claim and run tasks; returns once the pool runs."""
        self._portal.run(self._pool.start())

    def stop(self, timeout: float | None = None, cancel_in_flight: bool = False) -> None:
        """Claim no more, let what runs finish, and end: see `AsyncWorkerPool.stop`."""
        self._portal.run(self._pool.stop(timeout, cancel_in_flight))

    def run_until_empty(self) -> None:
        """Run everything that is due, and what that makes due, then stop."""
        self._portal.run(self._pool.run_until_empty())

    def submit(self, func: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> str:
        """Enqueue a call on this pool's storage; its task id. `QueueFull` when there is no room."""
        return self._portal.run(self._pool.submit(func, *args, **kwargs))

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
