"""Prometheus metrics of a worker and of its storage.

    pool.events.subscribe(Counters())             # runs, outcomes, durations, waits
    with StorageMetrics(storage) as metrics:      # tasks, queues, dead letters, workers
        REGISTRY.register(StorageCollector(metrics))

`omniq worker --metrics-port 9100` serves both: see `endpoint`.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from omniq import events
from omniq.errors import OmniqError
from omniq.events import Event, TaskEvent
from omniq.integrations.storage_metrics import StorageMetrics
from omniq.operations.run_history import History
from omniq.tasks.context import current_task

_SECONDS = (0.005, 0.02, 0.1, 0.5, 1, 5, 15, 60, 300, 1800, 7200)


class Counters:
    """Counts the events of one or more pools. Make one per registry: metric names are unique there.

    Labels are functions, queues and the types that tasks were given, never arguments. An empty `type`, of
    tasks that were given none, is for Prometheus the same as no such label.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        labels = ("func", "queue", "type")
        self._outcomes = Counter(
            "omniq_runs", "Runs that ended, by outcome.", (*labels, "outcome"), registry=registry
        )
        self._dead = Counter(
            "omniq_dead_letters", "Tasks that became dead letters.", labels, registry=registry
        )
        self._seconds = Histogram(
            "omniq_run_seconds",
            "Duration of runs that succeeded.",
            labels,
            buckets=_SECONDS,
            registry=registry,
        )
        self._waits = Histogram(
            "omniq_wait_seconds",
            "Time from due to started.",
            labels,
            buckets=_SECONDS,
            registry=registry,
        )
        self._troubles = Counter(
            "omniq_troubles",
            "Problems of a worker: lost leases, stale outcomes, a failing storage.",
            ("kind",),
            registry=registry,
        )

    def __call__(self, event: Event) -> None:
        """Count the event. Called by the pool."""
        match event:
            case events.TaskStarted():
                began = current_task().started_at
                waited = (began - current_task().due_at).total_seconds() if began else 0.0
                self._waits.labels(*_labels(event)).observe(max(0.0, waited))
            case events.TaskSucceeded(seconds=seconds):
                self._count(event)
                self._seconds.labels(*_labels(event)).observe(seconds)
            case (
                events.TaskRetried()
                | events.TaskFailure()
                | events.TaskCancellation()
                | events.TaskSnoozed()
                | events.TaskSuspended()
                | events.TaskReleased()
            ):
                self._count(event)
            case events.TaskDead():
                self._dead.labels(*_labels(event)).inc()
            case (
                events.LeaseLoss()
                | events.StaleRefused()
                | events.WorkerProblem()
                | events.StorageFailing(since=None)
                | events.LoopBlocked()
                | events.HookFailed()
                | events.RecordQuarantined()
                | events.StoreRestored()
                | events.BreakerOpened()
                | events.ScheduleMissed()
                | events.TasksGivenBack()
            ):
                self._troubles.labels(event.name).inc()
            case _:
                pass

    def _count(self, event: TaskEvent) -> None:
        outcome = event.name.removeprefix("task.")
        self._outcomes.labels(*_labels(event), outcome).inc()


def _labels(event: TaskEvent) -> tuple[str, str, str]:
    return event.func_path, event.queue, event.task_type


class StorageCollector(Collector):
    """Reads the storage at each scrape, at most every two seconds.

    While the storage is down, `omniq_storage_up` is 0 and the other metrics are absent.
    """

    def __init__(self, metrics: StorageMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """The current metrics."""
        try:
            stats, workers = self._metrics.read()
            history = self._metrics.history()
        except OmniqError:
            yield GaugeMetricFamily("omniq_storage_up", "Whether the storage responds.", 0)
            return
        yield GaugeMetricFamily("omniq_storage_up", "Whether the storage responds.", 1)
        tasks = GaugeMetricFamily("omniq_tasks", "Stored tasks.", labels=["status"])
        for status, count in stats.by_status.items():
            tasks.add_metric([status.value], count)
        yield tasks
        queues = GaugeMetricFamily(
            "omniq_queue_tasks", "Tasks that have not ended.", labels=["queue"]
        )
        for queue, count in stats.by_queue.items():
            queues.add_metric([queue], count)
        yield queues
        yield GaugeMetricFamily(
            "omniq_oldest_due_age_seconds",
            "Seconds since the oldest waiting task became due; for autoscaling.",
            stats.oldest_due_age,
        )
        yield GaugeMetricFamily("omniq_dead", "Stored dead letters.", stats.dead)
        yield GaugeMetricFamily("omniq_workers", "Workers with a lease.", len(workers))
        stalled = sum(worker.stalled for worker in workers)
        yield GaugeMetricFamily(
            "omniq_workers_stalled", "Workers with a lease that make no progress.", stalled
        )
        yield from _history_metrics(history)


def _history_metrics(history: History) -> Iterator[Metric]:
    """What the dashboard shows of the last 15 minutes, of all workers together."""
    labels = ["func"]
    runs = GaugeMetricFamily(
        "omniq_fleet_runs",
        "Runs of all workers in the last 15 minutes.",
        labels=[*labels, "outcome"],
    )
    waits = GaugeMetricFamily(
        "omniq_fleet_wait_seconds",
        "Time from due to started in the last 15 minutes.",
        labels=[*labels, "quantile"],
    )
    times = GaugeMetricFamily(
        "omniq_fleet_run_seconds",
        "Duration of runs in the last 15 minutes.",
        labels=[*labels, "quantile"],
    )
    for func_path, figures in history.functions.items():
        for outcome in ("succeeded", "retried", "failed", "stopped"):
            runs.add_metric([func_path, outcome], getattr(figures, outcome))
        for quantile, name in (("0.5", "p50"), ("0.95", "p95"), ("0.99", "p99")):
            for family, prefix in ((waits, "wait"), (times, "run")):
                value = getattr(figures, f"{prefix}_{name}")
                if value is not None:
                    family.add_metric([func_path, quantile], value)
    yield from (runs, waits, times)
