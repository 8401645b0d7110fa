"""The state of a storage: counts, rates, latencies, queues, workers and failures."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Sequence
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
from omniq.operations.run_history import known_names
from omniq.storage.base import BaseStorage
from omniq.storage.run_counts import OTHERS
from omniq.text.to_json import JsonRecord

_WINDOW = 10.0
_SAMPLED_TASKS = 100
_SAMPLED_RESULTS = 20
_FAILURES = 5
_MAX_RUNNING = 2_000
_CHECK_EVERY = 5.0
_NAMES_EVERY = 30.0


class QueueInfo(JsonRecord, msgspec.Struct, frozen=True, kw_only=True):
    """A queue that has tasks, is paused, is served, or had a run lately. `workers` is the number that serve it.

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
    """Runs per second over the last seconds, as the live workers count them.

    `finished` runs were the last of their tasks, and `failed` ones among them made dead letters; `retried` ones
    failed and are repeated. `enqueued` is computed from them and from the number of tasks that have not ended.
    """

    enqueued: float
    finished: float
    failed: float
    retried: float = 0.0


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
    """What a worker had counted when it renewed its lease."""

    at: datetime
    runs: tuple[int, int, int]


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
        self._samples: dict[str, deque[_Sample]] = {}
        self._live: deque[tuple[float, int]] = deque()
        self._known_queues: tuple[str, ...] = ()
        self._read_names_at = float("-inf")
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
        recent = await self._recent_tasks(stats)
        return Overview(
            at=storage.clock.now(),
            counted_at=None if count is None else count.at,
            storage=storage.capabilities.name,
            by_status=stats.by_status,
            oldest_due_age=stats.oldest_due_age,
            dead=stats.dead,
            queues=tuple(await _summaries(storage, stats, workers, await self._queues_with_runs())),
            workers=tuple(workers),
            breakers=tuple(breakers),
            wait=recent.wait,
            run=recent.run,
            rates=self._rates_of(workers, count),
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

    async def _queues_with_runs(self) -> tuple[str, ...]:
        """The queues that had a run lately, read every few minutes: an idle queue stays listed."""
        now = self._storage.clock.monotonic()
        if now >= self._read_names_at:
            self._read_names_at = now + _NAMES_EVERY
            _, queues = await known_names(self._storage)
            self._known_queues = tuple(queues)
        return self._known_queues

    def _rates_of(self, workers: Sequence[WorkerInfo], count: Count | None) -> Rates | None:
        """The growth of what each worker has counted; None until there are two counts, and two heartbeats."""
        growth = self._growth(count)
        self._samples = {
            worker.id: self._samples.get(worker.id, deque())
            for worker in workers
            if not worker.late
        }
        rates = [self._rate_of(worker) for worker in workers if worker.id in self._samples]
        known = [rate for rate in rates if rate is not None]
        if growth is None or (rates and not known):
            return None
        succeeded, failed, retried = (sum(rate[part] for rate in known) for part in range(3))
        return Rates(
            enqueued=max(0.0, succeeded + failed + growth),
            finished=succeeded + failed,
            failed=failed,
            retried=retried,
        )

    def _rate_of(self, worker: WorkerInfo) -> tuple[float, float, float] | None:
        """How many runs a second succeeded, failed and were retried, between two heartbeats."""
        samples = self._samples[worker.id]
        runs = (worker.succeeded, worker.failed, worker.retried)
        if not samples or samples[-1].at != worker.last_heartbeat:
            samples.append(_Sample(worker.last_heartbeat, runs))
        while len(samples) > 2 and (samples[-1].at - samples[0].at).total_seconds() > _WINDOW:
            samples.popleft()
        seconds = (samples[-1].at - samples[0].at).total_seconds()
        if seconds <= 0:
            return None
        first, last = samples[0].runs, samples[-1].runs
        succeeded, failed, retried = (
            max(0, after - before) / seconds for before, after in zip(first, last, strict=True)
        )
        return succeeded, failed, retried

    def _growth(self, count: Count | None) -> float | None:
        """By how many tasks a second those that have not ended became more; None before two counts."""
        if count is None:
            return None
        live = sum(
            number for status, number in count.stats.by_status.items() if not status.is_final
        )
        if not self._live or self._live[-1][0] != count.measured_at:
            self._live.append((count.measured_at, live))
        while len(self._live) > 2 and count.measured_at - self._live[0][0] > _WINDOW:
            self._live.popleft()
        (began, before), (ended, after) = self._live[0], self._live[-1]
        return (after - before) / (ended - began) if ended > began else None


async def queue_summaries(storage: BaseStorage) -> list[QueueInfo]:
    """Every queue that has tasks, is paused, is named by a worker, or had a run in the last 30 days."""
    _, names = await known_names(storage)
    return await _summaries(storage, await storage.stats(), await storage.workers(), names)


async def _summaries(
    storage: BaseStorage, stats: QueueStats, workers: Sequence[WorkerInfo], known: Iterable[str]
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
        for name in sorted({*stats.by_queue, *paused, *named, *known} - {OTHERS})
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
