"""The read side of a storage: what the queue, the command line and the dashboard may ask.

Nothing here changes anything, and nothing here is needed to claim or to record.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import datetime

import msgspec

from omniq.clock import from_micros, to_micros
from omniq.errors import InvalidTask, SerializationError
from omniq.gate_rules import GateState
from omniq.models import (
    Attempt,
    DeadLetter,
    Progress,
    QueueStats,
    Schedule,
    Task,
    TaskResult,
    TaskStatus,
    WorkerInfo,
    check_id,
    check_instant,
    check_int,
)
from omniq.serialization import Serializer
from omniq.storage.row_rules import FinishedRow, Row, check_body, retrying_result, task_of

MAX_PAGE = 10_000
MOST_LOOKED_AT = 10_000
"""Records that a scan looks at: a few hundredths of a second on any storage that has an order."""


class TaskQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which tasks to list. Tasks come sorted by id; `after` is the last id of the page before."""

    status: TaskStatus | None = None
    queue: str | None = None
    func_path: str | None = None
    limit: int = 100
    after: str = ""


class ScanQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which tasks to look for, the newest first.

    `cursor` is where the scan before has stopped; without one it begins at `until`, microseconds
    since 1970, or with the newest. `most` is how many records may be looked at.
    """

    status: TaskStatus | None = None
    queue: str | None = None
    func_path: str | None = None
    limit: int = 100
    most: int = MOST_LOOKED_AT
    until: int | None = None
    cursor: str | None = None


class Scan(msgspec.Struct, frozen=True):
    """The rows of a scan, each with the cursor that goes on after it.

    `cursor` goes on after all that was looked at; None: there are no others.
    """

    rows: list[Row]
    marks: list[str]
    cursor: str | None


class TaskScan(msgspec.Struct, frozen=True):
    """The tasks that a scan has found, the newest first, each with the cursor that goes on after it.

    `cursor` goes on after all that was looked at; None: there are no others. It may lead on though
    few were found, even none: a scan looks at so many records and no more.
    """

    tasks: tuple[Task, ...]
    marks: tuple[str, ...]
    cursor: str | None


class DeadQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which dead letters to list, sorted by id; `after` is the last id of the page before."""

    task_type: str | None = None
    reason: str | None = None
    limit: int = 100
    after: str = ""


class Inspection(ABC):
    """Questions every storage answers.

    Promises:
    Q1. A task is found by its id from the moment its enqueue returned until its record is purged.
    Q2. A listed task is what `get_task` would give; pages in id order cover every task that was
        there throughout, once.
    Q3. `stats` counts each task once, under its status; `by_status` names every status.
    Q4. A result that is not final is given out as such (RETRYING), never as SUCCESS or FAILED.
    Q5. What a reader gets is a copy: nothing a reader does changes what the storage holds.
    Q6. The history of a task has its failed runs in order, the first and the newest ones; that of a
        dead letter is there as long as the letter.
    Q7. Scans that go on where the last has stopped find every task in question that was there
        throughout, once, the newest first. Where a storage keeps no order of enqueue it goes by the
        ids that omniq makes; of others it then looks at the first thousand.
    Q8. `oldest_by_queue` names the queues in which a task is due, and for how long the first of
        each has been; a task that is held or not due yet does not count.
    """

    _serializer: Serializer

    async def get_task(self, task_id: str) -> Task | None:
        """The task as it is now; None when there is no record of it."""
        check_id(task_id)
        found = await self._find(task_id)
        if found is None:
            return None
        return self._task(found.row if isinstance(found, FinishedRow) else found)

    async def get_result(self, task_id: str) -> TaskResult | None:
        """The newest result; None while there is none. Does not wait."""
        check_id(task_id)
        found = await self._find(task_id)
        if isinstance(found, FinishedRow):
            return self._result(task_id, found.result)
        if found is None:
            return None
        if found.repeats:
            kept = await self._find_newest_result(task_id)
            if kept is not None:
                return self._result(task_id, kept)
        return retrying_result(found)

    async def list_tasks(
        self,
        *,
        status: TaskStatus | None = None,
        queue: str | None = None,
        func_path: str | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> list[Task]:
        """Tasks in id order, which for ids made by omniq is the order of enqueue."""
        query = TaskQuery(
            status=None if status is None else _status(status),
            queue=queue,
            func_path=func_path,
            limit=_page_size(limit),
            after=after or "",
        )
        return [self._task(row) for row in await self._list(query)]

    async def scan_tasks(
        self,
        *,
        status: TaskStatus | None = None,
        queue: str | None = None,
        func_path: str | None = None,
        limit: int = 100,
        until: datetime | None = None,
        cursor: str | None = None,
        most: int = MOST_LOOKED_AT,
    ) -> TaskScan:
        """Tasks from the newest on, at a bounded cost however many there are.

        `until` begins with those enqueued about then; a `cursor` comes before it. `most` is about
        how many records are looked at: of a status that has an index, only those that have it.
        """
        check_int("most", most, low=1)
        check_instant("until", until)
        query = ScanQuery(
            status=None if status is None else _status(status),
            queue=queue,
            func_path=func_path,
            limit=_page_size(limit),
            until=None if until is None else to_micros(until),
            cursor=cursor,
            most=most,
        )
        found = await self._scan(query)
        tasks = tuple(self._task(row) for row in found.rows)
        return TaskScan(tasks, tuple(found.marks), found.cursor)

    async def history(self, task_id: str) -> list[Attempt]:
        """The task's runs that did not succeed, oldest first."""
        check_id(task_id)
        found = await self._find(task_id) or await self._find_dead_row(task_id)
        if found is None:
            return []
        row = found.row if isinstance(found, FinishedRow) else found
        return list(row.history)

    async def list_dead(
        self,
        *,
        task_type: str | None = None,
        reason: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> list[DeadLetter]:
        """Dead letters in id order; those whose last failure was at `since` or later, before `until`."""
        for name, instant in (("since", since), ("until", until)):
            check_instant(name, instant)
        query = DeadQuery(
            task_type=task_type, reason=reason, limit=_page_size(limit), after=after or ""
        )
        page = await self._list_dead(query)
        found: list[DeadLetter] = []
        # Letters are few, and times are asked for by people: not worth an index on every backend.
        while page:
            found += [letter for letter in page if _failed_within(letter, since, until)]
            if len(found) >= limit or len(page) < limit:
                break
            query = msgspec.structs.replace(query, after=page[-1].task_id)
            page = await self._list_dead(query)
        return found[:limit]

    async def get_dead_task(self, task_id: str) -> Task | None:
        """The task of a dead letter, as it would be retried; also when its result has gone."""
        check_id(task_id)
        row = await self._find_dead_row(task_id)
        return None if row is None else self._task(row)

    @abstractmethod
    async def stats(self) -> QueueStats:
        """How much of what there is."""

    async def count_waiting(self) -> int:
        """How many tasks wait for their next run."""
        by_status = (await self.stats()).by_status
        return by_status[TaskStatus.PENDING] + by_status[TaskStatus.RETRYING]

    @abstractmethod
    async def workers(self) -> list[WorkerInfo]:
        """Workers whose lease has not ended, in id order, each with the tasks it holds."""

    @abstractmethod
    async def held_by(self, owner: str) -> dict[str, int]:
        """The claims of an owner as the storage sees them: task id to token."""

    @abstractmethod
    async def get_dead(self, task_id: str) -> DeadLetter | None:
        """The dead letter of that task, with its checkpoint."""

    @abstractmethod
    async def get_progress(self, task_id: str) -> Progress | None:
        """What the running task last reported."""

    @abstractmethod
    async def load_checkpoint(self, task_id: str) -> bytes | None:
        """What `save_checkpoint` last kept for the task."""

    @abstractmethod
    async def get_schedule(self, schedule_id: str) -> Schedule | None:
        """The schedule as it is now."""

    @abstractmethod
    async def list_schedules(self) -> list[Schedule]:
        """All schedules, in id order."""

    @abstractmethod
    async def paused_queues(self) -> frozenset[str]:
        """Queues from which nothing is claimed."""

    @abstractmethod
    async def gates(self) -> dict[str, GateState]:
        """The shared state of every running limit, rate limit and breaker that was ever used."""

    @abstractmethod
    async def _find(self, task_id: str) -> Row | FinishedRow | None:
        """The record of the task, live or finished; None also when its `expires_at` has passed."""

    @abstractmethod
    async def _find_dead_row(self, task_id: str) -> Row | None:
        """The row that a dead letter keeps for its retry."""

    @abstractmethod
    async def _find_newest_result(self, task_id: str) -> bytes | None:
        """The encoded result of a repeating task's newest run."""

    @abstractmethod
    async def _list(self, query: TaskQuery) -> list[Row]:
        """The rows of a page, live and finished together, in id order."""

    @abstractmethod
    async def _scan(self, query: ScanQuery) -> Scan:
        """The rows in question from the newest on, and where to go on."""

    @abstractmethod
    async def _list_dead(self, query: DeadQuery) -> list[DeadLetter]:
        """The dead letters of a page, in id order, without their checkpoints."""

    def _task(self, row: Row) -> Task:
        """The task of a row; one that cannot be decoded is still shown, without its arguments."""
        try:
            task = self._decoded(row)
        except SerializationError:
            task = Task(
                id=row.id,
                func_path=row.func_path,
                queue=row.queue,
                priority=row.priority,
                expires=None if row.expires is None else from_micros(row.expires),
                created_at=from_micros(row.created_at),
            )
        return task_of(row, task)

    def _decoded(self, row: Row) -> Task:
        """What was enqueued; `SerializationError` when the row has no such body."""
        task = self._serializer.decode_task(row.body)
        check_body(row, task)
        return task

    def _result(self, task_id: str, kept: bytes) -> TaskResult:
        result = self._serializer.decode_result(kept)
        if result.task_id != task_id:
            raise SerializationError(f"task {task_id}: its result is that of {result.task_id}")
        return result


def sequence_of(cursor: str | None) -> int | None:
    """Where a scan in order of enqueue has stopped."""
    if cursor is None:
        return None
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) < 19):
        raise InvalidTask("cursor: not one that a page has given")
    return int(cursor)


def scanned(rows: list[Row], limit: int, stopped_at: int | None) -> Scan:
    """A scan in order of enqueue. `rows` are one more than wanted, where there are more.

    `stopped_at`: where it has stopped because it has looked at enough.
    """
    marks = [str(row.seq) for row in rows[:limit]]
    if len(rows) > limit:
        return Scan(rows[:limit], marks, marks[-1] if marks else str(rows[0].seq + 1))
    return Scan(rows, marks, None if stopped_at is None else str(stopped_at))


def counted(
    by_status: dict[TaskStatus, int],
    by_queue: dict[str, int],
    oldest: dict[str, int],
    *,
    now: int,
    dead: int,
) -> QueueStats:
    """The stats from counts, and from the time at which the first waiting task of a queue is due."""
    due = {queue: (now - at) / 1_000_000 for queue, at in oldest.items() if at <= now}
    return QueueStats(
        by_status=by_status,
        by_queue=by_queue,
        oldest_due_age=max(due.values(), default=0.0),
        dead=dead,
        oldest_by_queue=due,
    )


def _failed_within(letter: DeadLetter, since: datetime | None, until: datetime | None) -> bool:
    return (since is None or letter.last_failure >= since) and (
        until is None or letter.last_failure < until
    )


def _status(status: str) -> TaskStatus:
    """The status, also when it was given by its name."""
    try:
        return TaskStatus(status)
    except ValueError:
        known = ", ".join(TaskStatus)
        raise InvalidTask(f"status {status!r}: expected one of {known}") from None


def _page_size(limit: int) -> int:
    if type(limit) is not int or not 0 <= limit <= MAX_PAGE:
        raise InvalidTask(f"limit {limit!r}: expected a whole number from 0 to {MAX_PAGE}")
    return limit
