"""A small model of the storage contract, made of dictionaries, loops and sorts.

It shares no code with the rules that backends use (`row_rules`, `gate_rules`), so a mistake there is
not repeated here. It is slow, and simple enough to check by reading. Instants are microseconds since
1970.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import msgspec

from omniq.clock import from_micros, to_micros
from omniq.errors import (
    DuplicateTask,
    LeaseLost,
    QueueFull,
    StaleClaim,
    TaskNotFound,
    TaskNotWaiting,
)
from omniq.models import Progress, Runnable, Task, TaskError, TaskResult, TaskStatus
from omniq.outcomes import Failed, Outcome, Released, Rescheduled, Retried, Succeeded
from omniq.settings import Settings
from omniq.storage.types import GivenBack, Renewal
from omniq.tasks.task_output import OutputBatch
from omniq.testing.clock import ManualClock
from omniq.testing.model_tasks import RETRYING, RUNNING, ModelTasks, Record
from omniq.testing.model_turns import order_of


@dataclass
class Owner:
    """A storage object: its current owner name, its lease, and the claims it remembers."""

    name: str
    lease_until: int = 0
    held: dict[str, tuple[Task, str | None]] = field(default_factory=dict)
    repeated: dict[str, int] = field(default_factory=dict)


class Model:
    """The contents of a store, and the result of each verb. Errors are those of the contract."""

    def __init__(self, clock: ManualClock, settings: Settings, max_pending: int | None) -> None:
        self.clock = clock
        self._settings = settings
        self._lease = round(settings.lease * 1_000_000)
        self._max_pending = max_pending
        self._counter = 0
        self.tasks = ModelTasks(clock, settings)
        self.leases: dict[str, int] = {}
        self.fenced: set[str] = set()
        self.paused: set[str] = set()

    # Owners

    def open_owner(self) -> Owner:
        return Owner(self._new_name("owner"))

    def reopen_owner(self, owner: Owner) -> None:
        owner.name, owner.lease_until = self._new_name("owner"), 0
        owner.held.clear()
        owner.repeated.clear()

    def close_owner(self, owner: Owner) -> None:
        if owner.lease_until:
            for record in self.tasks.held_by(owner.name):
                if record.runs_once and record.status is RUNNING and not record.cancel_requested:
                    self.tasks.end_crashed(record, ": its lease was given up")
                elif record.status is RETRYING:
                    self.tasks.apply_outcome(
                        record, Rescheduled(record.task.id, 0, self.clock.now())
                    )
                else:
                    self.tasks.apply_outcome(record, Released(record.task.id, 0))
            self._fence(owner.name)

    def renew(self, owner: Owner) -> Renewal:
        if owner.name in self.fenced:
            lost = LeaseLost(owner.name)
            self.reopen_owner(owner)
            raise lost
        owner.lease_until = self.leases[owner.name] = self.clock.boot_micros() + self._lease
        held = self.tasks.held_by(owner.name)
        return Renewal(
            {record.task.id: record.token for record in held},
            frozenset(record.task.id for record in held if record.cancel_requested),
        )

    def give_back_abandoned(self) -> list[GivenBack]:
        for name, until in list(self.leases.items()):
            if until <= self.clock.boot_micros():
                self._fence(name)
        lost: dict[str, list[Record]] = {}
        for record in self.tasks.live.values():
            if record.owner is not None and record.owner not in self.leases:
                lost.setdefault(record.owner, []).append(record)
        given_back = []
        for name, records in lost.items():
            self._fence(name)
            running = [record for record in records if record.status is RUNNING]
            charged = [record for record in running if record.crashes] or running
            for record in records:
                self.tasks.recover(record, any(record is each for each in charged))
                status = record.status
                given_back.append(GivenBack(record.task.id, record.task.func_path, name, status))
        return given_back

    def mark_restored(self) -> int:
        self.tasks.epoch = max(self.tasks.epoch, self.clock.micros() // 1_000_000) + 1
        for name in list(self.leases):
            self._fence(name)
        for record in list(self.tasks.live.values()):
            if record.owner is not None:
                self.tasks.recover_forgotten(record)
        return self.tasks.epoch

    def _fence(self, name: str) -> None:
        self.fenced.add(name)
        self.leases.pop(name, None)

    def held_by(self, name: str) -> dict[str, int]:
        return {record.task.id: record.token for record in self.tasks.held_by(name)}

    def workers(self) -> dict[str, list[str]]:
        now = self.clock.boot_micros()
        return {
            name: sorted(self.held_by(name)) for name, until in self.leases.items() if until > now
        }

    # Enqueue

    def enqueue_many(self, tasks: Sequence[Task], nonce: str | None = None) -> list[str]:
        nonce = nonce or self._new_name("call")
        for position, task in enumerate(tasks):
            if task.id in [earlier.id for earlier in tasks[:position]]:
                raise DuplicateTask(task.id)
        ids: list[str] = []
        fresh: list[Record] = []
        for task in tasks:
            known = self.tasks.on_record(task.id)
            holders = [*self.tasks.live.values(), *fresh]
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
            self.tasks.finished.pop(record.task.id, None)
            self.tasks.live[record.task.id] = record
            if record.not_before <= self.clock.micros():
                self.tasks.turns.give(record)
        return ids

    def _new_record(self, task: Task, nonce: str) -> Record:
        eta = None if task.eta is None else to_micros(task.eta)
        return Record(
            task=task,
            number=self._next_number(),
            nonce=nonce,
            due=self.clock.micros() if eta is None else eta,
            not_before=0 if eta is None else eta,
            attempts=task.attempts,
        )

    def _check_room(self, more: int) -> None:
        waiting = sum(record.owner is None for record in self.tasks.live.values())
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
        runnable: Runnable | None = None,
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
        remaining = owner.lease_until - self.clock.boot_micros()
        if limit and (remaining <= self._lease / 3 or owner.name in self.fenced):
            self.renew(owner)
        recorded = [self._record(owner, outcome) for outcome in outcomes]
        for outcome, was_recorded in zip(outcomes, recorded, strict=True):
            stays_held = was_recorded and isinstance(outcome, Retried) and outcome.eta is None
            held = owner.held.get(outcome.task_id)
            if held is not None and held[0].token == outcome.token and not stays_held:
                del owner.held[outcome.task_id]
        due_by = self.clock.micros() if now is None else to_micros(now)
        claimed = self._claim(owner.name, limit, due_by, queues, runnable)
        owner.held.update({task.id: (task, claim_id) for task in claimed})
        return recorded, claimed

    def _claim(
        self,
        name: str,
        limit: int,
        due_by: int,
        queues: Sequence[str] | None,
        runnable: Runnable | None,
    ) -> list[Task]:
        claimed: list[Task] = []
        left = list(self.tasks.live.values())
        while left:
            record = min(left, key=order_of)
            task = record.task
            holds_suspect = any(held.crashes for held in self.tasks.held_by(name))
            if len(claimed) == limit:
                break
            left.remove(record)
            if record.owner is not None or record.not_before > due_by:
                continue
            if task.queue in self.paused or (queues is not None and task.queue not in queues):
                continue
            if runnable is not None and not _accepts(runnable, task.func_path):
                continue
            if record.crashes and holds_suspect:
                continue
            if task.fair is not None and record.turn is None:
                self.tasks.turns.give(record)
                left.append(record)
            elif task.expires is not None and to_micros(task.expires) <= due_by:
                self.tasks.finish_cancelled(record, "expired")
            elif self.tasks.gates.may_start(task, self.tasks.running()):
                self.tasks.claim(record, name)
                claimed.append(record.view())
        return claimed

    def _record(self, owner: Owner, outcome: Outcome) -> bool:
        record = self.tasks.on_record(outcome.task_id)
        if record is None or record.token != outcome.token:
            return False
        is_live = outcome.task_id in self.tasks.live
        has_ended = record.owner is None and record.ended_claim == outcome.token
        may_move = isinstance(outcome, Rescheduled) and record.repeats and has_ended
        if is_live and (record.owner == owner.name or may_move):
            self.tasks.apply_outcome(record, outcome)
            return True
        return has_ended

    # The verbs without a token

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
            attempts=task.attempts + task.crashes + 1,
            started_at=task.started_at,
            finished_at=self.clock.now(),
        )
        again = None
        if task.interval is not None:
            again = from_micros(self.clock.micros() + round(task.interval * 1_000_000))
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

    # Other verbs

    def cancel(self, task_id: str, reason: str) -> bool:
        record = self.tasks.live.get(task_id)
        if record is None:
            return False
        if record.owner is not None:
            record.cancel_requested = True
        else:
            self.tasks.finish_cancelled(record, reason)
        return True

    def change_task(self, task_id: str, **given: Any) -> Task:
        record = self.tasks.on_record(task_id)
        if record is None:
            raise TaskNotFound(task_id)
        if task_id not in self.tasks.live or record.owner is not None:
            raise TaskNotWaiting(task_id, record.status)
        now, before = self.clock.micros(), replace(record)
        record.task = msgspec.structs.replace(record.task, **given)
        if "eta" in given:
            eta = None if given["eta"] is None else to_micros(given["eta"])
            record.due = now if eta is None else eta
            record.not_before = 0 if eta is None else eta
        waits_on = max(record.not_before, before.not_before) <= now and before.line == record.line
        if not (before.is_in_line and waits_on):
            self.tasks.turns.free(before)
            record.turn, record.keeps_turn = None, False
        return record.view()

    def purge_results(self, older_than: datetime) -> int:
        return self._purge(lambda record: record.finished_at < to_micros(older_than))

    def purge_expired(self) -> int:
        self.tasks.turns.forget_old()
        return self._purge(lambda record: record.purge_at <= self.clock.micros())

    def _purge(self, is_old: Callable[[Record], bool]) -> int:
        old = [task_id for task_id, record in self.tasks.finished.items() if is_old(record)]
        for task_id in old:
            del self.tasks.finished[task_id]
        return len(old)

    def retry_dead(self, task_id: str, *, from_start: bool) -> bool:
        if task_id not in self.tasks.dead:
            return False
        _, old = self.tasks.dead[task_id]
        self._check_room(1)
        for record in self.tasks.live.values():
            if old.task.unique is not None and record.task.unique == old.task.unique:
                raise DuplicateTask(record.task.id)
        del self.tasks.dead[task_id]
        self.tasks.hooks.pop(task_id, None)
        self.tasks.finished.pop(task_id, None)
        if from_start:
            self.tasks.checkpoints.pop(task_id, None)
        revived = self._new_record(old.task, old.nonce)
        self.tasks.live[task_id] = replace(
            revived,
            due=self.clock.micros(),
            not_before=0,
            token=old.token,
            output=old.output,
            attempts=0,
            occurrence=old.token if from_start else old.occurrence,
        )
        return True

    def delete_dead(self, task_id: str) -> bool:
        if task_id not in self.tasks.dead:
            return False
        del self.tasks.dead[task_id]
        self.tasks.hooks.pop(task_id, None)
        self.tasks.checkpoints.pop(task_id, None)
        return True

    def purge_dead(self, older_than: datetime) -> int:
        dead_letters = [dead_letter for dead_letter, _ in self.tasks.dead.values()]
        old = [
            dead_letter.task_id
            for dead_letter in dead_letters
            if dead_letter.last_failure < older_than
        ]
        return sum(self.delete_dead(task_id) for task_id in old)

    def take_hook(self, owner: Owner, task_id: str) -> bool:
        if task_id not in self.tasks.hooks:
            return False
        self.tasks.hooks[task_id][0] = owner.name
        return True

    def end_hook(self, task_id: str, token: int) -> None:
        if task_id in self.tasks.hooks and self.tasks.hooks[task_id][1] == token:
            del self.tasks.hooks[task_id]

    def report_progress(self, owner: Owner, report: Progress) -> None:
        if self.held_by(owner.name).get(report.task_id) == report.token:
            self.tasks.progress[report.task_id] = report

    def append_output(self, owner: Owner, batch: OutputBatch) -> list[bool]:
        if self.held_by(owner.name).get(batch.task_id) != batch.token:
            return [False]
        chunks = self.tasks.live[batch.task_id].output.setdefault(batch.token, [])
        for number, chunk in enumerate(batch.chunks, start=batch.first):
            if number > len(chunks):
                chunks.append(chunk.data)
        return [True]

    def output(self, task_id: str) -> list[Any] | None:
        """The run, the number and the encoded content of each chunk."""
        record = self.tasks.on_record(task_id)
        if record is None:
            return None
        return [
            [token, number, data]
            for token, chunks in sorted(record.output.items())
            for number, data in enumerate(chunks, start=1)
        ]

    def save_checkpoint(self, owner: Owner, task_id: str, token: int, checkpoint: bytes) -> None:
        if self.held_by(owner.name).get(task_id) != token:
            raise StaleClaim(task_id, token)
        self.tasks.checkpoints[task_id] = checkpoint

    def _next_number(self) -> int:
        self._counter += 1
        return self._counter

    def _new_name(self, prefix: str) -> str:
        return f"{prefix}-{self._next_number()}"


def _accepts(runnable: Runnable, func_path: str) -> bool:
    parts = func_path.split(".")
    modules = [".".join(parts[:length]) for length in range(1, len(parts))]
    is_given = func_path in runnable.names or any(
        runnable.modules is None or module in runnable.modules for module in modules
    )
    return is_given and func_path not in runnable.excluded
