"""What a pool has done, in numbers, and the telling of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from omniq import events
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
)
from omniq.worker.failure_hooks import Hooks

_DURATIONS = 100


class PoolStats(msgspec.Struct, frozen=True, kw_only=True):
    """How a pool is doing. `queued_tasks` is as of the last claim; times are milliseconds.

    `completed_tasks` and `failed_tasks` are tasks that have ended, as the storage has recorded
    them; a run that failed and is to be repeated counts in `retried_runs`. `stale_outcomes` came
    too late: another worker had been given the task.
    """

    workers_count: int
    active_workers: int
    queued_tasks: int
    completed_tasks: int
    failed_tasks: int
    average_exec_time: float
    retried_runs: int = 0
    leaked_threads: int = 0
    stale_outcomes: int = 0


class Tally:
    """Counts what was recorded, keeps the newest durations, and tells the listeners.

    Written by the pool's event loop alone; the numbers may be read from any thread.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._events = dispatcher
        self._durations: deque[float] = deque(maxlen=_DURATIONS)
        self._untold: dict[tuple[str, int], tuple[Task, float, str]] = {}
        self.completed = 0
        self.failed = 0
        self.retried = 0
        self.released = 0
        self.stale = 0
        self.queued = 0
        self.breakers: set[str] = set()
        """The breakers that tasks of this pool have passed, while somebody listened."""
        self.hooks: Hooks | None = None
        """What calls the hooks of failed tasks, while the pool runs."""

    @property
    def average_milliseconds(self) -> float:
        """The mean of the newest 100 runs; 0 before the first."""
        # A copy: it may be the thread of a blocking caller that asks, while the loop goes on.
        newest = list(self._durations)
        return sum(newest) / len(newest) * 1000 if newest else 0.0

    def claimed(self, tasks: Sequence[Task]) -> None:
        """Tell of what was taken from the storage."""
        if self._events.wants(events.TaskClaimed):
            for task in tasks:
                self._events.emit(events.TaskClaimed(**facts_of(task), owner=task.owner or ""))
        if self._events.active:
            self.breakers.update(rule.name for task in tasks for rule in task.breakers)

    def started(self, task: Task) -> None:
        """Tell of a run that begins."""
        if self._events.wants(events.TaskStarted):
            self._events.emit(events.TaskStarted(**facts_of(task)))

    def ran(self, task: Task, seconds: float, stop_reason: str) -> None:
        """Note how long a run took. What it came to is told once it is recorded."""
        self._durations.append(seconds)
        if self._events.active or (self.hooks is not None and self.hooks.wants(task.func_path)):
            self._untold[task.id, task.token] = (task, seconds, stop_reason)

    def recorded(self, outcomes: Sequence[Outcome], recorded: Sequence[bool]) -> None:
        """Count what the storage has recorded, and what it refused."""
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
            if self._untold:
                self._tell(outcome, was_recorded)

    def lost(self, outcomes: Sequence[Outcome]) -> None:
        """Count outcomes that nobody will record: others run the tasks again."""
        self.recorded(outcomes, [False] * len(outcomes))

    def _refused(self, outcome: Outcome) -> None:
        # A task that was given back already needs no giving back: nothing is lost by that.
        if not isinstance(outcome, Released):
            self.stale += 1
            self._events.emit(events.StaleRefused(id=outcome.task_id, token=outcome.token))

    def _tell(self, outcome: Outcome, was_recorded: bool) -> None:
        # By its claim: the next run of the task may have begun before this one is told of.
        claim = (outcome.task_id, outcome.token)
        task, seconds, stop_reason = self._untold.pop(claim, (None, 0.0, ""))
        if task is None or not was_recorded:
            return
        if type(outcome) is Succeeded and not self._events.wants(events.TaskSucceeded):
            return
        self._tell_hooks(task, outcome)
        facts = facts_of(task)
        match outcome:
            case Succeeded():
                self._events.emit(events.TaskSucceeded(**facts, seconds=seconds))
            case Retried(error=error, eta=eta) if eta is not None:
                self._events.emit(events.TaskRetried(**facts, error=error.error_type, retry_at=eta))
            case Failed(error=error, reason=reason):
                self._events.emit(events.TaskFailure(**facts, error=error.error_type))
                self._events.emit(events.TaskDead(**facts, reason=reason))
            case Cancelled(reason=reason):
                self._events.emit(events.TaskCancellation(**facts, reason=reason))
            case Snoozed(eta=eta):
                self._events.emit(events.TaskSnoozed(**facts, until=eta))
            case _:
                self._events.emit(events.TaskReleased(**facts, reason=stop_reason))

    def _tell_hooks(self, task: Task, outcome: Outcome) -> None:
        if self.hooks is None or not isinstance(outcome, Retried | Failed):
            return
        self.hooks.failed(task, outcome.error)
        if isinstance(outcome, Failed):
            self.hooks.died(task, outcome.error)


def facts_of(task: Task) -> dict[str, Any]:
    """What every event of a task says of it. Never its arguments."""
    return {
        "id": task.id,
        "func_path": task.func_path,
        "queue": task.queue,
        "attempt": task.attempts + 1,
        "token": task.token or None,
    }
