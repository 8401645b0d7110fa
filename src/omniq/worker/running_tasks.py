"""The tasks that a worker runs: started, stopped when they must end, held until recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from contextvars import copy_context
from typing import Any

from omniq.clock import Clock
from omniq.concurrency.coroutines import go_on
from omniq.concurrency.futures import finish
from omniq.errors import FunctionNotFound
from omniq.models import NO_TIMEOUT, Task, TaskError
from omniq.outcomes import Failed, Outcome, Succeeded
from omniq.storage.base import BaseStorage
from omniq.tasks.context import TaskContext, enter
from omniq.tasks.signature import Callee
from omniq.worker.batches import Batches, BatchRun, OpenBatch
from omniq.worker.executors.batch_call import BatchCall, Item
from omniq.worker.executors.execution import Execution, Run, StopReason
from omniq.worker.pool_events import PoolEvents
from omniq.worker.stats_recorder import StatsRecorder
from omniq.worker.task_services import TaskServices
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
        services: TaskServices,
        unknown: UnknownFunctions,
    ) -> None:
        self._execution = execution
        self._unknown = unknown
        self._stats = stats
        self._clock = clock
        self._pool = pool
        self._services = services
        self.outputs = services.outputs
        self._default_timeout = services.storage.settings.default_timeout
        self._loop = asyncio.get_running_loop()
        self._sweep_now: asyncio.Future[None] = self._loop.create_future()
        self._next_sweep = _FOREVER
        self._given_up: set[asyncio.Task[None]] = set()
        self.batches = Batches(execution, clock, pool.on_finished, self)
        self.active: dict[str, Run] = {}
        self.finished: list[Outcome] = []
        self._waiting: set[str] = set()
        """The functions of which a run has waited for something before it ended."""
        self._batched: dict[str, Callee] = {}
        """The batched functions that had tasks here."""
        self.unblocks_others = False
        """Whether a task has finished that made others wait: at a limit, or as a suspect."""

    @property
    def slots(self) -> int:
        """How many slots the running tasks occupy: a batch has one."""
        return len(self.active) - self.batches.shared_slots

    def start(self, tasks: Iterable[Task]) -> None:
        """Start a run of each of these claimed tasks, in this order."""
        now, active, runs = self._clock.monotonic(), self.active, list[Run]()
        for task in tasks:
            before = active.get(task.id)
            if before is not None and before.completed is not None:
                # A repeating task whose transaction has ended its last run, but which has not returned.
                self._give_up(before)
            # As `timeout_of`, without a call: most tasks use the default.
            timeout = task.timeout
            if timeout is None:
                timeout = self._default_timeout
            elif timeout >= NO_TIMEOUT:
                timeout = None
            if self._batched and (callee := self._batched_callee(task)) is not None:
                self._collect(task, now, timeout, callee)
                continue
            run = active[task.id] = Run(task, now, timeout)
            runs.append(run)
            if timeout is not None and run.deadline < self._next_sweep:
                self._sweep_soon()
        if runs:
            self._start_runs(runs)

    def _start_runs(self, runs: Iterable[Run]) -> None:
        """Run each in an asyncio task, or together those that are likely not to wait for anything.

        An asyncio task costs more than all else in a run that does not wait. So functions share one, until
        one of their runs has waited.
        """
        together: list[Run] = []
        for run in runs:
            if run.task.func_path not in self._waiting:
                together.append(run)
                continue
            if together:
                self._loop.create_task(self._execute_together(together))
                together = []
            run.job = self._loop.create_task(self._execute(run))
        if together:
            self._loop.create_task(self._execute_together(together))

    async def _execute_together(self, runs: Iterable[Run]) -> None:
        """Run one after the other, up to the first that waits. The others then get another asyncio task."""
        job, left = asyncio.current_task(), iter(runs)
        for run in left:
            if run.is_given_up:
                continue
            run.job = job
            # As in an asyncio task for each: no run has the context variables of another.
            work, context = self._execute(run), copy_context()
            try:
                awaited = context.run(work.send, None)
            except StopIteration:
                continue
            except BaseException:
                self._start_left(left)
                raise
            self._waiting.add(run.task.func_path)
            self._start_left(left)
            await go_on(work, context, awaited)
            return

    def _start_left(self, runs: Iterator[Run]) -> None:
        self._start_runs([run for run in runs if not run.is_given_up])

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

    async def _execute(self, run: Run) -> None:
        task = run.task
        context = TaskContext(task, run.timeout, self._services)
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
        if callee.batch is not None and not _is_action(task):
            self._batched[task.func_path] = callee
            self._collect(task, run.started, run.timeout, callee)
            return
        self._stats.started(task)
        try:
            outcome = await self._execution.run(run, callee, context)
        except BaseException as error:
            outcome = self._internal_failure(task, error)
        if self.outputs.runs:
            await self._flush(task)
        if self.active.get(task.id) is run:
            self._finish(run, outcome)

    def _internal_failure(self, task: Task, error: BaseException) -> Outcome:
        """`Execution` promises not to raise. If it does, one task fails and no slot is lost."""
        record = TaskError.from_exception(error, timestamp=self._clock.now())
        return Failed(task.id, task.token, record, "internal")

    async def _flush(self, task: Task) -> None:
        # The outcome is decided: a stop that comes meanwhile does not change it.
        with suppress(asyncio.CancelledError):
            await self.outputs.flush(task)

    # Batches

    def _batched_callee(self, task: Task) -> Callee | None:
        """The batched function of a task that goes into a batch."""
        callee = self._batched.get(task.func_path)
        if callee is None or task.version > callee.version or _is_action(task):
            return None
        return callee

    def _collect(self, task: Task, now: float, timeout: float | None, callee: Callee) -> None:
        """Put the task into a batch, which runs it."""
        batch = self.batches.open_for(task, callee)
        run = self.active[task.id] = BatchRun(task, now, timeout, batch)
        batch.add(run)

    def begin_item(self, run: BatchRun, call: BatchCall) -> Item | None:
        """Bring the run to its call; None if that may have to wait for something, or fails."""
        task, callee, types = run.task, call.batched, call.batched.types
        if task.workflow is not None and task.workflow.refs:
            return None
        context = self._context_of(run)
        is_watched = self._stats.is_watched
        if is_watched or types.converts_arguments or task.version != callee.version:
            # Nothing else is called in which the task could be asked for.
            enter(context)
        try:
            current = task if task.version == callee.version else callee.upcast(task)
            item = call.enter(context, current)
        except BaseException:
            # What is wrong is said by a run that fails.
            return None
        run.context = context
        if is_watched:
            # A listener may set context variables: no run has those of another.
            copy_context().run(self._stats.started, task)
        else:
            self._stats.started(task)
        return item

    async def execute_item(self, run: BatchRun, call: BatchCall) -> None:
        """Run it from its beginning to its end, with what may have to be waited for."""
        context = self._context_of(run)
        enter(context)
        self._stats.started(run.task)
        await self._conclude_item(run, self._execution.run(run, call.callee, context))

    def end_item(self, run: BatchRun, item: Item) -> Coroutine[Any, Any, None] | None:
        """End a run that `begin_item` has begun; returns the rest if that has to wait for something."""
        if self.active.get(run.task.id) is not run:
            return None
        callee, context, outcome = run.batch.callee, item.context, item.outcome
        if isinstance(outcome, BaseException) or context.unstored or self.outputs.runs:
            return self._end_item(run, item)
        self._finish_item(run, self._execution.returned(run, callee, context, outcome))
        return None

    async def _end_item(self, run: BatchRun, item: Item) -> None:
        enter(item.context)
        end = self._execution.end(run, run.batch.callee, item.context, item.outcome)
        await self._conclude_item(run, end)

    async def _conclude_item(self, run: BatchRun, end: Coroutine[Any, Any, Outcome]) -> None:
        try:
            outcome = await end
        except BaseException as error:
            outcome = self._internal_failure(run.task, error)
        if self.outputs.runs:
            await self._flush(run.task)
        if self.active.get(run.task.id) is run:
            self._finish_item(run, outcome)

    def _finish_item(self, run: BatchRun, outcome: Outcome) -> None:
        self._finish(run, outcome)
        run.end()

    def _context_of(self, run: BatchRun) -> TaskContext:
        if run.deadline < self._next_sweep:
            self._sweep_soon()
        return TaskContext(run.task, run.timeout, self._services)

    def batch_to_fill(
        self, can_claim: bool, is_draining: bool, is_stopping: bool
    ) -> OpenBatch | None:
        """An open batch that wants more tasks. In a pool that stops, what was collected is released."""
        if is_stopping:
            # It has not begun: others run it sooner.
            for run in self.batches.take_collected():
                run.stop_reason = run.stop_reason or "shutdown"
                self._give_up(run)
            return None
        return self.batches.to_fill(can_claim, is_draining=is_draining)

    def _refuse(self, run: Run, outcome: Outcome) -> None:
        """End a run that did not start."""
        self._stats.not_started(run.task)
        self._record(run.task, outcome)

    def _finish(self, run: Run, outcome: Outcome) -> None:
        task = run.task
        context = run.context
        if context is not None and context.completed is not None:
            # The success that a transaction of the run has recorded, whatever happened to it later.
            outcome = context.completed
        if type(outcome) is not Succeeded and run.stop_reason is None and self._pool.is_ending:
            outcome = self._execution.interrupted(run)
        if self.outputs.runs:
            self.outputs.forget(task)
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
        run.interrupt()
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


def _is_action(task: Task) -> bool:
    """Whether the worker does what the task is for, and not its function."""
    return task.workflow is not None and bool(task.workflow.action)
