"""The read side of the storage contract, for the queue, the command line and the dashboard.

No method here changes stored data, and claiming and recording need none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from omniq.clock import from_micros, to_micros
from omniq.concurrency.process_id import PROCESS_ID
from omniq.errors import InvalidValue, SerializationError, StorageClosed, StorageError
from omniq.gate_rules import GateState
from omniq.models import (
    Attempt,
    AuditEntry,
    DeadLetter,
    EndedWorker,
    Progress,
    QueueStats,
    Schedule,
    StoredLetter,
    Task,
    TaskResult,
    TaskStatus,
    Version,
    WorkerInfo,
    check_id,
    check_instant,
    check_int,
)
from omniq.serialization import Serializer
from omniq.storage.row_rules import Row, retrying_result, task_of
from omniq.storage.row_seals import RowSeals, letter_without_key
from omniq.storage.run_counts import PeriodCounts
from omniq.storage.types import Capabilities

if TYPE_CHECKING:
    from omniq.storage.backend import Backend
    from omniq.storage.engine import Engine
    from omniq.storage.pauses import Pause

MAX_PAGE = 10_000
_MIN_PAGE = 500
MAX_SCANNED = 10_000
"""Records that one scan reads at most.

That takes a few hundredths of a second on every storage that has an order of enqueue.
"""


class TaskQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which tasks to list, sorted by id; `after` is the last id of the previous page."""

    status: TaskStatus | None = None
    queue: str | None = None
    func_path: str | None = None
    limit: int = 100
    after: str = ""


class ScanQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which tasks to find, newest first.

    `cursor` is where the previous scan stopped. Without one, the scan begins at `until`
    (microseconds since 1970), or with the newest task. `max_scanned` is the number of records that
    may be read.
    """

    status: TaskStatus | None = None
    queue: str | None = None
    func_path: str | None = None
    limit: int = 100
    max_scanned: int = MAX_SCANNED
    until: int | None = None
    cursor: str | None = None


class Scan(msgspec.Struct, frozen=True):
    """The rows that a scan found. `cursors[i]` continues the scan after `rows[i]`.

    `cursor` continues after the last record that was read; None when there are no more.
    """

    rows: list[Row]
    cursors: list[str]
    cursor: str | None


class TaskScan(msgspec.Struct, frozen=True):
    """The tasks that a scan found, newest first. `cursors[i]` continues the scan after `tasks[i]`.

    `cursor` continues after the last record that was read; None when there are no more. It may be
    set although few tasks or none were found, because one scan reads a bounded number of records.
    """

    tasks: tuple[Task, ...]
    cursors: tuple[str, ...]
    cursor: str | None


class DeadQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which dead letters to list, sorted by id; `after` is the last id of the previous page.

    Their last failure was at `since` or later, and before `until` (microseconds since 1970).
    """

    func_path: str | None = None
    reason: str | None = None
    limit: int = 100
    after: str = ""
    since: int | None = None
    until: int | None = None


def row_matches(row: Row, query: TaskQuery | ScanQuery) -> bool:
    """Whether the query describes the row."""
    return (
        query.status in (None, row.status)
        and query.queue in (None, row.queue)
        and query.func_path in (None, row.func_path)
    )


def letter_matches(letter: DeadLetter, query: DeadQuery) -> bool:
    """Whether the query describes the dead letter."""
    failed_at = to_micros(letter.last_failure)
    return (
        query.func_path in (None, letter.func_path)
        and query.reason in (None, letter.failure_reason)
        and (query.since is None or failed_at >= query.since)
        and (query.until is None or failed_at < query.until)
    )


class Inspection:
    """The queries that every storage answers.

    Promises:
    Q1. A task is found by its id from the moment its enqueue returned until its record is purged.
    Q2. A listed task equals what `get_task` returns; pages in id order contain every task that
        existed throughout, exactly once.
    Q3. `stats` counts each task once, under its status; `by_status` has an entry for every status.
    Q4. A result that is not final is returned as such (RETRYING), never as SUCCESS or FAILED.
    Q5. A reader gets a copy: nothing a reader does changes what is stored.
    Q6. The history of a task has its failed runs in order, the first and the newest ones; that of a
        dead letter exists as long as the dead letter.
    Q7. Scans that continue where the last one stopped find every matching task that existed
        throughout, exactly once, newest first. A storage without an order of enqueue sorts by the
        ids that omniq makes; of tasks with other ids it then reads the first thousand.
    Q8. `oldest_by_queue` has an entry for each queue in which a task is due: for how long its first
        task has been due. A task that is held or not due yet does not count. Redis reads the due times of a
        thousand tasks; of more, a fair key or ageing can make it miss one that is due earlier.
    """

    _serializer: Serializer
    _seals: RowSeals | None
    _check_row: Callable[[Row, Task], None]
    _backend: Backend
    _engine: Engine
    _is_open: bool
    _pid: int

    @property
    def capabilities(self) -> Capabilities:
        """What this backend promises beyond the contract."""
        return self._backend.capabilities

    @property
    def _opened(self) -> Engine:
        """The engine, for a storage that is open; else `StorageClosed`."""
        self._check_open()
        return self._engine

    def _check_open(self) -> None:
        if not self._is_open:
            raise StorageClosed(
                f"the {self.capabilities.name} storage is not open; write 'with TaskQueue(…) as queue:' or "
                "'async with AsyncTaskQueue(…) as queue:', or call open() first"
            )
        if self._pid != PROCESS_ID.number:
            raise StorageError(
                f"the {self.capabilities.name} storage was opened by process {self._pid}, and is used "
                f"in process {PROCESS_ID.number} after a fork; open a separate storage in each process"
            )

    async def get_task(self, task_id: str) -> Task | None:
        """Return the task as it is now; None when it has no record."""
        check_id(task_id)
        record = await self._opened.record(task_id)
        if record is None or not (record.is_live or record.finished):
            return None
        return self._task(record.newest_row)

    async def get_result(self, task_id: str) -> TaskResult | None:
        """Return the newest result; None while there is none. Does not wait."""
        check_id(task_id)
        record = await self._opened.record(task_id)
        if record is None:
            return None
        if record.finished is not None:
            return self._result(task_id, record.finished.result)
        if record.row.repeats:
            newest = await self._engine.newest_result(task_id)
            if newest is not None:
                return self._result(task_id, newest)
        return retrying_result(record.row)

    async def list_tasks(
        self,
        *,
        status: TaskStatus | None = None,
        queue: str | None = None,
        func_path: str | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> list[Task]:
        """Return tasks in id order, which for ids made by omniq is the order of enqueue."""
        query = TaskQuery(
            status=None if status is None else _status(status),
            queue=queue,
            func_path=func_path,
            limit=_page_size(limit),
            after=after or "",
        )
        return [self._task(row) for row in await self._opened.page(query)]

    async def scan_tasks(
        self,
        *,
        status: TaskStatus | None = None,
        queue: str | None = None,
        func_path: str | None = None,
        limit: int = 100,
        until: datetime | None = None,
        cursor: str | None = None,
        max_scanned: int = MAX_SCANNED,
    ) -> TaskScan:
        """Return tasks, newest first, at a bounded cost however many are stored.

        `until` begins with tasks enqueued about then; a `cursor` takes precedence over it.
        `max_scanned` is about the number of records read: where the status has an index, only
        records with that status count.
        """
        check_int("max_scanned", max_scanned, low=1, error=InvalidValue)
        check_instant("until", until, error=InvalidValue)
        query = ScanQuery(
            status=None if status is None else _status(status),
            queue=queue,
            func_path=func_path,
            limit=_page_size(limit),
            until=None if until is None else to_micros(until),
            cursor=cursor,
            max_scanned=max_scanned,
        )
        found = await self._opened.page(query)
        tasks = tuple(self._task(row) for row in found.rows)
        return TaskScan(tasks, tuple(found.cursors), found.cursor)

    async def history(self, task_id: str) -> list[Attempt]:
        """Return the task's runs that did not succeed, oldest first."""
        check_id(task_id)
        record = await self._opened.record(task_id)
        return [] if record is None else list(record.newest_row.history)

    async def list_dead(
        self,
        *,
        func_path: str | None = None,
        reason: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 100,
        after: str | None = None,
        task_type: str | None = None,
    ) -> list[DeadLetter]:
        """Return dead letters in id order whose last failure was at `since` or later, before `until`.

        No storage has an index of types: with `task_type`, all that match the rest are read.
        """
        for name, instant in (("since", since), ("until", until)):
            check_instant(name, instant, error=InvalidValue)
        query = DeadQuery(
            func_path=func_path,
            reason=reason,
            limit=_page_size(limit),
            after=after or "",
            since=None if since is None else to_micros(since),
            until=None if until is None else to_micros(until),
        )
        if task_type is not None:
            return await self._dead_of_type(task_type, query)
        return [self._letter(letter) for letter in await self._opened.page(query)]

    async def _dead_of_type(self, task_type: str, query: DeadQuery) -> list[DeadLetter]:
        found: list[DeadLetter] = []
        pages = msgspec.structs.replace(query, limit=max(query.limit, _MIN_PAGE))
        while len(found) < query.limit and (page := await self._opened.page(pages)):
            letters = map(self._letter, page)
            found += [letter for letter in letters if letter.task_type == task_type]
            pages = msgspec.structs.replace(pages, after=page[-1].task_id)
        return found[: query.limit]

    async def get_dead_task(self, task_id: str) -> Task | None:
        """Return a dead letter's task as it would be retried, even if its result was purged."""
        check_id(task_id)
        record = await self._opened.record(task_id)
        return None if record is None or record.letter is None else self._task(record.row)

    async def stats(self) -> QueueStats:
        """Return the number of tasks by status and by queue, and the number of dead letters."""
        return await self._opened.stats()

    async def count_waiting(self) -> int:
        """Return the number of tasks that wait for their next run."""
        return await self._opened.count_waiting()

    async def workers(self) -> list[WorkerInfo]:
        """Return the workers whose lease has not expired, in id order, with the tasks each holds."""
        return await self._opened.workers()

    async def held_by(self, owner: str) -> dict[str, int]:
        """Return the owner's claims according to the store: task id to token."""
        return await self._opened.held_by(owner)

    async def get_dead(self, task_id: str) -> DeadLetter | None:
        """Return the task's dead letter, with its checkpoint."""
        found = await self._opened.get_dead(task_id)
        return None if found is None else self._letter(*found)

    async def get_progress(self, task_id: str) -> Progress | None:
        """Return the last progress that the running task reported."""
        return await self._opened.get_progress(task_id)

    async def progress_of(self, task_ids: Sequence[str]) -> dict[str, Progress]:
        """Return the last progress of each of these tasks that has reported one, in one read.

        P3. It is what `get_progress` returns for each of them.
        """
        return await self._opened.progress_of(task_ids) if task_ids else {}

    async def load_checkpoint(self, task_id: str) -> bytes | None:
        """Return the task's checkpoint, as `save_checkpoint` last stored it."""
        return await self._opened.load_checkpoint(task_id)

    async def get_schedule(self, schedule_id: str) -> Schedule | None:
        """Return the schedule as it is now; None when there is none with that id."""
        return await self._opened.get_schedule(schedule_id)

    async def list_schedules(self) -> list[Schedule]:
        """Return all schedules, in id order."""
        return await self._opened.list_schedules()

    async def unreadable_schedules(self) -> dict[str, str]:
        """Return why schedules cannot be read here, by id: `list_schedules` leaves these out.

        S8. They are those that are damaged, or signed with a key that this process does not have.
        """
        return await self._opened.unreadable_schedules()

    async def paused_queues(self) -> frozenset[str]:
        """Return the queues from which nothing is claimed."""
        return await self._opened.paused_queues()

    async def pauses(self) -> list[Pause]:
        """Return the queues and functions of which nothing is claimed, with reasons."""
        return await self._opened.pauses()

    async def gates(self) -> dict[str, GateState]:
        """Return the shared state of every concurrency limit, rate limit and breaker ever used."""
        return await self._opened.gates()

    async def run_counts(
        self,
        since: datetime,
        until: datetime,
        *,
        hours: bool = False,
        only_totals: bool = False,
        function: str | None = None,
        queue: str | None = None,
    ) -> list[PeriodCounts]:
        """Return how runs ended in each minute from `since` on, before `until`; with `hours`, in each hour.

        Periods without runs are left out. With `only_totals`, so are functions and workers, which is faster. With
        `function` or `queue`, the other functions or queues are left out; the totals still count them.

        Y4. A minute that a worker has stored is in it, merged or not, in order of time.
        """
        bounds = [to_micros(instant) // 1_000_000 for instant in (since, until)]
        return await self._opened.run_counts(
            *bounds, hours=hours, only_totals=only_totals, function=function, queue=queue
        )

    async def versions(self) -> list[Version]:
        """Return the versions that workers have started with, in the order of their first start."""
        return await self._opened.versions()

    async def audit_log(self, after: str = "", limit: int = 100) -> tuple[list[AuditEntry], str]:
        """Return a page of operator actions, newest first, and where the next page begins, if there is one."""
        return await self._opened.audit_log(after, _page_size(limit))

    async def ended_workers(self) -> list[EndedWorker]:
        """Return the workers that ended in the last 24 hours, newest first.

        Y6. They include workers that were stopped, and workers that were lost, with the number of tasks that they held.
        """
        return await self._opened.ended_workers()

    def _task(self, row: Row) -> Task:
        """Return the row's task; one that cannot be decoded is returned without its arguments."""
        try:
            return task_of(row, self._decoded(row))
        except SerializationError:
            return _task_without_call(row)

    def _decoded(self, row: Row) -> Task:
        """Return the task as enqueued; `SerializationError` if the body does not match the row."""
        task = self._serializer.decode_task(row.body)
        self._check_row(row, task)
        return task

    def _letter(self, stored: StoredLetter, row: Row | None = None) -> DeadLetter:
        if self._seals is None:
            return letter_without_key(stored)
        return self._seals.opened_letter(stored, row)

    def _result(self, task_id: str, encoded: bytes) -> TaskResult:
        result = self._serializer.decode_result(encoded)
        if result.task_id != task_id:
            raise SerializationError(
                f"task {task_id}: the stored result belongs to task {result.task_id}"
            )
        return result


def _task_without_call(row: Row) -> Task:
    """What the row says of a task whose call cannot be read; without its times if they are no times."""
    task = Task(
        id=row.id,
        func_path=row.func_path,
        queue=row.queue,
        priority=row.priority,
        created_at=from_micros(0),
        status=row.status,
        is_verified=False,
    )
    try:
        expires = None if row.expires is None else from_micros(row.expires)
        known = msgspec.structs.replace(
            task, created_at=from_micros(row.created_at), expires=expires
        )
        return task_of(row, known)
    except (SerializationError, OverflowError):
        return task


def cursor_sequence(cursor: str | None) -> int | None:
    """Return the `seq` at which a scan in order of enqueue stopped."""
    if cursor is None:
        return None
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) < 19):
        raise InvalidValue("cursor: pass one that an earlier page returned")
    return int(cursor)


def scan_by_sequence(rows: list[Row], limit: int, stopped_at: int | None) -> Scan:
    """Return a scan in order of enqueue. `rows` holds up to `limit + 1` rows.

    `stopped_at`: the `seq` at which reading stopped because the bound on records was reached.
    """
    cursors = [str(row.seq) for row in rows[:limit]]
    if len(rows) > limit:
        return Scan(rows[:limit], cursors, cursors[-1] if cursors else str(rows[0].seq + 1))
    return Scan(rows, cursors, None if stopped_at is None else str(stopped_at))


def _status(status: str) -> TaskStatus:
    """Return the status, which may be given by name."""
    try:
        return TaskStatus(status)
    except ValueError:
        known = ", ".join(TaskStatus)
        raise InvalidValue(f"status {status!r}: expected one of {known}") from None


def _page_size(limit: int) -> int:
    if type(limit) is not int or not 0 <= limit <= MAX_PAGE:
        raise InvalidValue(f"limit {limit!r}: expected a whole number from 0 to {MAX_PAGE}")
    return limit
