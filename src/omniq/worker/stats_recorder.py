"""Counts what a pool does, and emits the events of its tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from omniq import events
from omniq.clock import from_micros
from omniq.events import Dispatcher
from omniq.models import Task
from omniq.outcomes import (
    Cancelled,
    Failed,
    Outcome,
    Released,
    Retried,
    Snoozed,
    Succeeded,
    Suspended,
)
from omniq.storage.types import EnqueuedRow
from omniq.worker.dead_hooks import DeadHooks
from omniq.worker.failure_hooks import FailureHooks
from omniq.worker.run_recorder import Line, RunRecorder

_DURATIONS = 100

UNKNOWN_FUNCTION = "unknown function"
"""Why a task did not start whose function cannot run here."""


class StatsRecorder:
    """Counts recorded outcomes, holds the newest durations, and emits the events of tasks.

    Written by the pool's event loop alone; the numbers may be read from any thread.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._events = dispatcher
        self._history: RunRecorder | None = None
        self._lines: dict[tuple[str, str], Line] = {}
        self._durations: deque[float] = deque(maxlen=_DURATIONS)
        self._unreported: dict[tuple[str, int], tuple[Task, float, str]] = {}
        self.completed = 0
        self.failed = 0
        self.retried = 0
        self.released = 0
        self.stale = 0
        self.queued = 0
        """How many tasks wait: as last counted, with what was enqueued and claimed here since."""
        self.high_water = 0
        """The most that `queued` has been."""
        self.breakers: set[str] = set()
        """The breakers of the tasks that this pool has claimed while it had listeners."""
        self.hooks: FailureHooks | None = None
        """Calls the hooks of failed tasks, while the pool runs."""
        self.dead_hooks: DeadHooks | None = None
        """Calls the hooks of dead letters, while the pool runs."""

    def count_in(self, history: RunRecorder) -> None:
        """Count the runs of each minute there."""
        self._history, self._lines = history, history.lines

    def totals(self) -> tuple[int, int, int]:
        """How many runs succeeded, failed for good, and are retried. From any thread."""
        return self.completed, self.failed, self.retried

    @property
    def average_milliseconds(self) -> float:
        """The mean of the newest 100 runs; 0 before the first."""
        # A copy: the thread of a blocking caller may read it while the loop appends.
        newest = list(self._durations)
        return sum(newest) / len(newest) * 1000 if newest else 0.0

    def enqueued(self, rows: Sequence[EnqueuedRow]) -> None:
        """Count tasks that this process has enqueued, and report them."""
        before = self.queued
        self.queued += len(rows)
        if self.queued > self.high_water:
            self.high_water = self.queued
        if not self._events.wants(events.TaskEnqueued):
            return
        for waiting, row in enumerate(rows, start=before + 1):
            self._events.emit(
                events.TaskEnqueued(
                    id=row.id,
                    func_path=row.func_path,
                    queue=row.queue,
                    task_type=row.task_type or "",
                    eta=from_micros(row.visible) if row.visible else None,
                    waiting=waiting,
                )
            )

    def counted(self, waiting: int) -> None:
        """Take over how many tasks the storage says are waiting."""
        self.queued = waiting
        if waiting > self.high_water:
            self.high_water = waiting
            if self._events.wants(events.QueueHighWater):
                self._events.emit(events.QueueHighWater(waiting=waiting))

    def claimed(self, tasks: Sequence[Task]) -> None:
        """Report tasks that were claimed."""
        if tasks:
            self.queued = max(0, self.queued - len(tasks))
        if self._events.wants(events.TaskClaimed):
            for task in tasks:
                self._events.emit(events.TaskClaimed(**event_fields(task), owner=task.owner or ""))
        if self._events.active:
            for task in tasks:
                if task.breakers:
                    self.breakers.update(rule.name for rule in task.breakers)

    @property
    def is_watched(self) -> bool:
        """Whether a listener is called when a run starts."""
        return self._events.active and self._events.wants(events.TaskStarted)

    def started(self, task: Task) -> None:
        """Report a run that starts."""
        if (lines := self._events.task_lines) is not None:
            lines.started(task)
        if self.is_watched:
            self._events.emit(events.TaskStarted(**event_fields(task), owner=task.owner or ""))

    def ran(self, task: Task, seconds: float, stop_reason: str, outcome: Outcome) -> None:
        """Note how long a run took. Its outcome is reported once it is recorded."""
        self._durations.append(seconds)
        line = self._lines.get((task.func_path, task.queue))
        if line is not None and line.left and type(outcome) is Succeeded:
            line.left -= 1
        elif self._history is not None:
            self._history.ran(task, seconds, outcome)
        is_reported = self._events.active
        if is_reported and type(outcome) is Succeeded and self._events.task_lines is None:
            # Most runs succeed, and a log without their lines leaves nothing to report.
            is_reported = self._events.wants(events.TaskSucceeded)
        if is_reported or (self.hooks is not None and self.hooks.has_hook(task.func_path)):
            self._unreported[task.id, task.token] = (task, seconds, stop_reason)

    def not_started(self, task: Task) -> None:
        """Note a task that did not start, since its function cannot run here."""
        if self._events.active:
            self._unreported[task.id, task.token] = (task, 0.0, UNKNOWN_FUNCTION)

    def with_hook(self, outcome: Outcome, func_path: str) -> Outcome:
        """The outcome, and if it makes a dead letter, which hook is recorded with that."""
        if type(outcome) is not Failed or self.dead_hooks is None:
            return outcome
        return self.dead_hooks.recorded_with(outcome, func_path)

    def recorded(self, outcomes: Sequence[Outcome], recorded: Sequence[bool]) -> None:
        """Count the outcomes that the storage has recorded, and those that it refused."""
        for outcome, was_recorded in zip(outcomes, recorded, strict=True):
            if not was_recorded:
                self._refused(outcome)
            elif type(outcome) is Succeeded:
                self.completed += 1
            elif isinstance(outcome, Failed):
                self.failed += 1
            elif isinstance(outcome, Retried):
                self.retried += 1
            elif isinstance(outcome, Released):
                self.released += 1
            if self._unreported:
                self._report(outcome, was_recorded)

    def lost(self, outcomes: Sequence[Outcome]) -> None:
        """Count outcomes that will not be recorded: other workers run the tasks again."""
        self.recorded(outcomes, [False] * len(outcomes))

    def _refused(self, outcome: Outcome) -> None:
        # A task that is released already needs no release: nothing is lost.
        if not isinstance(outcome, Released):
            self.stale += 1
            self._events.emit(events.StaleRefused(id=outcome.task_id, token=outcome.token))

    def _report(self, outcome: Outcome, was_recorded: bool) -> None:
        # By its claim: the next run of the task may have started before this one is reported.
        claim = (outcome.task_id, outcome.token)
        task, seconds, stop_reason = self._unreported.pop(claim, (None, 0.0, ""))
        if task is None or not was_recorded:
            return
        if type(outcome) is Succeeded:
            if (lines := self._events.task_lines) is not None:
                lines.succeeded(task, seconds)
            if self.hooks is not None:
                self.hooks.succeeded(task, outcome.result)
            if not self._events.wants(events.TaskSucceeded):
                return
        self._call_hooks(task, outcome)
        self._report_failed_run(task, outcome, seconds, stop_reason)
        fields, owner = event_fields(task), task.owner or ""
        match outcome:
            case Succeeded():
                self._events.emit(events.TaskSucceeded(**fields, owner=owner, seconds=seconds))
            case Retried(error=error, eta=eta) if eta is not None:
                self._events.emit(
                    events.TaskRetried(**fields, error=error.error_type, retry_at=eta)
                )
            case Failed(error=error, reason=reason):
                fields |= {"owner": owner, "seconds": seconds}
                fields |= {"error": error.error_type, "error_message": error.message}
                self._events.emit(events.TaskFailure(**fields))
                if outcome.next_eta is None:
                    self._events.emit(
                        events.TaskDead(**fields, reason=reason, traceback=error.traceback)
                    )
            case Cancelled(reason=reason):
                self._events.emit(events.TaskCancellation(**fields, reason=reason))
            case Snoozed(eta=eta, reason=reason):
                self._events.emit(events.TaskSnoozed(**fields, until=eta, reason=reason))
            case Suspended():
                self._events.emit(_suspended(task, outcome))
            case _:
                self._events.emit(events.TaskReleased(**fields, reason=stop_reason))

    def _report_failed_run(
        self, task: Task, outcome: Outcome, seconds: float, stop_reason: str
    ) -> None:
        if not self._events.wants(events.AttemptFailed):
            return
        retry_in, reason = None, ""
        match outcome:
            case Retried(error=error, eta=eta):
                # From the time of the failure: the outcome may have waited since.
                if eta is not None and error.timestamp is not None:
                    retry_in = max(0.0, (eta - error.timestamp).total_seconds())
            case Failed(error=error, reason=reason, next_eta=eta):
                if stop_reason == UNKNOWN_FUNCTION:
                    # No run of it has failed.
                    return
                if eta is not None and error.timestamp is not None:
                    retry_in = max(0.0, (eta - error.timestamp).total_seconds())
            case _:
                return
        self._events.emit(
            events.AttemptFailed(
                **event_fields(task),
                owner=task.owner or "",
                seconds=seconds,
                error=error.error_type,
                error_message=error.message,
                traceback=error.traceback,
                retry_in=retry_in,
                reason=reason,
            )
        )

    def _call_hooks(self, task: Task, outcome: Outcome) -> None:
        if self.hooks is None or not isinstance(outcome, Retried | Failed):
            return
        self.hooks.failed(task, outcome.error)
        if isinstance(outcome, Failed) and outcome.hook and self.dead_hooks is not None:
            self.dead_hooks.died(task, outcome.error)


def event_fields(task: Task) -> dict[str, Any]:
    """The fields that every event of a task has. Never its arguments."""
    return {
        "id": task.id,
        "func_path": task.func_path,
        "queue": task.queue,
        "attempt": task.attempts + task.crashes + 1,
        "token": task.token or None,
        "task_type": task.task_type or "",
    }


def _suspended(task: Task, outcome: Suspended) -> events.TaskSuspended:
    on = outcome.on
    return events.TaskSuspended(
        **event_fields(task), waits_for=on[:10], count=len(on), until=outcome.until
    )
