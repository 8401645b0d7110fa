"""The model's tasks: the record of each task, and how claims and outcomes change it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec

from omniq.clock import from_micros, to_micros
from omniq.models import Attempt, DeadLetter, Progress, Task, TaskError, TaskResult, TaskStatus
from omniq.outcomes import (
    Cancelled,
    Failed,
    Outcome,
    Released,
    Rescheduled,
    Retried,
    Snoozed,
    Succeeded,
)
from omniq.settings import Settings
from omniq.storage.row_rules import WENT_BACK, first_token
from omniq.testing.clock import ManualClock
from omniq.testing.model_gates import ModelGates, breaker_result
from omniq.testing.model_turns import ModelTurns

PENDING, RUNNING, RETRYING = TaskStatus.PENDING, TaskStatus.RUNNING, TaskStatus.RETRYING


@dataclass
class Record:
    """Everything the model knows about a task."""

    task: Task
    number: int
    nonce: str
    due: int
    not_before: int
    status: TaskStatus = PENDING
    attempts: int = 0
    crashes: int = 0
    releases: int = 0
    token: int = 0
    owner: str | None = None
    started_at: int = 0
    cancel_requested: bool = False
    occurrence: int = 0
    ended_claim: int = 0
    attempts_made: list[Attempt] = field(default_factory=list)
    result: TaskResult | None = None
    finished_at: int = 0
    purge_at: int = 0
    output: dict[int, list[Any]] = field(default_factory=dict)
    """The chunks of each run, by its token."""
    turn: int | None = None
    """The place in line of a task with a `fair` key that has one. With `keeps_turn` it waits before the line."""
    keeps_turn: bool = False

    @property
    def line(self) -> tuple[str, int]:
        """The line that it waits in. A task that ages is among those of priority 0, whichever it has."""
        return (self.task.queue, 0 if self.task.ageing is not None else self.task.priority)

    @property
    def is_in_line(self) -> bool:
        """Whether it waits at a place in line."""
        return self.owner is None and self.turn is not None and not self.keeps_turn

    @property
    def started(self) -> datetime | None:
        return from_micros(self.started_at) if self.started_at else None

    @property
    def runs(self) -> int:
        """The number of runs that failed or whose worker died."""
        return self.attempts + self.crashes

    @property
    def runs_once(self) -> bool:
        """Whether it may not run again after a run whose end is unknown."""
        return self.task.max_crashes in (0, 1)

    @property
    def repeats(self) -> bool:
        return self.task.interval is not None

    def view(self) -> Task:
        """The task as a storage must return it."""
        return msgspec.structs.replace(
            self.task,
            eta=from_micros(self.due),
            status=self.status,
            attempts=self.attempts,
            crashes=self.crashes,
            releases=self.releases,
            token=self.token,
            owner=self.owner,
            started_at=self.started,
            cancel_requested=self.cancel_requested,
            occurrence=self.occurrence,
        )


class ModelTasks:
    """Live tasks, finished tasks, dead letters, checkpoints and progress."""

    def __init__(self, clock: ManualClock, settings: Settings) -> None:
        self._clock = clock
        self._settings = settings
        self.gates = ModelGates(clock)
        self.epoch = 0
        self.live: dict[str, Record] = {}
        self.turns = ModelTurns(clock, self.live)
        self.finished: dict[str, Record] = {}
        self.dead: dict[str, tuple[DeadLetter, Record]] = {}
        self.checkpoints: dict[str, bytes] = {}
        self.progress: dict[str, Progress] = {}
        self.hooks: dict[str, list[Any]] = {}
        """The pending hooks of dead letters: owner, token and reason."""

    # Reading

    def on_record(self, task_id: str) -> Record | None:
        """The record that occupies the id."""
        if task_id in self.live:
            return self.live[task_id]
        if task_id in self.dead:
            return self.dead[task_id][1]
        return self._retained().get(task_id)

    def _retained(self) -> dict[str, Record]:
        now = self._clock.micros()
        return {key: record for key, record in self.finished.items() if record.purge_at > now}

    def visible_tasks(self) -> dict[str, Record]:
        """Live and retained tasks, in id order."""
        return dict(sorted({**self._retained(), **self.live}.items()))

    def running(self) -> list[Task]:
        """The tasks that are running."""
        return [record.task for record in self.live.values() if record.status is RUNNING]

    def held_by(self, name: str) -> list[Record]:
        """The records that an owner holds."""
        return [record for record in self.live.values() if record.owner == name]

    # Changes

    def claim(self, record: Record, name: str) -> None:
        """Give the task to an owner."""
        record.status, record.owner = RUNNING, name
        record.token = max(record.token + 1, first_token(self.epoch))
        record.started_at = self._clock.micros()
        self.gates.start_run(record.task, record.token)

    def apply_outcome(self, record: Record, outcome: Outcome) -> None:
        """Record the outcome that the claim's owner reports."""
        ends = isinstance(outcome, Succeeded | Failed | Cancelled)
        if isinstance(outcome, Failed) and outcome.next_eta is not None and record.repeats:
            ends = False
        if record.cancel_requested and not ends:
            outcome = Cancelled(outcome.task_id, outcome.token, "cancelled while running")
        is_first_report = record.status is RUNNING
        self.gates.end_run(record.task, record.token, breaker_result(outcome, is_first_report))
        match outcome:
            case Succeeded():
                self._apply_success(record, outcome)
            case Failed():
                how = "crashed" if outcome.reason == "crashed" else "failed"
                if outcome.next_eta is not None and record.repeats:
                    self._fail_and_repeat(record, outcome, outcome.next_eta)
                    return
                self._finish_failed(
                    record, outcome.error, outcome.reason, how, by_owner=True, hook=outcome.hook
                )
            case Cancelled():
                self.finish_cancelled(record, outcome.reason, by_owner=True)
            case Retried():
                if is_first_report:
                    self._charge(record, outcome.error, "failed")
                    record.status = RETRYING
                if outcome.eta is not None:
                    self._release_claim(record, outcome.eta)
            case Rescheduled():
                if is_first_report:
                    record.status = PENDING
                self._release_claim(record, outcome.eta)
            case Snoozed():
                record.status = PENDING
                self._release_claim(record, outcome.eta)
            case Released():
                record.status = PENDING
                record.releases += outcome.unknown_function
                if outcome.eta is not None:
                    self._release_claim(record, outcome.eta)
                else:
                    record.keeps_turn = True
                record.owner, record.ended_claim = None, record.token

    def _apply_success(self, record: Record, outcome: Succeeded) -> None:
        self.checkpoints.pop(record.task.id, None)
        if outcome.next_eta is None or record.cancel_requested:
            self._finish(record, outcome.result, by_owner=True)
            return
        self.progress.pop(record.task.id, None)
        record.status, record.attempts, record.crashes = PENDING, 0, 0
        record.attempts_made = []
        record.occurrence = record.token
        record.result = outcome.result
        self._release_claim(record, outcome.next_eta)

    def _fail_and_repeat(self, record: Record, outcome: Failed, next_eta: datetime) -> None:
        if record.status is RUNNING:
            self._charge(record, outcome.error, "failed")
        result = self._result(record, TaskStatus.FAILED, record.runs, outcome.reason)
        record.result = msgspec.structs.replace(result, error=outcome.error)
        self.checkpoints.pop(record.task.id, None)
        self.progress.pop(record.task.id, None)
        record.status, record.attempts, record.crashes = PENDING, 0, 0
        record.occurrence = record.token
        self._release_claim(record, next_eta)

    def _release_claim(self, record: Record, eta: datetime) -> None:
        record.owner, record.ended_claim = None, record.token
        record.due = record.not_before = to_micros(eta)
        record.turn, record.keeps_turn = None, False

    def _ended_at(self, record: Record, error: TaskError) -> datetime:
        """When the run ended: as its error says, between its start and now."""
        now = self._clock.now()
        return sorted([record.started or now, error.timestamp or now, now])[1]

    def _charge(self, record: Record, error: TaskError, how: str) -> None:
        if how == "crashed":
            record.crashes += 1
        else:
            record.attempts += 1
        record.attempts_made.append(
            Attempt(
                number=record.runs,
                token=record.token,
                owner=record.owner,
                started_at=record.started,
                finished_at=self._ended_at(record, error),
                outcome=how,
                error=error,
            )
        )

    def _finish_failed(
        self,
        record: Record,
        error: TaskError,
        reason: str,
        how: str,
        *,
        by_owner: bool,
        hook: str | None = "",
    ) -> None:
        if hook is not None:
            self.hooks[record.task.id] = [hook, record.token, reason]
        if record.status is RUNNING:
            self._charge(record, error, how)
        dead_letter = DeadLetter(
            task_id=record.task.id,
            func_path=record.task.func_path,
            failure_reason=reason,
            attempt_count=record.runs,
            first_failure=record.attempts_made[0].finished_at,
            last_failure=self._ended_at(record, error),
            error_details=f"{error.error_type}: {error.message}",
            queue=record.task.queue,
        )
        self.dead[record.task.id] = (dead_letter, record)
        result = msgspec.structs.replace(
            self._result(record, TaskStatus.FAILED, record.runs, reason),
            error=error,
            finished_at=self._ended_at(record, error),
        )
        self._finish(record, result, by_owner=by_owner)

    def finish_cancelled(self, record: Record, reason: str, *, by_owner: bool = False) -> None:
        """End the task as CANCELLED."""
        ran = record.status is RUNNING
        self.turns.free(record)
        result = self._result(record, TaskStatus.CANCELLED, record.runs + ran, reason)
        if not ran:
            result = msgspec.structs.replace(result, started_at=None)
        self.checkpoints.pop(record.task.id, None)
        self._finish(record, result, by_owner=by_owner)

    def _result(
        self, record: Record, status: TaskStatus, attempts: int, reason: str | None = None
    ) -> TaskResult:
        return TaskResult(
            task_id=record.task.id,
            status=status,
            attempts=attempts,
            started_at=record.started,
            finished_at=self._clock.now(),
            reason=reason,
        )

    def _finish(self, record: Record, result: TaskResult, *, by_owner: bool) -> None:
        task = record.task
        ttl = self._settings.result_ttl if task.result_ttl is None else task.result_ttl
        record.result, record.status = result, result.status
        record.ended_claim = record.token if by_owner else 0
        record.owner = None
        record.finished_at = self._clock.micros()
        record.purge_at = record.finished_at + round(ttl * 1_000_000)
        del self.live[task.id]
        self.progress.pop(task.id, None)
        if ttl:
            self.finished[task.id] = record

    def end_crashed(self, record: Record, cause: str = "") -> None:
        """End a run whose end is unknown as a dead letter."""
        self.gates.end_run(record.task, record.token, "neither")
        error = self._worker_lost(record, cause)
        self._finish_failed(record, error, "crashed", "crashed", by_owner=False)

    def recover_forgotten(self, record: Record) -> None:
        """Take the task from its owner, after the store went back."""
        if record.runs_once and record.status is RUNNING and not record.cancel_requested:
            self.gates.end_run(record.task, record.token, "neither")
            error = self._worker_lost(record, f": {WENT_BACK}")
            self._finish_failed(record, error, WENT_BACK, "crashed", by_owner=False)
        else:
            self.recover(record, is_charged=False)

    def _worker_lost(self, record: Record, cause: str = "") -> TaskError:
        return TaskError(
            f"worker {record.owner} was lost while it ran the task{cause}",
            error_type="WorkerLost",
            timestamp=self._clock.now(),
        )

    def recover(self, record: Record, is_charged: bool) -> None:
        """Return the task of a dead owner to the queue, or end it."""
        now = self._clock.micros()
        if record.cancel_requested:
            self.gates.end_run(record.task, record.token, "neither")
            self.finish_cancelled(record, "cancelled while running", by_owner=False)
            return
        most = self._settings.max_crashes
        if record.task.max_crashes is not None:
            most = record.task.max_crashes
        if is_charged or (record.runs_once and record.status is RUNNING):
            if record.crashes + 1 >= most:
                self.end_crashed(record)
                return
            self.gates.end_run(record.task, record.token, "neither")
            self._charge(record, self._worker_lost(record), "crashed")
            record.status = RETRYING
        elif record.status is RUNNING:
            self.gates.end_run(record.task, record.token, "neither")
            record.status = PENDING
        if record.status is RETRYING:
            record.due = now
        record.keeps_turn = True
        record.owner, record.not_before, record.ended_claim = None, 0, 0
