"""A small model of the storage contract: dictionaries, loops and sorts, and no cleverness at all.

It shares nothing with the rules that backends use (`_rows`, `_gates`), so that a mistake there is
not made here as well. It is slow, and right at a glance. Instants are microseconds since 1970.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

import msgspec

from omniq.clock import from_micros, to_micros
from omniq.errors import DuplicateTask, LeaseLost, QueueFull, StaleClaim
from omniq.models import (
    Attempt,
    DeadLetter,
    QueueStats,
    Task,
    TaskError,
    TaskResult,
    TaskStatus,
)
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
from omniq.storage.base import GivenBack, Renewal
from omniq.testing.clock import ManualClock

PENDING, RUNNING, RETRYING = TaskStatus.PENDING, TaskStatus.RUNNING, TaskStatus.RETRYING

Verdict = Literal["success", "failure", "neither"]


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
    ended_claim: int = 0
    attempts_made: list[Attempt] = field(default_factory=list)
    result: TaskResult | None = None
    finished_at: int = 0
    forget_at: int = 0

    @property
    def started(self) -> datetime | None:
        return from_micros(self.started_at) if self.started_at else None

    @property
    def repeats(self) -> bool:
        return self.task.interval is not None

    def view(self) -> Task:
        """The task as a storage is to show it."""
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
        )


@dataclass
class Owner:
    """A storage object: its name of the moment, its lease, and the claims it remembers."""

    name: str
    lease_until: int = 0
    held: dict[str, tuple[Task, str | None]] = field(default_factory=dict)
    repeated: dict[str, int] = field(default_factory=dict)


@dataclass
class Breaker:
    """A circuit breaker: it is closed while `opened_at` is None; `probe` is the claim it let by."""

    failures: int = 0
    opened_at: int | None = None
    probe: tuple[str, int] | None = None


class Model:
    """What a store holds, and what each verb answers. Errors are those of the contract."""

    def __init__(self, clock: ManualClock, settings: Settings, max_pending: int | None) -> None:
        self._clock = clock
        self._settings = settings
        self._lease = round(settings.lease * 1_000_000)
        self._max_pending = max_pending
        self._counter = 0
        self.live: dict[str, Record] = {}
        self.finished: dict[str, Record] = {}
        self.dead: dict[str, tuple[DeadLetter, Record]] = {}
        self.checkpoints: dict[str, bytes] = {}
        self.leases: dict[str, int] = {}
        self.fenced: set[str] = set()
        self.paused: set[str] = set()
        self.starts: dict[str, list[int]] = {}
        self.breakers: dict[str, Breaker] = {}

    # Owners

    def open_owner(self) -> Owner:
        return Owner(self._fresh("owner"))

    def reopen_owner(self, owner: Owner) -> None:
        owner.name, owner.lease_until = self._fresh("owner"), 0

    def close_owner(self, owner: Owner) -> None:
        if owner.lease_until:
            for record in self._held_by(owner.name):
                if record.status is RETRYING:
                    self._settle(record, Rescheduled(record.task.id, 0, self._clock.now()))
                else:
                    self._settle(record, Released(record.task.id, 0))
            self._fence(owner.name)
        owner.held.clear()

    def renew(self, owner: Owner) -> Renewal:
        if owner.name in self.fenced:
            lost = LeaseLost(owner.name)
            self.reopen_owner(owner)
            owner.held.clear()
            raise lost
        owner.lease_until = self.leases[owner.name] = self._clock.boot_micros() + self._lease
        held = self._held_by(owner.name)
        return Renewal(
            {record.task.id: record.token for record in held},
            frozenset(record.task.id for record in held if record.cancel_requested),
        )

    def give_back_abandoned(self) -> list[GivenBack]:
        for name, until in list(self.leases.items()):
            if until <= self._clock.boot_micros():
                self._fence(name)
        lost: dict[str, list[Record]] = {}
        for record in self.live.values():
            if record.owner is not None and record.owner not in self.leases:
                lost.setdefault(record.owner, []).append(record)
        given_back = []
        for name, records in lost.items():
            self._fence(name)
            running = [record for record in records if record.status is RUNNING]
            charged = [record for record in running if record.crashes] or running
            for record in records:
                self._take_back(record, any(record is each for each in charged))
                status = record.status
                given_back.append(GivenBack(record.task.id, record.task.func_path, name, status))
        return given_back

    def _take_back(self, record: Record, is_charged: bool) -> None:
        now = self._clock.micros()
        if record.cancel_requested:
            self._leave_gates(record, "neither")
            self._finish_cancelled(record, "cancelled while running", by_owner=False)
            return
        if is_charged:
            record.crashes += 1
            error = TaskError(
                f"worker {record.owner} was lost while it ran the task",
                error_type="WorkerLost",
                timestamp=self._clock.now(),
            )
            is_last = record.crashes >= self._settings.max_crashes
            self._leave_gates(record, "failure" if is_last else "neither")
            if is_last:
                self._finish_failed(record, error, "crashed", "crashed", by_owner=False)
                return
            self._charge(record, error, "crashed")
            record.status = RETRYING
        elif record.status is RUNNING:
            self._leave_gates(record, "neither")
            record.status = PENDING
        if record.status is RETRYING:
            record.due = now
        record.owner, record.not_before, record.ended_claim = None, 0, 0

    def _fence(self, name: str) -> None:
        self.fenced.add(name)
        self.leases.pop(name, None)

    def _held_by(self, name: str) -> list[Record]:
        return [record for record in self.live.values() if record.owner == name]

    def held_by(self, name: str) -> dict[str, int]:
        return {record.task.id: record.token for record in self._held_by(name)}

    def workers(self) -> dict[str, list[str]]:
        now = self._clock.boot_micros()
        return {
            name: sorted(self.held_by(name)) for name, until in self.leases.items() if until > now
        }

    # Enqueue

    def enqueue_many(self, tasks: Sequence[Task], nonce: str | None = None) -> list[str]:
        nonce = nonce or self._fresh("call")
        for position, task in enumerate(tasks):
            if task.id in [earlier.id for earlier in tasks[:position]]:
                raise DuplicateTask(task.id)
        ids: list[str] = []
        fresh: list[Record] = []
        for task in tasks:
            known = self.on_record(task.id)
            holders = [*self.live.values(), *fresh]
            same_key = [
                each.task.id for each in holders if task.unique and each.task.unique == task.unique
            ]
            if known is not None and known.nonce != nonce:
                raise DuplicateTask(task.id)
            if known is not None or not same_key:
                ids.append(task.id)
            else:
                ids.append(same_key[0])
            if known is None and not same_key:
                fresh.append(self._new_record(task, nonce))
        self._check_room(len(fresh))
        for record in fresh:
            self.finished.pop(record.task.id, None)
            self.live[record.task.id] = record
        return ids

    def _new_record(self, task: Task, nonce: str) -> Record:
        eta = None if task.eta is None else to_micros(task.eta)
        return Record(
            task=task,
            number=self._next(),
            nonce=nonce,
            due=self._clock.micros() if eta is None else eta,
            not_before=0 if eta is None else eta,
            attempts=task.attempts,
        )

    def on_record(self, task_id: str) -> Record | None:
        """The record that occupies the id."""
        if task_id in self.live:
            return self.live[task_id]
        if task_id in self.dead:
            return self.dead[task_id][1]
        return self._unforgotten().get(task_id)

    def _unforgotten(self) -> dict[str, Record]:
        now = self._clock.micros()
        return {key: record for key, record in self.finished.items() if record.forget_at > now}

    def _check_room(self, more: int) -> None:
        waiting = sum(record.owner is None for record in self.live.values())
        if self._max_pending is not None and more and waiting + more > self._max_pending:
            raise QueueFull(self._max_pending)

    # Record and claim

    def record_and_reserve(
        self,
        owner: Owner,
        outcomes: Sequence[Outcome],
        limit: int,
        now: datetime | None = None,
        queues: Sequence[str] | None = None,
        claim_id: str | None = None,
    ) -> tuple[list[bool], list[Task]]:
        if claim_id is not None and not outcomes:
            running = self.held_by(owner.name)
            known = [
                task
                for task, by in owner.held.values()
                if by == claim_id and running.get(task.id) == task.token
            ]
            if known:
                return [], known
        if limit and owner.lease_until - self._clock.boot_micros() <= self._lease / 3:
            self.renew(owner)
        recorded = [self._record(owner, outcome) for outcome in outcomes]
        for outcome, was_recorded in zip(outcomes, recorded, strict=True):
            keeps = was_recorded and isinstance(outcome, Retried) and outcome.eta is None
            held = owner.held.get(outcome.task_id)
            if held is not None and held[0].token == outcome.token and not keeps:
                del owner.held[outcome.task_id]
        due_by = self._clock.micros() if now is None else to_micros(now)
        claimed = self._claim(owner.name, limit, due_by, queues)
        owner.held.update({task.id: (task, claim_id) for task in claimed})
        return recorded, claimed

    def _claim(
        self, name: str, limit: int, due_by: int, queues: Sequence[str] | None
    ) -> list[Task]:
        claimed: list[Task] = []
        in_order = sorted(
            self.live.values(), key=lambda each: (-each.task.priority, each.due, each.number)
        )
        for record in in_order:
            task = record.task
            holds_suspect = any(held.crashes for held in self._held_by(name))
            if len(claimed) == limit:
                break
            if record.owner is not None or record.not_before > due_by:
                continue
            if task.queue in self.paused or (queues is not None and task.queue not in queues):
                continue
            if record.crashes and holds_suspect:
                continue
            if task.expires is not None and to_micros(task.expires) <= due_by:
                self._finish_cancelled(record, "expired", by_owner=False)
            elif self._may_enter(task):
                record.status, record.owner = RUNNING, name
                record.token += 1
                record.started_at = self._clock.micros()
                self._enter_gates(record)
                claimed.append(record.view())
        return claimed

    def _record(self, owner: Owner, outcome: Outcome) -> bool:
        record = self.on_record(outcome.task_id)
        if record is None or record.token != outcome.token:
            return False
        is_live = outcome.task_id in self.live
        has_ended = record.owner is None and record.ended_claim == outcome.token
        may_move = isinstance(outcome, Rescheduled) and record.repeats and has_ended
        if is_live and (record.owner == owner.name or may_move):
            self._settle(record, outcome)
            return True
        return has_ended

    def _settle(self, record: Record, outcome: Outcome) -> None:
        ends = isinstance(outcome, Succeeded | Failed | Cancelled)
        if record.cancel_requested and not ends:
            outcome = Cancelled(outcome.task_id, outcome.token, "cancelled while running")
        is_first_word = record.status is RUNNING
        self._leave_gates(record, _verdict(outcome, is_first_word))
        match outcome:
            case Succeeded():
                self._settle_success(record, outcome)
            case Failed():
                self._finish_failed(record, outcome.error, outcome.reason, "failed", by_owner=True)
            case Cancelled():
                self._finish_cancelled(record, outcome.reason, by_owner=True)
            case Retried():
                if is_first_word:
                    self._charge(record, outcome.error, "failed")
                    record.status = RETRYING
                if outcome.eta is not None:
                    self._let_go(record, outcome.eta)
            case Rescheduled():
                if is_first_word:
                    record.status = PENDING
                self._let_go(record, outcome.eta)
            case Snoozed():
                record.status = PENDING
                self._let_go(record, outcome.eta)
            case Released():
                record.status = PENDING
                record.releases += outcome.unknown_function
                if outcome.eta is not None:
                    self._let_go(record, outcome.eta)
                record.owner, record.ended_claim = None, record.token

    def _settle_success(self, record: Record, outcome: Succeeded) -> None:
        self.checkpoints.pop(record.task.id, None)
        if outcome.next_eta is None or record.cancel_requested:
            self._finish(record, outcome.result, by_owner=True)
            return
        record.status, record.attempts, record.crashes = PENDING, 0, 0
        record.attempts_made = []
        record.result = outcome.result
        self._let_go(record, outcome.next_eta)

    def _let_go(self, record: Record, eta: datetime) -> None:
        record.owner, record.ended_claim = None, record.token
        record.due = record.not_before = to_micros(eta)

    def _charge(self, record: Record, error: TaskError, how: str) -> None:
        record.attempts += 1
        record.attempts_made.append(
            Attempt(
                number=record.attempts,
                token=record.token,
                owner=record.owner,
                started_at=record.started,
                finished_at=self._clock.now(),
                outcome=how,
                error=error,
            )
        )

    def _finish_failed(
        self, record: Record, error: TaskError, reason: str, how: str, *, by_owner: bool
    ) -> None:
        if record.status is RUNNING:
            self._charge(record, error, how)
        letter = DeadLetter(
            task_id=record.task.id,
            task_type=record.task.func_path,
            failure_reason=reason,
            attempt_count=record.attempts,
            first_failure=record.attempts_made[0].finished_at,
            last_failure=self._clock.now(),
            error_details=f"{error.error_type}: {error.message}",
            queue=record.task.queue,
        )
        self.dead[record.task.id] = (letter, record)
        result = self._result(record, TaskStatus.FAILED, record.attempts, reason)
        self._finish(record, msgspec.structs.replace(result, error=error), by_owner=by_owner)

    def _finish_cancelled(self, record: Record, reason: str, *, by_owner: bool) -> None:
        ran = record.status is RUNNING
        result = self._result(record, TaskStatus.CANCELLED, record.attempts + ran, reason)
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
        record.forget_at = record.finished_at + round(ttl * 1_000_000)
        del self.live[task.id]
        if ttl:
            self.finished[task.id] = record

    # Gates

    def _may_enter(self, task: Task) -> bool:
        now = self._clock.micros()
        for rule in task.breakers:
            breaker = self.breakers.setdefault(rule.name, Breaker())
            if breaker.probe is not None:
                return False
            opened_at = breaker.opened_at
            if opened_at is not None and now < opened_at + round(rule.reset_timeout * 1_000_000):
                return False
        for limit in task.limits:
            if limit.max_running is not None:
                running = [
                    each
                    for each in self.live.values()
                    if each.status is RUNNING and limit in each.task.limits
                ]
                if len(running) >= limit.max_running:
                    return False
            if limit.rate is not None:
                span = round(limit.per * 1_000_000)
                recent = [s for s in self.starts.get(limit.key, []) if s > now - span]
                if len(recent) >= limit.rate:
                    return False
        return True

    def _enter_gates(self, record: Record) -> None:
        for limit in record.task.limits:
            if limit.rate is not None:
                self.starts.setdefault(limit.key, []).append(self._clock.micros())
        for rule in record.task.breakers:
            breaker = self.breakers[rule.name]
            if breaker.opened_at is not None:
                breaker.probe = (record.task.id, record.token)

    def _leave_gates(self, record: Record, verdict: Verdict) -> None:
        now = self._clock.micros()
        for rule in record.task.breakers:
            breaker = self.breakers.setdefault(rule.name, Breaker())
            was_probe = breaker.probe == (record.task.id, record.token)
            if breaker.opened_at is not None and not was_probe:
                continue
            breaker.probe = None
            if verdict == "success":
                breaker.failures, breaker.opened_at = 0, None
            elif verdict == "failure":
                breaker.failures += 1
                if was_probe or breaker.failures >= rule.max_failures:
                    breaker.opened_at = now
            elif was_probe:
                breaker.opened_at = now - round(rule.reset_timeout * 1_000_000)

    # The eight verbs that name no token

    def mark_running(self, owner: Owner, task_id: str) -> None:
        self._claim_on(owner, task_id)

    def _claim_on(self, owner: Owner, task_id: str) -> Task:
        if task_id not in owner.held:
            raise StaleClaim(task_id)
        return owner.held[task_id][0]

    def mark_done(self, owner: Owner, task_id: str, value: object) -> None:
        task = self._claim_on(owner, task_id)
        result = TaskResult(
            task_id=task_id,
            status=TaskStatus.SUCCESS,
            result=value,
            attempts=task.attempts + 1,
            started_at=task.started_at,
            finished_at=self._clock.now(),
        )
        again = None
        if task.interval is not None:
            again = from_micros(self._clock.micros() + round(task.interval * 1_000_000))
        self._record_one(owner, Succeeded(task_id, task.token, result, again))
        if again is not None:
            owner.repeated[task_id] = task.token

    def mark_failed(self, owner: Owner, task_id: str, error: TaskError, will_retry: bool) -> None:
        token = self._claim_on(owner, task_id).token
        outcome = Retried(task_id, token, error) if will_retry else Failed(task_id, token, error)
        self._record_one(owner, outcome)

    def reschedule(self, owner: Owner, task_id: str, eta: datetime) -> None:
        if task_id not in owner.held and task_id in owner.repeated:
            token = owner.repeated[task_id]
        else:
            token = self._claim_on(owner, task_id).token
        self._record_one(owner, Rescheduled(task_id, token, eta))
        owner.repeated.pop(task_id, None)

    def _record_one(self, owner: Owner, outcome: Outcome) -> None:
        recorded, _ = self.record_and_reserve(owner, [outcome], 0)
        if recorded != [True]:
            raise StaleClaim(outcome.task_id, outcome.token)

    # The rest of the verbs

    def cancel(self, task_id: str, reason: str) -> bool:
        record = self.live.get(task_id)
        if record is None:
            return False
        if record.owner is not None:
            record.cancel_requested = True
        else:
            self._finish_cancelled(record, reason, by_owner=False)
        return True

    def purge_results(self, older_than: datetime) -> int:
        return self._purge(lambda record: record.finished_at < to_micros(older_than))

    def purge_expired(self) -> int:
        return self._purge(lambda record: record.forget_at <= self._clock.micros())

    def _purge(self, is_old: Callable[[Record], bool]) -> int:
        old = [task_id for task_id, record in self.finished.items() if is_old(record)]
        for task_id in old:
            del self.finished[task_id]
        return len(old)

    def retry_dead(self, task_id: str, *, from_start: bool) -> bool:
        if task_id not in self.dead:
            return False
        _, old = self.dead[task_id]
        self._check_room(1)
        for record in self.live.values():
            if old.task.unique is not None and record.task.unique == old.task.unique:
                raise DuplicateTask(record.task.id)
        del self.dead[task_id]
        self.finished.pop(task_id, None)
        if from_start:
            self.checkpoints.pop(task_id, None)
        revived = self._new_record(old.task, old.nonce)
        self.live[task_id] = replace(
            revived, due=self._clock.micros(), not_before=0, token=old.token, attempts=0
        )
        return True

    def delete_dead(self, task_id: str) -> bool:
        if task_id not in self.dead:
            return False
        del self.dead[task_id]
        self.checkpoints.pop(task_id, None)
        return True

    def save_checkpoint(self, owner: Owner, task_id: str, token: int, checkpoint: bytes) -> None:
        record = self.live.get(task_id)
        if record is None or record.owner != owner.name or record.token != token:
            raise StaleClaim(task_id, token)
        self.checkpoints[task_id] = checkpoint

    # Questions

    def known_tasks(self) -> dict[str, Record]:
        """All that is to be found, in id order."""
        return dict(sorted({**self._unforgotten(), **self.live}.items()))

    def get_result(self, task_id: str) -> TaskResult | None:
        record = self.known_tasks().get(task_id)
        if record is None:
            return None
        if record.result is not None:
            return record.result
        if record.status is not RETRYING:
            return None
        newest = record.attempts_made[-1]
        return TaskResult(
            task_id=task_id,
            status=RETRYING,
            error=newest.error,
            attempts=record.attempts,
            started_at=newest.started_at,
            finished_at=newest.finished_at,
        )

    def get_dead(self, task_id: str) -> DeadLetter | None:
        if task_id not in self.dead:
            return None
        letter, _ = self.dead[task_id]
        return msgspec.structs.replace(letter, checkpoint=self.checkpoints.get(task_id))

    def stats(self) -> QueueStats:
        now = self._clock.micros()
        records = list(self.known_tasks().values())
        live = [record for record in records if not record.status.is_final]
        waiting = [record.due for record in live if record.owner is None]
        queues = [record.task.queue for record in live]
        return QueueStats(
            by_status={
                status: sum(record.status is status for record in records) for status in TaskStatus
            },
            by_queue={queue: queues.count(queue) for queue in queues},
            oldest_due_age=(now - min([now, *waiting])) / 1_000_000,
            dead=len(self.dead),
        )

    def _next(self) -> int:
        self._counter += 1
        return self._counter

    def _fresh(self, what: str) -> str:
        return f"{what}-{self._next()}"


def _verdict(outcome: Outcome, is_first_word: bool) -> Verdict:
    """What a circuit breaker is told of a run: a failure once, however often it is reported."""
    if isinstance(outcome, Succeeded):
        return "success"
    return "failure" if isinstance(outcome, Retried | Failed) and is_first_word else "neither"
