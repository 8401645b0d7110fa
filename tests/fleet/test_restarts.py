"""The server is killed and restarted under load: workers resume, and no task is lost."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from omniq import TaskQueue
from omniq.testing.servers import Server
from tests.acceptance.command import wait_until
from tests.fleet.conftest import StartWorker
from tests.fleet.producer import Producer, check_nothing_is_lost, is_drained
from tests.fleet.traces import runs, traces

WORKERS = 2
RESUME_SECONDS = 30.0
"""On a busy machine; how long it takes on a quiet one is printed by `pytest -rP`."""


def kill_and_restart(server: Server) -> float:
    """Kill and restart the server; return when it answered again, on the clock of the traces."""
    server.kill()
    time.sleep(random.uniform(0, 0.3))
    server.start()
    return time.monotonic()


def all_have_run_since(folder: Path, moment: float) -> bool:
    """Whether each worker has finished a task after that time."""
    since = {trace.pid for trace in traces(folder) if trace.at > moment * 1e9}
    return len(since) == WORKERS


def survive(
    server: Server, folder: Path, start_worker: StartWorker, times: int
) -> tuple[list[float], Producer]:
    """Kill the server that many times; return how long the workers took to resume."""
    producer = Producer(server.url, folder)
    options = ("--concurrency", "4", "--poll-interval", "0.5", "--lease", "5")
    with producer.at_work():
        workers = [start_worker(server.url, *options) for _ in range(WORKERS)]
        began = time.monotonic()
        wait_until(lambda: all_have_run_since(folder, began), within=20)
        resumed = []
        for _ in range(times):
            time.sleep(random.uniform(0.05, 0.4))
            back = kill_and_restart(server)
            wait_until(lambda back=back: all_have_run_since(folder, back), within=RESUME_SECONDS)  # type: ignore[misc]
            resumed.append(time.monotonic() - back)
    with TaskQueue(server.url) as queue:
        wait_until(lambda: is_drained(queue), within=30)
    for worker in workers:
        worker.process.terminate()
    assert [worker.ends() for worker in workers] == [0] * WORKERS
    return resumed, producer


@pytest.mark.slow
@pytest.mark.deep_on("nats", "postgres")
@pytest.mark.timeout(120)
@pytest.mark.fault("F31")
def test_workers_resume_when_a_killed_server_is_back(start_server, start_worker, tmp_path):
    server = start_server(durable=True)
    _, producer = survive(server, tmp_path, start_worker, 3)

    check_nothing_is_lost(server.url, tmp_path, producer)


@pytest.mark.deep
@pytest.mark.timeout(300)
@pytest.mark.fault("F31")
def test_workers_resume_each_of_20_times(start_server, start_worker, tmp_path):
    server = start_server(durable=True)
    resumed, producer = survive(server, tmp_path, start_worker, 20)

    check_nothing_is_lost(server.url, tmp_path, producer)
    print(  # noqa: T201 - for `pytest -rP`
        f"resumed after {max(resumed):.2f} s at most; {len(producer.acknowledged)} acknowledged, "
        f"{producer.failed_calls} calls failed, {runs(tmp_path).total()} runs"
    )
    assert len(producer.acknowledged) > 100
