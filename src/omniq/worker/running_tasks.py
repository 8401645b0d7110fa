"""The tasks that a worker runs: started, stopped when they must end, held until recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from omniq.clock import Clock
from omniq.concurrency.futures import finish
from omniq.errors import FunctionNotFound
from omniq.models import NO_TIMEOUT, Task, TaskError
from omniq.outcomes import Failed, Outcome, Succeeded
from omniq.storage.base import BaseStorage
from omniq.tasks.context import TaskContext, enter
from omniq.tasks.steps import WorkerServices
from omniq.worker.executors.execution import Execution, Run, StopReason
from omniq.worker.pool_events import PoolEvents
from omniq.worker.stats_recorder import StatsRecorder
from omniq.worker.unknown_functions import UnknownFunctions, newer_version

GRACE = 1.0
"""Seconds that a stopped run has to end: then it is stopped once more, and then given up."""

SHORT_GRACE = 0.2
"""The same when the whole worker is out of time."""

_STOP_TRIES = 2
_FOREVER = float("inf")
_SHORTEST_SWEEP, _SWEEP_WITHOUT_LEASE = 0.001, 0.05


class RunningTasks:
    """Runs tasks on this event loop. `active` are running, `finished` wait to be recorded."""

    def __init__(
        self,
        execution: Execution,
        stats: StatsRecorder,
        clock: Clock,
        pool: PoolEvents,
        *,
        services: WorkerServices,
        unknown: UnknownFunctions,
        default_timeout: float | None,
    ) -> None:
        self._execution = execution
        self._unknown = unknown
        self._stats = stats
        self._clock = clock
        self._pool = pool
        self._services = services
        self._default_timeout = default_timeout
        self._loop = asyncio.get_running_loop()
        self._sweep_now: asyncio.Future[None] = self._loop.create_future()
        self._next_sweep = _FOREVER
        self._given_up: set[asyncio.Task[None]] = set()
        self.active: dict[str, Run] = {}
        self.finished: list[Outcome] = []
        self.unblocks_others = False
        """Whether a task has finished that made others wait: at a limit, or as a suspect."""

    def start(self, task: Task) -> None:
        """Start a run of a claimed task."""
        before = self.active.get(task.id)
        if before is not None and before.completed is not None:
            # A repeating task whose transaction has ended its last run, but which has not returned.
            self._give_up(before)
        # As `timeout_of`, without a call: most tasks use the default.
        timeout = task.timeout
        if timeout is None:
            timeout = self._default_timeout
        elif timeout >= NO_TIMEOUT:
            timeout = None
        run = Run(task, self._clock.monotonic(), timeout)
        self.active[task.id] = run
        run.job = self._loop.create_task(self._execute(run, timeout))
        if run.deadline < self._next_sweep:
            self._sweep_soon()

    def take_finished(self, limit: int | None = None) -> list[Outcome]:
        """Remove and return the first `limit` outcomes that wait to be recorded."""
        outcomes = self.finished[:limit]
        del self.finished[:limit]
        return outcomes

    def put_back(self, outcomes: Sequence[Outcome]) -> None:
        """Hold outcomes that could not be recorded, ahead of later ones."""
        self.finished[:0] = outcomes

    def is_run_by(self, task_id: str) -> bool:
        """Whether the caller is the run of that task here, and not what it has left to run beside it."""
        run = self.active.get(task_id)
        if run is None or run.context is None:
            return False
        # A thread waits for what it calls; an async task may have started the call without waiting.
        in_thread = self._execution.find(run.task.func_path).place == "thread"
        return in_thread or run.job is asyncio.current_task()

    def cancel(self, task_id: str) -> None:
        """Stop the task, if it runs here: a caller has cancelled it."""
        run = self.active.get(task_id)
        if run is not None and run.stop_reason is None:
            self._stop(run, "cancelled", GRACE)

    def stop(self, task_id: str, token: int, reason: StopReason) -> None:
        """Stop the run of that claim, if it runs here."""
        run = self.active.get(task_id)
        if run is not None and run.task.token == token and run.stop_reason is None:
            self._stop(run, reason, GRACE)

    def stop_all(self, reason: StopReason, grace: float = GRACE) -> None:
        """Stop all runs. Those that were stopped before have at most `grace` seconds left."""
        latest = self._clock.monotonic() + grace
        for run in list(self.active.values()):
            if run.stop_reason is None:
                self._stop(run, reason, grace)
            elif run.deadline > latest:
                run.deadline = latest
                self._sweep_soon()

    def give_up_all(self, reason: StopReason) -> None:
        """Decide the outcome of all runs now, whether or not they end."""
        for run in list(self.active.values()):
            run.stop_reason = run.stop_reason or reason
            self._give_up(run)

    async def sweep(self, storage: BaseStorage, margin: float) -> None:
        """Stop runs that are past their deadline, and all runs `margin` seconds before the lease ends."""
        while True:
            now = self._clock.monotonic()
            for run in [run for run in self.active.values() if run.deadline <= now]:
                self._stop(run, "timeout", SHORT_GRACE if run.stops else GRACE)
            trusted = storage.lease_remaining - margin
            if trusted <= 0:
                self.stop_all("lease", SHORT_GRACE)
            deadlines = [run.deadline - now for run in self.active.values()]
            pause = max(_SHORTEST_SWEEP, min([*deadlines, max(trusted, _SWEEP_WITHOUT_LEASE)]))
            self._next_sweep = now + pause
            await self._clock.wait(self._sweep_now, pause)
            self._sweep_now = self._loop.create_future()

    async def _execute(self, run: Run, timeout: float | None) -> None:
        task = run.task
        context = TaskContext(task, timeout, self._services)
        # Before the event: a listener finds the task in `current_task()`, and what it puts into
        # context variables, such as a span, is there for the function.
        enter(context)
        try:
            callee = self._execution.find(task.func_path)
            if task.version > callee.version:
                raise newer_version(task, callee.version)
        except FunctionNotFound as error:
            self._refuse(run, self._unknown.release(task, error))
            return
        self._stats.started(task)
        try:
            outcome = await self._execution.run(run, callee, context)
        except BaseException as error:
            # `Execution` promises not to raise. If it does, one task fails and no slot is lost.
            record = TaskError.from_exception(error, timestamp=self._clock.now())
            outcome = Failed(task.id, task.token, record, "internal")
        if self.active.get(task.id) is run:
            self._finish(run, outcome)

    def _refuse(self, run: Run, outcome: Outcome) -> None:
        """End a run that did not start."""
        self._stats.not_started(run.task)
        self._record(run.task, outcome)

    def _finish(self, run: Run, outcome: Outcome) -> None:
        task = run.task
        outcome = run.completed or outcome
        if type(outcome) is not Succeeded and run.stop_reason is None and self._pool.is_ending:
            outcome = self._execution.interrupted(run)
        seconds = self._clock.monotonic() - run.started
        self._stats.ran(task, seconds, run.stop_reason or "", outcome)
        self._record(task, outcome)

    def _record(self, task: Task, outcome: Outcome) -> None:
        """Free the slot of the task, and hold its outcome until it is recorded."""
        del self.active[task.id]
        if type(outcome) is Failed:
            outcome = self._stats.with_hook(outcome, task.func_path)
        self.finished.append(outcome)
        if task.limits or task.breakers or task.crashes:
            self.unblocks_others = True
        self._pool.on_finished()

    def _stop(self, run: Run, reason: StopReason, grace: float) -> None:
        """Stop a run for that reason. `sweep` returns to runs that do not end."""
        run.stop_reason = run.stop_reason or reason
        if run.context is None or run.stops >= _STOP_TRIES:
            self._give_up(run)
            return
        run.context.cancelled = True
        run.stops += 1
        run.deadline = self._clock.monotonic() + grace
        if run.job is not None:
            # With the reason: middleware tells a timeout from a stop by it.
            run.job.cancel(run.stop_reason)
        self._sweep_soon()

    def _give_up(self, run: Run) -> None:
        """Decide the outcome of a run that never started, or that ignores its cancellation."""
        if run.context is not None:
            run.context.cancelled = True
        self._finish(run, self._execution.failure_of(run))
        if run.job is not None and not run.job.done():
            # Referenced until it ends: the event loop holds only a weak reference.
            self._given_up.add(run.job)
            run.job.add_done_callback(self._given_up.discard)
        run.give_up()

    def _sweep_soon(self) -> None:
        finish(self._sweep_now)
