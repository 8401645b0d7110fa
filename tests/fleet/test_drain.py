"""Eight worker processes drain one store together, and every task runs exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest

from omniq import TaskQueue, TaskStatus
from tests.acceptance.command import wait_until
from tests.fleet.conftest import KINDS, StartWorker
from tests.fleet.fleet_tasks import note
from tests.fleet.traces import runs

PROCESSES = 8


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "sqlite":
            return f"sqlite:///{tmp_path}/tasks.db?durability=os"
        case "file":
            return f"file://{tmp_path}/tasks?durability=os"
        case server:
            return str(request.getfixturevalue(f"{server}_url"))


def drain(url: str, folder: Path, start_worker: StartWorker, count: int, patience: float) -> None:
    with TaskQueue(url) as queue:
        command = start_worker(url, "--processes", str(PROCESSES), "--concurrency", "50")
        wait_until(lambda: len(queue.workers()) == PROCESSES, within=30)
        names = [str(number) for number in range(count)]
        handles = queue.enqueue_many([(note, (str(folder), name), {}) for name in names])
        wait_until(lambda: queue.stats().by_status[TaskStatus.SUCCESS] == count, within=patience)
        command.process.terminate()
        assert command.ends() == 0

        assert runs(folder) == dict.fromkeys(names, 1)
        assert [handle.result(timeout=0) for handle in handles[:100]] == names[:100]
    assert len(list(folder.glob("*.trace"))) > 1


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.deep_on("nats", "postgres", "redis")
@pytest.mark.parametrize("url", KINDS, indirect=True)
@pytest.mark.fault("F25")
def test_eight_processes_run_each_task_once(url, tmp_path, start_worker):
    drain(url, tmp_path, start_worker, 2_000, patience=45)


@pytest.mark.deep
@pytest.mark.timeout(400)
@pytest.mark.parametrize("url", ["sqlite", "file", *KINDS], indirect=True)
def test_eight_processes_run_each_of_20000_tasks_once(url, tmp_path, start_worker):
    drain(url, tmp_path, start_worker, 20_000, patience=150)
