"""RQ: `queue.enqueue`, and four workers of its `WorkerPool` for each worker here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from redis import Redis
from rq import Queue, Retry, Worker
from rq.registry import FailedJobRegistry, ScheduledJobRegistry, StartedJobRegistry
from rq.worker_pool import WorkerPool

from chaos.peers.workload import CONCURRENCY, SETTINGS, URL, acknowledged, run, tasks


class SetWorker(Worker):  # type: ignore[misc] # its types are in its own environment
    """The worker with the options that the pool does not pass on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        names = ("job_monitoring_interval", "maintenance_interval", "worker_ttl")
        options |= {name: SETTINGS[name] for name in names if name in SETTINGS}
        super().__init__(*args, **options)


def produce() -> None:
    queue = Queue(connection=Redis.from_url(URL))
    retries = SETTINGS.get("Retry(max)")
    for task_id, seconds in tasks():
        retry = Retry(max=retries) if retries else None
        queue.enqueue(run, task_id, seconds, job_id=task_id, retry=retry)
        acknowledged(task_id)


def work() -> None:
    pool = WorkerPool(
        ["default"],
        connection=Redis.from_url(URL),
        num_workers=CONCURRENCY,
        worker_class=SetWorker,
    )
    pool.start(burst=False)


def left() -> Iterator[tuple[str, str]]:
    queue = Queue(connection=Redis.from_url(URL))
    # Without a retry, the next clean-up moves a dead worker's job to the failed jobs.
    abandoned = "held" if SETTINGS.get("Retry(max)") else "failed"
    for task_id in queue.job_ids:
        yield "held", task_id
    for task_id in ScheduledJobRegistry(queue=queue).get_job_ids():
        yield "held", task_id
    for task_id in StartedJobRegistry(queue=queue).get_job_ids(cleanup=False):
        yield abandoned, task_id
    for task_id in queue.intermediate_queue.get_job_ids():
        yield abandoned, task_id
    for task_id in FailedJobRegistry(queue=queue).get_job_ids():
        yield "failed", task_id
