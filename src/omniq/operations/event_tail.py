"""What happens in a fleet, read from its storage: `omniq events`.

Each poll reads the newest tasks, the running ones, the workers, the paused queues and the breakers, and
compares them with the poll before. So workers write nothing for it, and pay nothing; a poll costs a bounded
number of reads. The price: a task that is older than the newest, and starts and ends between two polls,
is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import takewhile

import msgspec

from omniq.models import Task, TaskStatus, WorkerInfo
from omniq.operations.health import BreakerInfo, breakers_of, live_workers
from omniq.storage.base import BaseStorage

_PAGE = 200
"""Tasks that each of the two scans of a poll returns at most."""
_MAX_DETAILS = 100
"""Tasks of which a poll reads the result or the failed attempts. Others are reported without these."""
_MAX_KNOWN = 5_000
_CLOCK_ERROR = timedelta(minutes=1)

_BREAKER_EVENTS = {
    "open": "breaker.opened",
    "half_open": "breaker.half_opened",
    "closed": "breaker.closed",
}
_ENDS = {
    TaskStatus.SUCCESS: "task.succeeded",
    TaskStatus.FAILED: "task.failed",
    TaskStatus.CANCELLED: "task.cancelled",
    TaskStatus.RETRYING: "task.retried",
}


class FleetEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that has happened. `event` is a name of the log, such as `task.started`.

    `id` is that of a task or a worker, or the name of a queue or a breaker. `seconds` is how long the
    function ran, `reason` why it happened, `error` the type of an exception.
    """

    at: datetime
    event: str
    id: str = ""
    func_path: str = ""
    queue: str = ""
    attempt: int = 0
    worker: str = ""
    seconds: float | None = None
    error: str = ""
    reason: str = ""


class EventTail:
    """Reports what has happened since the poll before; the first poll reports nothing.

    With a `queue` or a `func_path` it reports only tasks of these.
    """

    def __init__(
        self, storage: BaseStorage, *, queue: str | None = None, func_path: str | None = None
    ) -> None:
        self._storage = storage
        self._queue = queue
        self._func_path = func_path
        self._known: dict[str, Task] | None = None
        self._polled_at = storage.clock.now()
        self._fleet: _Fleet | None = None

    async def poll(self) -> list[FleetEvent]:
        """What has happened, in the order of time."""
        found = await self._task_events()
        if self._queue is None and self._func_path is None:
            found += await self._fleet_events()
        return _in_order(found)

    async def _task_events(self) -> list[FleetEvent]:
        newest = await self._scan(None)
        tasks = {task.id: task for task in [*newest, *await self._scan(TaskStatus.RUNNING)]}
        if self._known is None:
            self._known = tasks
            return []
        before = self._known
        again, gone = await self._read_again(before, tasks)
        tasks |= again
        new = self._new_ones(newest, before)
        events = [_about(task, "task.deleted", self._storage.clock.now()) for task in gone]
        if len(new) == _PAGE:
            events.append(self._gap())
        details = _Details(self._storage)
        # The newest come first; what they say should come in the order of enqueue.
        for task in reversed(tasks.values()):
            if task.id in new:
                events.append(_about(task, "task.enqueued", task.created_at))
            elif task.id not in before and task.owner is None:
                # An older task that the scan returns because newer ones were deleted.
                continue
            events += await self._changes(before.get(task.id), task, details)
        self._known = self._remembered(before, tasks, gone)
        return events

    def _new_ones(self, newest: Sequence[Task], before: dict[str, Task]) -> set[str]:
        """The ids of the tasks that are newer than those of the poll before."""
        since, self._polled_at = self._polled_at, self._storage.clock.now()
        new = list(takewhile(lambda task: task.id not in before, newest))
        if len(new) == len(newest):
            # All of those may have been deleted. Clocks of programs that enqueue may be behind.
            new = [task for task in new if task.created_at > since - _CLOCK_ERROR]
        return {task.id for task in new}

    async def _scan(self, status: TaskStatus | None) -> tuple[Task, ...]:
        scan = await self._storage.scan_tasks(
            status=status, queue=self._queue, func_path=self._func_path, limit=_PAGE
        )
        return scan.tasks

    async def _read_again(
        self, before: dict[str, Task], now: dict[str, Task]
    ) -> tuple[dict[str, Task], list[Task]]:
        """The tasks that ran before and that neither scan has found, and those without a record."""
        missing = [task for task in before.values() if task.owner and task.id not in now]
        found: dict[str, Task] = {}
        gone: list[Task] = []
        for task in missing[:_MAX_DETAILS]:
            read = await self._storage.get_task(task.id)
            if read is None:
                gone.append(task)
            else:
                found[task.id] = read
        return found, gone

    def _gap(self) -> FleetEvent:
        why = (
            f"more than {_PAGE} tasks were enqueued since the last poll: only the newest are shown"
        )
        return FleetEvent(at=self._storage.clock.now(), event="events.missed", reason=why)

    def _remembered(
        self, before: dict[str, Task], now: dict[str, Task], gone: list[Task]
    ) -> dict[str, Task]:
        """What the next poll compares with. A task that a scan no longer returns stays for a while."""
        kept = before | now
        for task in gone:
            del kept[task.id]
        extra = len(kept) - _MAX_KNOWN
        for task_id in [task_id for task_id in kept if task_id not in now][: max(extra, 0)]:
            del kept[task_id]
        return kept

    async def _changes(
        self, before: Task | None, task: Task, details: _Details
    ) -> list[FleetEvent]:
        """What has happened to one task since; of several runs only the last."""
        if before is not None and _state(before) == _state(task):
            return []
        events = []
        has_started = task.token != (0 if before is None else before.token)
        if has_started and task.started_at is not None:
            events.append(_about(task, "task.started", task.started_at))
        if task.owner is not None:
            return events
        has_run = has_started or (before is not None and before.owner is not None)
        if has_run or (task.status.is_final and (before is None or not before.status.is_final)):
            events.append(await details.end_of(before, task))
        elif before is not None:
            name = "dead.retried" if before.status is TaskStatus.FAILED else "task.changed"
            events.append(_about(task, name, self._storage.clock.now()))
        return events

    async def _fleet_events(self) -> list[FleetEvent]:
        now = await _Fleet.read(self._storage)
        before, self._fleet = self._fleet, now
        return [] if before is None else list(now.since(before))


def _in_order(events: list[FleetEvent]) -> list[FleetEvent]:
    """The events in the order of time; those of one task as they are.

    The clock of the program that enqueued a task may be ahead of the worker's.
    """
    latest: dict[str, datetime] = {}
    keys = []
    for event in events:
        latest[event.id] = max(event.at, latest.get(event.id, event.at))
        keys.append(latest[event.id])
    return [events[at] for at in sorted(range(len(events)), key=keys.__getitem__)]


def _state(task: Task) -> tuple[object, ...]:
    """What changes when something happens to a task."""
    return (task.status, task.token, task.owner, task.queue, task.priority, task.eta)


def _about(task: Task, event: str, at: datetime) -> FleetEvent:
    return FleetEvent(
        at=at,
        event=event,
        id=task.id,
        func_path=task.func_path,
        queue=task.queue,
        attempt=_started_attempt(task) if event == "task.started" else 0,
        worker=task.owner or "",
    )


def _started_attempt(task: Task) -> int:
    """The number of the newest attempt. One that has failed is counted already."""
    has_failed = task.owner is None and task.status in (TaskStatus.RETRYING, TaskStatus.FAILED)
    return task.attempts + task.crashes + (0 if has_failed else 1)


class _Details:
    """How runs ended, as far as a poll may read that."""

    def __init__(self, storage: BaseStorage) -> None:
        self._storage = storage
        self._left = _MAX_DETAILS

    async def end_of(self, before: Task | None, task: Task) -> FleetEvent:
        """The event of a run that has ended, or of a task that ended without one."""
        name = _ENDS.get(task.status, "task.released")
        now = self._storage.clock.now()
        self._left -= 1
        if self._left < 0:
            return _about(task, name, now)
        if task.status is TaskStatus.RETRYING:
            return await self._failed_attempt(task, now)
        result = await self._storage.get_result(task.id)
        if result is None or result.finished_at is None:
            return _about(task, name, now)
        if task.status is TaskStatus.PENDING:
            # A repeating task waits for its next time when a run has ended.
            is_new = before is None or before.started_at == result.started_at
            name = _ENDS.get(result.status, name) if is_new else name
        ran = None if result.started_at is None else result.finished_at - result.started_at
        return msgspec.structs.replace(
            _about(task, name, result.finished_at),
            attempt=result.attempts,
            seconds=None if ran is None else ran.total_seconds(),
            error="" if result.error is None else result.error.error_type,
            reason=result.reason or "",
        )

    async def _failed_attempt(self, task: Task, now: datetime) -> FleetEvent:
        history = await self._storage.history(task.id)
        if not history:
            return _about(task, "task.retried", now)
        last = history[-1]
        ran = None if last.started_at is None else last.finished_at - last.started_at
        return msgspec.structs.replace(
            _about(task, "task.retried", last.finished_at),
            attempt=last.number,
            seconds=None if ran is None else ran.total_seconds(),
            worker=last.owner or "",
            error="" if last.error is None else last.error.error_type,
            reason="" if task.eta is None else f"due {task.eta:%H:%M:%SZ}",
        )


class _Fleet(msgspec.Struct, frozen=True):
    """The workers, paused queues and breakers at one time."""

    at: datetime
    workers: dict[str, WorkerInfo]
    paused: frozenset[str]
    breakers: dict[str, BreakerInfo]

    @classmethod
    async def read(cls, storage: BaseStorage) -> _Fleet:
        return cls(
            storage.clock.now(),
            {worker.id: worker for worker in await live_workers(storage)},
            await storage.paused_queues(),
            {breaker.name: breaker for breaker in await breakers_of(storage)},
        )

    def since(self, before: _Fleet) -> Iterator[FleetEvent]:
        """What has changed."""
        for worker_id, worker in self.workers.items():
            process = f"{worker.host}:{worker.pid}"
            for event in _worker_changes(before.workers.get(worker_id), worker):
                at = worker.started_at if event == "worker.started" else self.at
                yield FleetEvent(at=at, event=event, id=worker_id, reason=process)
        for worker_id, worker in before.workers.items():
            if worker_id not in self.workers:
                process = f"{worker.host}:{worker.pid}"
                yield FleetEvent(at=self.at, event="worker.stopped", id=worker_id, reason=process)
        yield from self._named("queue.paused", self.paused - before.paused)
        yield from self._named("queue.resumed", before.paused - self.paused)
        for name, breaker in self.breakers.items():
            known = before.breakers.get(name)
            if breaker.state != ("closed" if known is None else known.state):
                event = _BREAKER_EVENTS[breaker.state]
                yield FleetEvent(at=self.at, event=event, id=name, reason=breaker.reason)

    def _named(self, event: str, names: Iterable[str]) -> Iterator[FleetEvent]:
        for name in sorted(names):
            yield FleetEvent(at=self.at, event=event, id=name)


def _worker_changes(before: WorkerInfo | None, now: WorkerInfo) -> Iterator[str]:
    if before is None:
        yield "worker.started"
    if now.stalled and not (before is not None and before.stalled):
        yield "worker.stalled"
    if now.stopping and not (before is not None and before.stopping):
        yield "worker.stopping"
    if now.paused != (before is not None and before.paused):
        yield "worker.paused" if now.paused else "worker.resumed"
