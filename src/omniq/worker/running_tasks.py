"""The runs a worker has under way: begun, stopped when they must end, kept until recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from omniq.clock import Clock
from omniq.models import Task, TaskError
from omniq.outcomes import Failed, Outcome, Released, Succeeded
from omniq.tasks.context import TaskContext, enter
from omniq.tasks.steps import Host
from omniq.worker.executors.execution import Execution, Run, StopReason
from omniq.worker.pool_stats import Tally

GRACE = 1.0
"""Seconds a run that was told to stop has to end before it is told once more, then given up."""

SHORT_GRACE = 0.2
"""The same when the whole worker is out of time."""

_STOP_TRIES = 2
_FOREVER = float("inf")
_SHORTEST_SWEEP, _SWEEP_WITHOUT_LEASE = 0.001, 0.05


class Runs:
    """Runs tasks on this event loop. `active` are under way, `finished` wait to be recorded.

    `wake` is called when one has finished; `is_ending` says that the loop itself is being torn
    down, so that a run which is cancelled now has not failed.
    """

    def __init__(
        self,
        execution: Execution,
        tally: Tally,
        clock: Clock,
        *,
        host: Host,
        default_timeout: float | None,
        wake: Callable[[], None],
        is_ending: Callable[[], bool],
    ) -> None:
        self._execution = execution
        self._tally = tally
        self._clock = clock
        self._host = host
        self._default_timeout = default_timeout
        self._wake = wake
        self._is_ending = is_ending
        self._loop = asyncio.get_running_loop()
        self._sweep_now: asyncio.Future[None] = self._loop.create_future()
        self._next_sweep = _FOREVER
        self._deaf: set[asyncio.Task[None]] = set()
        self.active: dict[str, Run] = {}
        self.finished: list[Outcome] = []
        self.frees_others = False
        """Whether something has finished that kept others waiting: at a limit, or as a suspect."""

    def start(self, task: Task) -> None:
        """Begin a run of a task that has been claimed."""
        before = self.active.get(task.id)
        if before is not None and before.completed is not None:
            # A task that repeats, and has not returned since its transaction ended that run.
            self._give_up(before)
        timeout = self._default_timeout if task.timeout is None else task.timeout
        run = Run(task, self._clock.monotonic(), timeout)
        self.active[task.id] = run
        run.job = self._loop.create_task(self._execute(run, timeout))
        if run.deadline < self._next_sweep:
            self._sweep_soon()

    def take_finished(self, limit: int | None = None) -> list[Outcome]:
        """What has finished since the last time, to be recorded; the first `limit` of it."""
        outcomes = self.finished[:limit]
        del self.finished[:limit]
        return outcomes

    def put_back(self, outcomes: list[Outcome]) -> None:
        """Keep outcomes that could not be recorded, before those that came later."""
        self.finished[:0] = outcomes

    def cancel(self, task_id: str) -> None:
        """Somebody does not want the task any more."""
        run = self.active.get(task_id)
        if run is not None and run.stop_reason is None:
            self._stop(run, "cancelled", GRACE)

    def stop_all(self, reason: StopReason, grace: float = GRACE) -> None:
        """Have all runs end; those that have been told before have no more than `grace` left."""
        latest = self._clock.monotonic() + grace
        for run in list(self.active.values()):
            if run.stop_reason is None:
                self._stop(run, reason, grace)
            elif run.deadline > latest:
                run.deadline = latest
                self._sweep_soon()

    def give_up_all(self, reason: StopReason) -> None:
        """Decide now what all runs came to, whether or not they end."""
        for run in list(self.active.values()):
            run.stop_reason = run.stop_reason or reason
            self._give_up(run)

    async def sweep(self, lease_remaining: Callable[[], float], margin: float) -> None:
        """Stop the runs that are past their deadline, and all of them `margin` before the lease ends."""
        while True:
            now = self._clock.monotonic()
            for run in [run for run in self.active.values() if run.deadline <= now]:
                self._stop(run, "timeout", SHORT_GRACE if run.stops else GRACE)
            trusted = lease_remaining() - margin
            if trusted <= 0:
                self.stop_all("lease", SHORT_GRACE)
            deadlines = [run.deadline - now for run in self.active.values()]
            pause = max(_SHORTEST_SWEEP, min([*deadlines, max(trusted, _SWEEP_WITHOUT_LEASE)]))
            self._next_sweep = now + pause
            await self._clock.wait(self._sweep_now, pause)
            self._sweep_now = self._loop.create_future()

    async def _execute(self, run: Run, timeout: float | None) -> None:
        task = run.task
        context = TaskContext(task, timeout, self._host)
        # Before it is told of: a listener finds the task in `current_task()`, and what it puts into
        # context variables, such as a span, is there for the function.
        enter(context)
        self._tally.started(task)
        try:
            outcome = await self._execution.run(run, context)
        except BaseException as error:
            # Execution promises not to raise; should it break that, one task fails and no slot is lost.
            record = TaskError.from_exception(error, timestamp=self._clock.now())
            outcome = Failed(task.id, task.token, record, "internal")
        if self.active.get(task.id) is run:
            self._finish(run, outcome)

    def _finish(self, run: Run, outcome: Outcome) -> None:
        task = run.task
        del self.active[task.id]
        outcome = run.completed or outcome
        if type(outcome) is not Succeeded and run.stop_reason is None and self._is_ending():
            outcome = Released(task.id, task.token)
        self._tally.ran(task, self._clock.monotonic() - run.started, run.stop_reason or "")
        self.finished.append(outcome)
        if task.limits or task.breakers or task.crashes:
            self.frees_others = True
        self._wake()

    def _stop(self, run: Run, reason: StopReason, grace: float) -> None:
        """Have a run end, for that reason; the sweeper comes back to those that do not."""
        run.stop_reason = run.stop_reason or reason
        if run.context is None or run.stops >= _STOP_TRIES:
            self._give_up(run)
            return
        run.context.cancelled = True
        run.stops += 1
        run.deadline = self._clock.monotonic() + grace
        if run.job is not None:
            run.job.cancel()
        self._sweep_soon()

    def _give_up(self, run: Run) -> None:
        """Never begun, or deaf to being cancelled: its outcome is decided without it."""
        if run.context is not None:
            run.context.cancelled = True
        self._finish(run, self._execution.failure_of(run))
        if run.job is not None and not run.job.done():
            # Held until it ends: the event loop itself does not keep what it runs.
            self._deaf.add(run.job)
            run.job.add_done_callback(self._deaf.discard)
        run.give_up()

    def _sweep_soon(self) -> None:
        if not self._sweep_now.done():
            self._sweep_now.set_result(None)
