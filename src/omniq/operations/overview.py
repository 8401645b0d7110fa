"""The state of a storage: counts, rates, latencies, queues, workers and failures."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from datetime import datetime

import msgspec

from omniq.models import DeadLetter, QueueStats, Task, TaskResult, TaskStatus, WorkerInfo
from omniq.operations.background_count import UNCOUNTED, BackgroundCount, Count
from omniq.operations.health import (
    BreakerInfo,
    UnrunnableFunction,
    breakers_of,
    live_workers,
    unrunnable_functions,
)
from omniq.operations.newest import newest_dead, newest_tasks
from omniq.storage.base import BaseStorage
from omniq.to_json import JsonRecord

_WINDOW = 10.0
_SAMPLED_TASKS = 100
_SAMPLED_RESULTS = 20
_FAILURES = 5
_MAX_RUNNING = 2_000
_CHECK_EVERY = 5.0


class QueueInfo(JsonRecord, msgspec.Struct, frozen=True, kw_only=True):
    """A queue that has tasks, is paused or is served. `workers` is the number that serve it.

    `oldest_due_age` is how many seconds ago the oldest of its waiting tasks became due.
    """

    name: str
    waiting: int
    running: int
    workers: int
    paused: bool
    oldest_due_age: float = 0.0


class Percentiles(msgspec.Struct, frozen=True):
    """Seconds that the newest tasks took: median, 95th percentile, and the number of tasks."""

    median: float
    p95: float
    count: int


class Rates(msgspec.Struct, frozen=True):
    """Tasks per second over the last seconds. A purge in that time makes them too small."""

    enqueued: float
    finished: float
    failed: float


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """The state at `at`. `rates` need two counts; `wait` and `run` need tasks that ran recently.

    `wait` is the time from due to started, `run` from started to finished. All counts are as of
    `counted_at`; None: the first count is not done, and they are 0.
    """

    at: datetime
    counted_at: datetime | None
    storage: str
    by_status: dict[TaskStatus, int]
    oldest_due_age: float
    dead: int
    queues: tuple[QueueInfo, ...]
    workers: tuple[WorkerInfo, ...]
    breakers: tuple[BreakerInfo, ...]
    wait: Percentiles | None
    run: Percentiles | None
    rates: Rates | None
    failures: tuple[DeadLetter, ...]
    unrunnable: tuple[UnrunnableFunction, ...] = ()


class _Sample(msgspec.Struct, frozen=True):
    at: float
    known: int
    ended: int
    failed: int


class _RecentTasks(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of the newest tasks, made when the counts were these."""

    by_status: dict[TaskStatus, int]
    dead: int
    wait: Percentiles | None
    run: Percentiles | None
    failures: tuple[DeadLetter, ...]


class Monitor:
    """Reads the overview of a storage repeatedly, and computes rates from the differences."""

    def __init__(self, storage: BaseStorage) -> None:
        self._storage = storage
        self._count = BackgroundCount(storage)
        self._samples: deque[_Sample] = deque()
        self._rated: Count | None = None
        self._rates: Rates | None = None
        self._recent: _RecentTasks | None = None
        self._unrunnable: tuple[UnrunnableFunction, ...] = ()
        self._check_at = 0.0

    async def overview(self, count_timeout: float | None = None) -> Overview:
        """The state now. If counting takes longer than `count_timeout` seconds, the last counts."""
        storage = self._storage
        counting = self._count.start(force=count_timeout is None)
        workers = await live_workers(storage)
        breakers = await breakers_of(storage)
        count = await self._count.wait(counting, count_timeout)
        stats = UNCOUNTED if count is None else count.stats
        if count is not None and count is not self._rated:
            self._rated, self._rates = count, self._rates_of(count)
        recent = await self._recent_tasks(stats)
        return Overview(
            at=storage.clock.now(),
            counted_at=None if count is None else count.at,
            storage=storage.capabilities.name,
            by_status=stats.by_status,
            oldest_due_age=stats.oldest_due_age,
            dead=stats.dead,
            queues=tuple(await _summaries(storage, stats, workers)),
            workers=tuple(workers),
            breakers=tuple(breakers),
            wait=recent.wait,
            run=recent.run,
            rates=self._rates,
            failures=recent.failures,
            unrunnable=await self._unrunnable_functions(workers, stats.oldest_due_age),
        )

    def invalidate(self) -> None:
        """Count again for the next overview: something was changed."""
        self._count.invalidate()

    async def close(self) -> None:
        """Cancel the running count."""
        await self._count.close()

    async def _unrunnable_functions(
        self, workers: Sequence[WorkerInfo], oldest_due_age: float
    ) -> tuple[UnrunnableFunction, ...]:
        """The functions that no live worker can run, checked every few seconds."""
        now = self._storage.clock.monotonic()
        if now >= self._check_at:
            self._check_at = now + _CHECK_EVERY
            self._unrunnable = tuple(
                await unrunnable_functions(self._storage, workers, oldest_due_age)
            )
        return self._unrunnable

    async def _recent_tasks(self, stats: QueueStats) -> _RecentTasks:
        """Measurements of the newest tasks, made again only when some count has changed."""
        if self._recent is None or (self._recent.by_status, self._recent.dead) != (
            stats.by_status,
            stats.dead,
        ):
            storage = self._storage
            tasks = await newest_tasks(storage, _SAMPLED_TASKS)
            self._recent = _RecentTasks(
                by_status=stats.by_status,
                dead=stats.dead,
                wait=_percentiles(
                    [each for task in tasks if (each := _wait_time(task)) is not None]
                ),
                run=_percentiles(await _run_times(storage, tasks)),
                failures=tuple(await newest_dead(storage, _FAILURES)),
            )
        return self._recent

    def _rates_of(self, count: Count) -> Rates | None:
        """The growth of the counts since the oldest sample of the window, per second."""
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


async def queue_summaries(storage: BaseStorage) -> list[QueueInfo]:
    """Every queue that has tasks, is paused, or is named by a worker."""
    return await _summaries(storage, await storage.stats(), await storage.workers())


async def _summaries(
    storage: BaseStorage, stats: QueueStats, workers: Sequence[WorkerInfo]
) -> list[QueueInfo]:
    paused = await storage.paused_queues()
    scan = await storage.scan_tasks(status=TaskStatus.RUNNING, limit=_MAX_RUNNING)
    running = Counter(task.queue for task in scan.tasks)
    named = {queue for worker in workers for queue in worker.queues}
    return [
        QueueInfo(
            name=name,
            waiting=max(0, stats.by_queue.get(name, 0) - running[name]),
            running=running[name],
            workers=sum(not worker.queues or name in worker.queues for worker in workers),
            paused=name in paused,
            oldest_due_age=stats.oldest_by_queue.get(name, 0.0),
        )
        for name in sorted({*stats.by_queue, *paused, *named})
    ]


def _wait_time(task: Task) -> float | None:
    if task.started_at is None or task.eta is None or task.status is TaskStatus.PENDING:
        return None
    return max(0.0, (task.started_at - task.eta).total_seconds())


async def _run_times(storage: BaseStorage, tasks: Sequence[Task]) -> list[float]:
    ended = [task for task in tasks if task.status is TaskStatus.SUCCESS][:_SAMPLED_RESULTS]
    results = await asyncio.gather(*(storage.get_result(task.id) for task in ended))
    return [seconds for result in results if (seconds := _run_time(result)) is not None]


def _run_time(result: TaskResult | None) -> float | None:
    if result is None or result.started_at is None or result.finished_at is None:
        return None
    return max(0.0, (result.finished_at - result.started_at).total_seconds())


def _percentiles(seconds: list[float]) -> Percentiles | None:
    """Median, 95th percentile and number of the values; None if there are none.

    >>> _percentiles([3.0, 1.0, 2.0])
    Percentiles(median=2.0, p95=3.0, count=3)
    """
    if not seconds:
        return None
    ordered = sorted(seconds)
    return Percentiles(
        ordered[len(ordered) // 2],
        ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)],
        len(ordered),
    )
