"""The data beside the queue: results, dead letters, checkpoints, progress, schedules.

The second part of the contract, for operators and for tasks that resume. `base` has the first part:
enqueue, claim and record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from typing import Any

import msgspec

from omniq.clock import Clock, to_micros
from omniq.cron import check_cron
from omniq.errors import (
    DuplicateTask,
    InvalidTask,
    InvalidValue,
    KeyNeeded,
    SerializationError,
    StaleClaim,
)
from omniq.models import (
    AuditEntry,
    Pong,
    Progress,
    Schedule,
    StoredLetter,
    Task,
    Version,
    check_id,
    check_instant,
    check_int,
    check_key,
    check_name,
    check_schedule,
    check_task,
)
from omniq.settings import Settings
from omniq.signing import has_seal
from omniq.storage import row_rules
from omniq.storage.controls import Controls
from omniq.storage.row_rules import Row, row_of
from omniq.storage.run_counts import PeriodCounts
from omniq.storage.sealed_documents import OlderDocument, older_document
from omniq.storage.types import Action, Identity, PendingHook, WorkerAnswer, WorkerRequest
from omniq.storage.wakeups import LocalWakeups

_MOST_SLOTS = 10_000

_ANSWER_PAUSE = 0.05
"""Seconds between two looks for the answer of a worker."""


class SideData(Controls):
    """Verbs for the data beside the queue. Each numbered promise holds on every backend."""

    _clock: Clock
    _settings: Settings
    _identity: Identity
    _local_wakeups: LocalWakeups
    _default_ttl: int
    _nonce_prefix: str
    _nonces: Iterator[int]

    # Retention

    async def purge_results(self, older_than: datetime) -> int:
        """Delete tasks that finished before that instant; returns how many.

        T1. Only finished tasks are deleted; none that waits or runs, and no dead letter.
        T2. Their ids are free again.
        """
        check_now("older_than", older_than)
        return await self._opened.purge_results(to_micros(older_than))

    async def purge_expired(self) -> int:
        """Delete finished tasks whose `result_ttl` has passed; returns how many.

        T3. A record past its `result_ttl` is not returned to readers, purged or not.
        T4. `result_ttl=0` stores nothing of a task that ended, except its dead letter.
        """
        return await self._opened.purge_expired()

    async def delete_task(self, task_id: str) -> bool:
        """Delete a finished task; returns False when there is no such record.

        T5. No task that waits or runs is touched, nor any other task, nor a dead letter.
        """
        check_id(task_id)
        return await self._opened.delete_task(task_id)

    # Changes of a waiting task

    async def change_task(
        self,
        task_id: str,
        *,
        priority: int | None = None,
        queue: str | None = None,
        eta: datetime | None = None,
    ) -> Task:
        """Give a waiting task another priority, queue or eta; returns the task as it is now.

        A1. The task waits under the same id, with the same call, attempts, unique key and limits; only what
            was given has changed, and it is claimed as if it had been enqueued so.
        A2. One atomic step: a task that is held raises `TaskNotWaiting`, and so does one that has ended; an id
            without a record raises `TaskNotFound`. Nothing is changed then.
        A3. A task that is signed or encrypted is sealed again. Without the key it raises `KeyNeeded`, and
            `SerializationError` if its record does not match its seal.
        """
        if priority is None and queue is None and eta is None:
            raise InvalidTask(
                f"task {task_id}: give the priority, queue or eta that it should have"
            )
        changes = {"priority": priority, "queue": queue, "eta": eta}
        given = {name: value for name, value in changes.items() if value is not None}
        return await self._change_task(task_id, given)

    async def run_task_now(self, task_id: str) -> Task:
        """Make a waiting task due now; returns the task as it is now.

        A4. It is `change_task` with an eta that has come: what waits for a retry or its next time is due too.
            Pauses and limits hold, and its priority stays.
        """
        return await self._change_task(task_id, {"eta": None})

    async def _change_task(self, task_id: str, given: dict[str, Any]) -> Task:
        check_id(task_id)

        def edit(row: Row, now: int) -> None:
            if row.format > row_rules.FORMAT:
                raise SerializationError(
                    f"task {task_id}: a newer omniq has stored it; change it with that version"
                )
            if self._seals is None and has_seal(row.body):
                raise KeyNeeded(f"task {task_id}")
            task = msgspec.structs.replace(self._decoded(row), **given)
            self._check_task(task)
            body = self._serializer.encode_task(task)
            row_rules.change_waiting(row, task, body, now, due="eta" in given)

        row = await self._opened.change(task_id, edit)
        self._local_wakeups.notify_work()
        return self._task(row)

    # Dead letters

    async def retry_dead(
        self, task_id: str, *, task: Task | None = None, from_start: bool = False
    ) -> bool:
        """Put a dead letter's task back in the queue; returns False when there is no such dead letter.

        `task` is the same call with other arguments or limits. `from_start` deletes its checkpoint. A task that
        was signed or encrypted can be changed only with the key (`KeyNeeded`), and only if it and its dead
        letter are verified.

        D1. The same id, PENDING, due now, attempts 0; the dead letter and the old result are gone.
        D2. One atomic step: of two concurrent calls, one returns True.
        D3. When it cannot be enqueued (queue full, unique key taken), the dead letter stays.
        D5. Its `occurrence` stays the same, unless it has another call, or runs from the start.
        """
        check_id(task_id)
        edited = None
        if task is not None:
            self._check_task(task)
            record = await self._opened.record(task_id)
            if record is None or record.letter is None:
                return False
            stored = record.row
            if (task.id, task.func_path, task.queue) != (task_id, stored.func_path, stored.queue):
                # The fields that a storage filters and counts by must stay those of the task.
                raise InvalidTask(
                    f"task {task.id} of {task.func_path}: cannot replace task {task_id} "
                    f"of {stored.func_path}; change its arguments only"
                )
            self._check_may_edit(stored, record.letter)
            # It is due now: see D1.
            (edited,) = self._rows_for((msgspec.structs.replace(task, eta=None),), None)
            if not self._task(stored).is_verified:
                # Its call cannot be read, so that only its row has these.
                edited.gates, edited.max_crashes = stored.gates, stored.max_crashes
                edited.unique, edited.unique_aliases = stored.unique, stored.unique_aliases
        is_retried = await self._opened.retry_dead(task_id, edited, from_start=from_start)
        if is_retried:
            self._local_wakeups.notify_work()
        return is_retried

    def _check_may_edit(self, row: Row, letter: StoredLetter) -> None:
        """Refuse to seal what was not verified, or to replace a sealed call without the key."""
        if self._seals is None:
            if has_seal(row.body):
                raise KeyNeeded(f"task {row.id}")
        elif not (self._task(row).is_verified and self._letter(letter, row).is_verified):
            # To encode it again would sign what the store says, which anyone may have written.
            raise SerializationError(
                f"task {row.id}: its stored call cannot be read, or it or its dead letter is not verified, so "
                "that other arguments cannot be given to it; enqueue a new task instead"
            )

    async def delete_dead(self, task_id: str) -> bool:
        """Delete a dead letter and its checkpoint; returns False when there is none.

        D4. Its task's id is free again once its result is gone too.
        """
        return await self._opened.delete_dead(task_id)

    async def purge_dead(self, older_than: datetime) -> int:
        """Delete dead letters whose last failure was before that instant; returns how many."""
        check_now("older_than", older_than)
        return await self._opened.purge_dead(to_micros(older_than))

    # Pending hooks

    def know_hooks(self, may_have_hook: Callable[[str], bool]) -> None:
        """Say which functions may have an `on_dead` hook, by their paths, as far as this process knows.

        Without that, all may, for dead letters that no run of this process decided.
        """
        self._identity.may_have_hook = may_have_hook

    async def pending_hook(self, task_id: str) -> PendingHook | None:
        """Return the call of `on_dead` that a dead letter still waits for; None if there is none.

        H1. It is recorded in the same step as the dead letter: if its outcome names an owner that calls the
            hook, or any; and if its worker was lost, or gave up its lease, unless this process knows that the
            function has no hook.
        H2. It stays until it has ended, and is deleted with its dead letter, and when that is retried.
        """
        check_id(task_id)
        return await self._opened.pending_hook(task_id)

    async def pending_hooks(
        self, after: str = "", limit: int = 500
    ) -> tuple[list[PendingHook], str]:
        """Return a page of the pending hooks, in id order, and where the next page begins, if there is one."""
        return await self._opened.pending_hooks(after, limit)

    async def take_hook(self, hook: PendingHook) -> bool:
        """Take over the call of a hook whose owner is lost, or that has none; returns whether it was.

        H3. Of several owners that take one hook as they have read it, one returns True. It counts how many
            had it before and were lost.
        """
        return await self._opened.take_hook(hook, self._identity.owner)

    async def end_hook(self, task_id: str, token: int) -> None:
        """Record that the hook was called.

        H4. The hook of a later death of the same task stays.
        """
        await self._opened.end_hook(task_id, token)

    # Checkpoints and progress

    async def save_checkpoint(self, task_id: str, token: int, checkpoint: bytes) -> None:
        """Store the data that a task needs to resume.

        K1. Only the current claim may save; another raises `StaleClaim`.
        K2. It survives retries, releases and crashes, and is deleted when the task succeeds.
        K3. It stays with a dead letter, and is available when that is retried.
        """
        check_id(task_id)
        if len(checkpoint) > self._settings.max_payload:
            raise SerializationError(
                f"checkpoint of task {task_id} takes {len(checkpoint)} bytes, "
                f"more than max_payload {self._settings.max_payload}"
            )
        owner = self._identity.owner
        if not await self._opened.save_checkpoint(owner, task_id, token, checkpoint):
            raise StaleClaim(task_id, token)

    async def purge_checkpoints(self, older_than: datetime) -> int:
        """Delete checkpoints saved before that instant that no task needs; returns how many.

        K4. A checkpoint whose task is live or a dead letter stays, regardless of its age.
        """
        check_now("older_than", older_than)
        return await self._opened.purge_checkpoints(to_micros(older_than))

    async def report_progress(self, reports: Sequence[Progress]) -> None:
        """Store the newest progress of running tasks, in one round trip.

        P1. A report whose claim is not the current one is dropped.
        P2. It is deleted when the task ends.
        """
        if reports:
            await self._opened.report_progress(self._identity.owner, reports)

    # Schedules

    async def put_schedule(self, schedule: Schedule) -> None:
        """Store a schedule, replacing one with the same id.

        S1. Every change of a schedule increases its `version`.
        S4. A new schedule begins at a random version, so that an earlier schedule with the same id
            that was read before its deletion cannot be fired.
        """
        check_schedule(schedule)
        self._check_task(schedule.task)
        self._serializer.encode_task(schedule.task)
        # Below 2**52, so that every backend can increment it exactly.
        first_version = 1 + int(self._clock.random() * 2**51)
        await self._opened.put_schedule(msgspec.structs.replace(schedule, version=first_version))
        self._local_wakeups.notify_schedules()

    async def delete_schedule(self, schedule_id: str) -> bool:
        """Delete a schedule; returns False when there is none."""
        return await self._opened.delete_schedule(schedule_id)

    async def fire_schedule(
        self,
        schedule: Schedule,
        advanced: Schedule,
        task: Task | None,
        *,
        passed: datetime | None = None,
    ) -> bool:
        """Enqueue `task` and replace `schedule` by `advanced`, if it has not changed meanwhile.

        `passed` is the nominal time that is fired or, without a task, skipped.

        S2. `schedule` is as it was read; of two calls with the same version, one returns True.
        S3. The task is enqueued once for each nominal time, even if a worker dies in between.
        S5. A time that is not due yet by the store's clock is neither fired nor skipped: the call returns
            False and changes nothing.
        """
        row = None
        if task is not None:
            (row,) = self._rows_for((task,), f"schedule:{schedule.id}")
        fired = await self._opened.fire_schedule(
            schedule, advanced, row, None if passed is None else to_micros(passed)
        )
        if fired:
            self._local_wakeups.notify_work()
            if row is None:
                self._local_wakeups.notify_schedules()
        return fired

    def listen_for_schedules(self) -> AbstractContextManager[asyncio.Future[None]]:
        """A future that is done when a schedule may have changed.

        Only a hint: it is done for changes made through this storage, and perhaps for no others.
        """
        return self._local_wakeups.listen_for_schedules()

    # Documents of an older omniq

    async def older_documents(self, *, max_pages: int | None = None) -> list[OlderDocument]:
        """Return the schedules and checkpoints that wait for a seal; with no key, none does.

        `max_pages`: how many pages of a hundred checkpoints are searched; None for all.

        S6. An older omniq stored these with a key, and without a seal. A schedule among them is neither listed
            nor fired, and a task does not continue from such a checkpoint: both wait.
        """
        found = await self._opened.older_schedules()
        after, pages = "", 0
        while max_pages is None or pages < max_pages:
            checkpoints, after = await self._opened.older_checkpoints(after)
            for document, row in checkpoints:
                with suppress(SerializationError):
                    found.append(older_document(self._serializer, document, self._decoded(row)))
            pages += 1
            if not after:
                break
        return found

    async def seal_older(self, document: OlderDocument) -> bool:
        """Store the document with its seal, as it was read; returns False if it has changed since.

        S7. It is then like any other. One that has a `problem` is refused with `SerializationError`.
        """
        if document.problem:
            raise SerializationError(f"{document.kind} {document.id}: {document.problem}")
        is_sealed = await self._opened.seal(document.document, document.sealed)
        if is_sealed:
            self._local_wakeups.notify_schedules()
        return is_sealed

    # Workers

    async def pause_worker(self, worker_id: str) -> bool:
        """Stop the claims of one worker until it is resumed; returns False when it has no lease.

        V1. The worker learns it at each renewal, and `workers` shows it; its running tasks continue.
        V2. The pause ends with the worker's lease.
        """
        check_name("worker id", worker_id, error=InvalidValue)
        return await self._opened.pause_worker(worker_id, paused=True)

    async def resume_worker(self, worker_id: str) -> bool:
        """Allow the worker to claim again; returns False when it has no lease."""
        check_name("worker id", worker_id, error=InvalidValue)
        return await self._opened.pause_worker(worker_id, paused=False)

    async def stop_worker(self, worker_id: str, *, restart: bool = False) -> bool:
        """Ask one worker to stop, as by a signal; returns False when it has no lease.

        V3. The worker learns it at its next heartbeat, once. With `restart`, what supervises it starts
            another in its place.
        """
        check_name("worker id", worker_id, error=InvalidValue)
        action: Action = "restart" if restart else "stop"
        return await self._opened.ask_worker(worker_id, self._clock.new_id(), action)

    async def set_slots(self, worker_id: str, slots: int) -> bool:
        """Ask one worker to run at most this many tasks at a time; returns False when it has no lease.

        V6. The worker learns it at its next heartbeat, once; the last of several requests counts.
        """
        check_name("worker id", worker_id, error=InvalidValue)
        check_int("slots", slots, low=1, error=InvalidValue)
        if slots > _MOST_SLOTS:
            raise InvalidValue(f"slots {slots}: must be at most {_MOST_SLOTS:,}")
        return await self._opened.ask_worker(worker_id, self._clock.new_id(), "slots", slots)

    async def pending_requests(self) -> list[WorkerRequest]:
        """Return the requests that workers have not read yet."""
        return await self._opened.pending_requests()

    async def ping_worker(self, worker_id: str, timeout: float = 10.0) -> Pong | None:
        """Check that one worker answers; returns None if it does not within `timeout` seconds.

        V4. The answer is that of this call, made by the worker after it; one that has no lease is not asked.
        """
        check_name("worker id", worker_id, error=InvalidValue)
        engine, request_id = self._opened, self._clock.new_id()
        began = self._clock.monotonic()
        if not await engine.ask_worker(worker_id, request_id, "ping"):
            return None
        while (waited := self._clock.monotonic() - began) < timeout:
            answer = await engine.take_answer(worker_id, request_id)
            if answer is not None:
                return Pong(
                    worker_id=worker_id,
                    seconds=self._clock.monotonic() - began,
                    modules=answer.modules,
                    functions=answer.functions,
                    more=answer.more,
                )
            await self._clock.sleep(min(_ANSWER_PAUSE, timeout - waited))
        await engine.withdraw_request(worker_id, request_id)
        return None

    async def take_requests(self) -> list[WorkerRequest]:
        """Return the requests to this owner, each once. For a heartbeat."""
        return await self._opened.take_requests(self._identity.owner)

    async def answer_request(self, request: WorkerRequest, answer: WorkerAnswer) -> None:
        """Answer a request. For a heartbeat."""
        await self._opened.answer_request(request, answer)

    async def purge_requests(self, older_than: datetime) -> int:
        """Delete requests and answers from before that instant, which nothing reads any more; returns how many.

        V5. Those of workers that were lost are deleted by it.
        """
        check_now("older_than", older_than)
        return await self._opened.purge_requests(to_micros(older_than))

    # The history of runs

    async def add_run_counts(self, minutes: Sequence[PeriodCounts]) -> None:
        """Store how the runs of this owner ended in each of these minutes. For a worker.

        Y1. `run_counts` has the runs of a minute of an owner once, also if they are stored again: as they
            were stored last, until they are merged, and then as they were merged.
        """
        for minute in minutes:
            if minute.start % 60 or minute.start < 0:
                raise InvalidValue(f"start {minute.start}: expected the first second of a minute")
        if minutes:
            await self._opened.add_run_counts(self._identity.owner, minutes)

    async def merge_run_counts(self) -> int:
        """Add the minutes of single workers to those of all, and to their hours; returns how many.

        Y2. `run_counts` returns the same afterwards, and of two concurrent calls each minute is added once.
            The last three minutes stay as they are. One call merges at most 200 minutes of workers.
        """
        return await self._opened.merge_run_counts()

    async def purge_run_counts(self) -> int:
        """Delete counts that are no longer kept; returns how many documents, at most 500.

        Y3. Minutes are kept for three days, hours and versions for 90 days, ended workers for a day.
        """
        return await self._opened.purge_run_counts()

    async def note_version(self, version: Version) -> bool:
        """Store that a worker has started with a version; returns False if it is known.

        Y5. The time of its first start stays.
        """
        return await self._opened.note_version(version)

    async def add_audit_entry(self, entry: AuditEntry) -> None:
        """Store what an operator has done.

        Y7. `audit_log` returns it for 90 days, newest first, in pages.
        """
        await self._opened.add_audit_entry(entry, self._clock.new_id())

    def _rows_for(self, tasks: Iterable[Task], nonce: str | None) -> Iterator[Row]:
        """Yield the rows of tasks that are about to be enqueued, checking each task."""
        now = self._clock.micros()
        fresh = self._new_nonce() if nonce is None else nonce
        ids: set[str] = set()
        for task in tasks:
            self._check_task(task)
            if task.id in ids:
                raise DuplicateTask(task.id)
            ids.add(task.id)
            body = self._serializer.encode_task(task)
            row = row_of(task, body, now=now, default_ttl=self._default_ttl, nonce=fresh)
            if task.unique is not None and self._seals is not None:
                self._seals.name_unique_key(row, task.unique)
            yield row

    def _new_nonce(self) -> str:
        """A text that no other enqueue has, of any process: cheaper than an id, and shorter."""
        return f"{self._nonce_prefix}{next(self._nonces):x}"

    def _check_task(self, task: Task) -> None:
        check_task(task)
        if not task.is_verified:
            # Its arguments are missing, and to seal the rest would make it genuine.
            raise InvalidTask(
                f"task {task.id}: it was not verified when it was read (Task.is_verified), so that it is not "
                "stored again; leave it out"
            )
        if task.tz is not None:
            check_key("tz", task.tz)
        if task.cron is not None:
            check_key("cron", task.cron)
            check_cron(task.cron, task.tz, after=self._clock.now(), error=InvalidTask)


def check_now(field: str, instant: datetime) -> None:
    if instant is None:
        raise InvalidTask(f"{field}: expected a datetime")
    check_instant(field, instant)
