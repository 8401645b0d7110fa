"""Metrics and the HTTP endpoints of a worker."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from omniq import AsyncTaskQueue, PermanentError, TaskQueue, TaskStatus, task
from omniq.integrations.prometheus import Counters, StorageCollector
from omniq.integrations.storage_metrics import StorageMetrics
from omniq.storage import open_storage
from omniq.storage.memory import MemoryStorage
from omniq.testing.faults import FaultyStorage
from tests.integrations.conftest import Start
from tests.integrations.programs import fetch, fetch_json

TASKS = """
import os
from pathlib import Path

def note(path):
    Path(path, str(os.getpid())).touch()
"""


@task
async def work() -> None:
    pass


@task
async def fail() -> None:
    raise PermanentError("no")


async def test_runs_and_waits_are_counted_by_function_queue_and_outcome():
    registry = CollectorRegistry()
    async with AsyncTaskQueue("memory://") as queue:
        await queue.enqueue_many([(work,), (work,), (fail,)])
        await queue.options(task_type="report").enqueue(work)
        pool = queue.worker()
        pool.events.subscribe(Counters(registry))
        await pool.run_until_empty()

    def value(name: str, func: str, **labels: str) -> float | None:
        labels = {"func": f"{__name__}.{func}", "queue": "default", "type": "", **labels}
        return registry.get_sample_value(name, labels)

    assert value("omniq_runs_total", "work", outcome="succeeded") == 2
    assert value("omniq_runs_total", "work", outcome="succeeded", type="report") == 1
    assert value("omniq_runs_total", "fail", outcome="failed") == 1
    assert value("omniq_dead_letters_total", "fail") == 1
    assert value("omniq_run_seconds_count", "work") == 2
    assert value("omniq_wait_seconds_count", "fail") == 1


async def test_scrapes_within_two_seconds_share_one_read_of_the_storage(omniq_clock):
    storage = FaultyStorage(MemoryStorage(clock=omniq_clock))
    registry = CollectorRegistry()
    async with AsyncTaskQueue(storage) as queue:
        await queue.enqueue(work)
        omniq_clock.advance(90)
        with StorageMetrics(storage) as metrics:
            registry.register(StorageCollector(metrics))
            before = storage.calls["read"]

            ages = [registry.get_sample_value("omniq_oldest_due_age_seconds") for _ in range(3)]

            assert ages == [90, 90, 90]
            # Counts and workers, and two reads for the history of the last 15 minutes.
            assert storage.calls["read"] - before <= 4
            assert registry.get_sample_value("omniq_tasks", {"status": "pending"}) == 1
            assert registry.get_sample_value("omniq_queue_tasks", {"queue": "default"}) == 1


async def test_a_storage_that_is_down_is_reported_as_down(omniq_clock):
    storage = FaultyStorage(MemoryStorage(clock=omniq_clock))
    registry = CollectorRegistry()
    async with storage:
        with StorageMetrics(storage) as metrics:
            storage.fail("read", times=None)
            registry.register(StorageCollector(metrics))

            assert registry.get_sample_value("omniq_storage_up") == 0
            storage.heal()
            assert registry.get_sample_value("omniq_storage_up") == 1


@pytest.mark.timeout(120)
def test_a_worker_with_two_processes_has_one_set_of_endpoints(start: Start, tmp_path: Path) -> None:
    (tmp_path / "noting.py").write_text(TASKS)
    (tmp_path / "pids").mkdir()
    worker = start(
        str(tmp_path),
        *("-m", "omniq", "worker", "noting", "--processes", "2", "--concurrency", "1"),
        *("--metrics-port", "0"),
        TMPDIR=str(tmp_path),
    )
    url = worker.wait_for(r"(http://127\.0\.0\.1:\d+)/metrics")[1]
    alive, _ = fetch(f"{url}/health")
    worker.wait_for("worker.started")
    worker.wait_for("worker.started")

    with TaskQueue(f"sqlite:///{tmp_path}/tasks.db") as queue:
        handles = queue.enqueue_many("noting.note", [str(tmp_path / "pids")] * 20)
        for handle in handles:
            handle.result(timeout=30)
    _, metrics = fetch(f"{url}/metrics")

    # A run is counted after it is recorded; its result may be visible a moment earlier.
    while 'outcome="succeeded",queue="default",type=""} 20.0' not in metrics:
        _, metrics = fetch(f"{url}/metrics")
    assert alive == 200
    assert fetch(f"{url}/ready") == (200, "ready\n")
    assert fetch_json(f"{url}/scale")["oldest_due_age"] == 0
    assert "omniq_workers 2.0" in metrics
    assert fetch(f"{url}/")[0] == 404
    assert worker.stop() == 0
    assert list(tmp_path.glob("omniq-metrics-*")) == []


@pytest.mark.timeout(120)
def test_a_port_in_use_is_one_line_of_error(start: Start, tmp_path: Path) -> None:
    (tmp_path / "noting.py").write_text(TASKS)
    command = ("-m", "omniq", "worker", "noting", "--metrics-port")
    first = start(str(tmp_path), *command, "0")
    port = first.wait_for(r"http://127\.0\.0\.1:(\d+)")[1]

    second = start(str(tmp_path), *command, port)

    line = second.wait_for("omniq: ")
    assert line.string == f"omniq: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    assert second.wait() == 2


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["file", "sqlite", "postgres", "redis"])
def test_metrics_are_read_from_a_storage_that_is_not_open(
    kind: str, tmp_path: Path, request
) -> None:
    """As in the supervisor of several processes, which claims no tasks itself."""
    local = {"file": f"file://{tmp_path}/tasks", "sqlite": f"sqlite:///{tmp_path}/tasks.db"}
    url = local.get(kind) or request.getfixturevalue(f"{kind}_url")
    with TaskQueue(url) as queue:
        queue.enqueue(work)
        with StorageMetrics(open_storage(url)) as metrics:
            stats, workers = metrics.read()

    assert stats.by_status[TaskStatus.PENDING] == 1
    assert workers == []
