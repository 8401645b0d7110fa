"""How it goes: queues, rates, latencies, workers, failures, at one look."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from datetime import datetime

import msgspec

from omniq.models import DeadLetter, QueueStats, Task, TaskResult, TaskStatus, WorkerInfo
from omniq.operations.background_count import UNCOUNTED, Count, Counting
from omniq.operations.newest import newest_dead, newest_tasks
from omniq.storage.base import BaseStorage
from omniq.storage.health import BreakerInfo, breakers_of, live_workers

_WINDOW = 10.0
_SAMPLED_TASKS = 100
_SAMPLED_RESULTS = 20
_FAILURES = 5
_MOST_RUNNING = 2_000


class QueueLine(msgspec.Struct, frozen=True, kw_only=True):
    """A queue with tasks, or one that is paused. `workers` is how many take from it.

    `oldest_due_age` is how many seconds the first of its waiting tasks has been due.
    """

    name: str
    waiting: int
    running: int
    workers: int
    paused: bool
    oldest_due_age: float = 0.0


class Spread(msgspec.Struct, frozen=True):
    """Seconds that the newest tasks took: the middle one, the slow ones, and of how many."""

    median: float
    p95: float
    count: int


class Rates(msgspec.Struct, frozen=True):
    """Tasks a second over the last seconds. What is purged meanwhile makes them too small."""

    enqueued: float
    finished: float
    failed: float


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """Everything at one look. `rates` need two looks; the spreads need tasks that ran lately.

    `wait` is from being due to being started, `run` from there to the end. All counts are as of
    `counted_at`; None: they are 0 because nobody has counted yet.
    """

    at: datetime
    counted_at: datetime | None
    storage: str
    by_status: dict[TaskStatus, int]
    oldest_due_age: float
    dead: int
    queues: tuple[QueueLine, ...]
    workers: tuple[WorkerInfo, ...]
    breakers: tuple[BreakerInfo, ...]
    wait: Spread | None
    run: Spread | None
    rates: Rates | None
    failures: tuple[DeadLetter, ...]


class _Sample(msgspec.Struct, frozen=True):
    at: float
    known: int
    ended: int
    failed: int


class _Newest(msgspec.Struct, frozen=True, kw_only=True):
    """What the newest tasks told when the counts were these."""

    by_status: dict[TaskStatus, int]
    dead: int
    wait: Spread | None
    run: Spread | None
    failures: tuple[DeadLetter, ...]


class Overlook:
    """Looks at a storage again and again, and so knows its rates."""

    def __init__(self, storage: BaseStorage) -> None:
        self._storage = storage
        self._counting = Counting(storage)
        self._samples: deque[_Sample] = deque()
        self._rated: Count | None = None
        self._rates: Rates | None = None
        self._seen: _Newest | None = None

    async def look(self, patience: float | None = None) -> Overview:
        """How it goes now. Counts that take longer than `patience` seconds are those of before."""
        storage = self._storage
        counting = self._counting.begin(at_once=patience is None)
        workers = await live_workers(storage)
        breakers = await breakers_of(storage)
        count = await self._counting.settled(counting, patience)
        stats = UNCOUNTED if count is None else count.stats
        if count is not None and count is not self._rated:
            self._rated, self._rates = count, self._rates_of(count)
        newest = await self._newest(stats)
        return Overview(
            at=storage.clock.now(),
            counted_at=None if count is None else count.at,
            storage=storage.capabilities.name,
            by_status=stats.by_status,
            oldest_due_age=stats.oldest_due_age,
            dead=stats.dead,
            queues=tuple(await _queue_lines(storage, stats, workers)),
            workers=tuple(workers),
            breakers=tuple(breakers),
            wait=newest.wait,
            run=newest.run,
            rates=self._rates,
            failures=newest.failures,
        )

    def expire(self) -> None:
        """Count anew at the next look: something was changed."""
        self._counting.expire()

    async def close(self) -> None:
        """Count no more."""
        await self._counting.close()

    async def _newest(self, stats: QueueStats) -> _Newest:
        """What the newest tasks tell, asked again only when some count has changed."""
        if self._seen is None or (self._seen.by_status, self._seen.dead) != (
            stats.by_status,
            stats.dead,
        ):
            storage = self._storage
            tasks = await newest_tasks(storage, _SAMPLED_TASKS)
            self._seen = _Newest(
                by_status=stats.by_status,
                dead=stats.dead,
                wait=_spread([each for task in tasks if (each := _waited(task)) is not None]),
                run=_spread(await _run_times(storage, tasks)),
                failures=tuple(await newest_dead(storage, _FAILURES)),
            )
        return self._seen

    def _rates_of(self, count: Count) -> Rates | None:
        """From what the counters have grown by since the oldest sample of the window."""
        by_status = count.stats.by_status
        failed = by_status[TaskStatus.FAILED]
        ended = by_status[TaskStatus.SUCCESS] + failed + by_status[TaskStatus.CANCELLED]
        now = _Sample(count.measured_at, sum(by_status.values()), ended, failed)
        self._samples.append(now)
        while now.at - self._samples[0].at > _WINDOW and len(self._samples) > 2:
            self._samples.popleft()
        first = self._samples[0]
        seconds = now.at - first.at
        if seconds <= 0:
            return None
        return Rates(
            enqueued=max(0, now.known - first.known) / seconds,
            finished=max(0, now.ended - first.ended) / seconds,
            failed=max(0, now.failed - first.failed) / seconds,
        )


async def queue_lines(storage: BaseStorage) -> list[QueueLine]:
    """Every queue that has tasks, is paused, or is named by a worker."""
    return await _queue_lines(storage, await storage.stats(), await storage.workers())


async def _queue_lines(
    storage: BaseStorage, stats: QueueStats, workers: Sequence[WorkerInfo]
) -> list[QueueLine]:
    paused = await storage.paused_queues()
    scan = await storage.scan_tasks(status=TaskStatus.RUNNING, limit=_MOST_RUNNING)
    running = Counter(task.queue for task in scan.tasks)
    named = {queue for worker in workers for queue in worker.queues}
    return [
        QueueLine(
            name=name,
            waiting=max(0, stats.by_queue.get(name, 0) - running[name]),
            running=running[name],
            workers=sum(not worker.queues or name in worker.queues for worker in workers),
            paused=name in paused,
            oldest_due_age=stats.oldest_by_queue.get(name, 0.0),
        )
        for name in sorted({*stats.by_queue, *paused, *named})
    ]


def _waited(task: Task) -> float | None:
    if task.started_at is None or task.eta is None or task.status is TaskStatus.PENDING:
        return None
    return max(0.0, (task.started_at - task.eta).total_seconds())


async def _run_times(storage: BaseStorage, tasks: Sequence[Task]) -> list[float]:
    ended = [task for task in tasks if task.status is TaskStatus.SUCCESS][:_SAMPLED_RESULTS]
    results = await asyncio.gather(*(storage.get_result(task.id) for task in ended))
    return [seconds for result in results if (seconds := _ran(result)) is not None]


def _ran(result: TaskResult | None) -> float | None:
    if result is None or result.started_at is None or result.finished_at is None:
        return None
    return max(0.0, (result.finished_at - result.started_at).total_seconds())


def _spread(seconds: list[float]) -> Spread | None:
    """The middle and the slow end.

    >>> _spread([3.0, 1.0, 2.0])
    Spread(median=2.0, p95=3.0, count=3)
    """
    if not seconds:
        return None
    ordered = sorted(seconds)
    return Spread(
        ordered[len(ordered) // 2],
        ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)],
        len(ordered),
    )
