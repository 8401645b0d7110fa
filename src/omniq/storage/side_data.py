"""The data beside the queue: results, dead letters, checkpoints, progress, schedules, pauses.

The second part of the contract, for operators and for tasks that resume. `base` has the first part:
enqueue, claim and record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import datetime

import msgspec

from omniq.clock import Clock, seconds_to_micros, to_micros
from omniq.cron import check_cron
from omniq.errors import InvalidTask, InvalidValue, SerializationError, StaleClaim, StorageClosed
from omniq.models import (
    Progress,
    Schedule,
    Task,
    check_id,
    check_instant,
    check_key,
    check_name,
    check_schedule,
    check_task,
)
from omniq.settings import Settings
from omniq.storage.backend import Backend
from omniq.storage.inspection import Inspection
from omniq.storage.row_rules import Row, row_of
from omniq.storage.types import Capabilities
from omniq.storage.wakeups import LocalWakeups


class SideData(Inspection):
    """Verbs for the data beside the queue. Each numbered promise holds on every backend."""

    _clock: Clock
    _settings: Settings
    _local_wakeups: LocalWakeups
    _is_open: bool
    _backend: Backend

    @property
    def capabilities(self) -> Capabilities:
        """What this backend promises beyond the contract."""
        return self._backend.capabilities

    @property
    def owner(self) -> str:
        """The id under which this object claims; fresh at every opening and after every fencing."""
        raise NotImplementedError

    # Retention

    async def purge_results(self, older_than: datetime) -> int:
        """Delete tasks that finished before that instant; returns how many.

        T1. Only finished tasks are deleted; none that waits or runs, and no dead letter.
        T2. Their ids are free again.
        """
        self._check_open()
        check_now("older_than", older_than)
        return await self._purge_results(to_micros(older_than))

    async def purge_expired(self) -> int:
        """Delete finished tasks whose `result_ttl` has passed; returns how many.

        T3. A record past its `result_ttl` is not returned to readers, purged or not.
        T4. `result_ttl=0` stores nothing of a task that ended, except its dead letter.
        """
        self._check_open()
        return await self._purge_expired()

    async def delete_task(self, task_id: str) -> bool:
        """Delete a finished task; returns False when there is no such record.

        T5. No task that waits or runs is touched, nor any other task, nor a dead letter.
        """
        self._check_open()
        check_id(task_id)
        return await self._delete_task(task_id)

    # Dead letters

    async def retry_dead(
        self, task_id: str, *, task: Task | None = None, from_start: bool = False
    ) -> bool:
        """Put a dead letter's task back in the queue; returns False when there is no such dead letter.

        `task` is the same call with other arguments. `from_start` deletes its checkpoint.

        D1. The same id, PENDING, due now, attempts 0; the dead letter and the old result are gone.
        D2. One atomic step: of two concurrent calls, one returns True.
        D3. When it cannot be enqueued (queue full, unique key taken), the dead letter stays.
        """
        self._check_open()
        check_id(task_id)
        body = None
        if task is not None:
            self._check_task(task)
            letter = await self.get_dead(task_id)
            if letter is None:
                return False
            if (task.id, task.func_path, task.queue) != (
                task_id,
                letter.func_path,
                letter.queue,
            ):
                # The fields that a storage filters and counts by must stay those of the task.
                raise InvalidTask(
                    f"task {task.id} of {task.func_path}: cannot replace task {task_id} "
                    f"of {letter.func_path}; change its arguments only"
                )
            body = self._serializer.encode_task(task)
        is_retried = await self._retry_dead(task_id, body, from_start)
        if is_retried:
            self._local_wakeups.notify_work()
        return is_retried

    async def delete_dead(self, task_id: str) -> bool:
        """Delete a dead letter and its checkpoint; returns False when there is none.

        D4. Its task's id is free again once its result is gone too.
        """
        self._check_open()
        return await self._engine.delete_dead(task_id)

    async def purge_dead(self, older_than: datetime) -> int:
        """Delete dead letters whose last failure was before that instant; returns how many."""
        self._check_open()
        check_now("older_than", older_than)
        return await self._purge_dead(to_micros(older_than))

    # Checkpoints and progress

    async def save_checkpoint(self, task_id: str, token: int, checkpoint: bytes) -> None:
        """Store the data that a task needs to resume.

        K1. Only the current claim may save; another raises `StaleClaim`.
        K2. It survives retries, releases and crashes, and is deleted when the task succeeds.
        K3. It stays with a dead letter, and is available when that is retried.
        """
        self._check_open()
        check_id(task_id)
        if len(checkpoint) > self._settings.max_payload:
            raise SerializationError(
                f"checkpoint of task {task_id} takes {len(checkpoint)} bytes, "
                f"more than max_payload {self._settings.max_payload}"
            )
        if not await self._save_checkpoint(self.owner, task_id, token, checkpoint):
            raise StaleClaim(task_id, token)

    async def purge_checkpoints(self, older_than: datetime) -> int:
        """Delete checkpoints saved before that instant that no task needs; returns how many.

        K4. A checkpoint whose task is live or a dead letter stays, regardless of its age.
        """
        self._check_open()
        check_now("older_than", older_than)
        return await self._purge_checkpoints(to_micros(older_than))

    async def report_progress(self, reports: Sequence[Progress]) -> None:
        """Store the newest progress of running tasks, in one round trip.

        P1. A report whose claim is not the current one is dropped.
        P2. It is deleted when the task ends.
        """
        self._check_open()
        if reports:
            await self._report_progress(self.owner, reports)

    # Schedules

    async def put_schedule(self, schedule: Schedule) -> None:
        """Store a schedule, replacing one with the same id.

        S1. Every change of a schedule increases its `version`.
        S4. A new schedule begins at a random version, so that an earlier schedule with the same id
            that was read before its deletion cannot be fired.
        """
        self._check_open()
        check_schedule(schedule)
        self._check_task(schedule.task)
        self._serializer.encode_task(schedule.task)
        # Below 2**52, so that every backend can increment it exactly.
        first_version = 1 + int(self._clock.random() * 2**51)
        await self._put_schedule(msgspec.structs.replace(schedule, version=first_version))
        self._local_wakeups.notify_schedules()

    async def delete_schedule(self, schedule_id: str) -> bool:
        """Delete a schedule; returns False when there is none."""
        self._check_open()
        return await self._engine.delete_schedule(schedule_id)

    async def fire_schedule(
        self, schedule: Schedule, advanced: Schedule, task: Task | None
    ) -> bool:
        """Enqueue `task` and replace `schedule` by `advanced`, if it has not changed meanwhile.

        S2. `schedule` is as it was read; of two calls with the same version, one returns True.
        S3. The task is enqueued once for each nominal time, even if a worker dies in between.
        """
        self._check_open()
        row = None
        if task is not None:
            self._check_task(task)
            row = row_of(
                task,
                self._serializer.encode_task(task),
                now=self._clock.micros(),
                default_ttl=seconds_to_micros(self._settings.result_ttl),
                nonce=f"schedule:{schedule.id}",
            )
        fired = await self._fire_schedule(schedule, advanced, row)
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

    # Queues

    async def pause_queue(self, queue: str) -> None:
        """Stop all claims from the queue, on every worker, until it is resumed.

        G1. A paused queue accepts tasks, and none is claimed from it; running tasks continue.
        """
        self._check_open()
        check_name("queue", queue, error=InvalidValue)
        await self._set_paused(queue, True)

    async def resume_queue(self, queue: str) -> None:
        """Allow claims from the queue again."""
        self._check_open()
        check_name("queue", queue, error=InvalidValue)
        await self._set_paused(queue, False)
        self._local_wakeups.notify_work()

    # Workers

    async def pause_worker(self, worker_id: str) -> bool:
        """Stop the claims of one worker until it is resumed; returns False when it has no lease.

        V1. The worker learns it at each renewal, and `workers` shows it; its running tasks continue.
        V2. The pause ends with the worker's lease.
        """
        self._check_open()
        check_name("worker id", worker_id, error=InvalidValue)
        return await self._set_worker_paused(worker_id, True)

    async def resume_worker(self, worker_id: str) -> bool:
        """Allow the worker to claim again; returns False when it has no lease."""
        self._check_open()
        check_name("worker id", worker_id, error=InvalidValue)
        return await self._set_worker_paused(worker_id, False)

    # What a backend implements

    async def _purge_results(self, before: int) -> int:
        return await self._engine.purge_results(before)

    async def _purge_expired(self) -> int:
        return await self._engine.purge_expired()

    async def _delete_task(self, task_id: str) -> bool:
        return await self._engine.delete_task(task_id)

    async def _retry_dead(self, task_id: str, body: bytes | None, from_start: bool) -> bool:
        return await self._engine.retry_dead(task_id, body, from_start=from_start)

    async def _purge_dead(self, before: int) -> int:
        return await self._engine.purge_dead(before)

    async def _save_checkpoint(
        self, owner: str, task_id: str, token: int, checkpoint: bytes
    ) -> bool:
        return await self._engine.save_checkpoint(owner, task_id, token, checkpoint)

    async def _purge_checkpoints(self, before: int) -> int:
        return await self._engine.purge_checkpoints(before)

    async def _report_progress(self, owner: str, reports: Sequence[Progress]) -> None:
        await self._engine.report_progress(owner, reports)

    async def _put_schedule(self, schedule: Schedule) -> None:
        await self._engine.put_schedule(schedule)

    async def _fire_schedule(self, schedule: Schedule, advanced: Schedule, row: Row | None) -> bool:
        return await self._engine.fire_schedule(schedule, advanced, row)

    async def _set_paused(self, queue: str, paused: bool) -> None:
        await self._engine.pause_queue(queue, paused=paused)

    async def _set_worker_paused(self, owner: str, paused: bool) -> bool:
        return await self._engine.pause_worker(owner, paused=paused)

    # Written once

    def _check_open(self) -> None:
        if not self._is_open:
            raise StorageClosed(
                f"the {self.capabilities.name} storage is not open; use it inside 'async with'"
            )

    def _check_task(self, task: Task) -> None:
        check_task(task)
        if task.tz is not None:
            check_key("tz", task.tz)
        if task.cron is not None:
            check_key("cron", task.cron)
            check_cron(task.cron, task.tz, after=self._clock.now(), error=InvalidTask)


def check_now(field: str, instant: datetime) -> None:
    if instant is None:
        raise InvalidTask(f"{field}: expected a datetime")
    check_instant(field, instant)
