"""After a time in which no worker could reach the server, none takes the tasks of another that is alive."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from omniq import TaskQueue, TaskStatus
from omniq.testing.server_process import children_of
from omniq.testing.servers import Server
from tests.acceptance.command import wait_until
from tests.fleet.fleet_tasks import hold_at_first, note_after
from tests.fleet.traces import runs, traces

LEASE = 4.0
GAP = 2 * LEASE

pytestmark = [pytest.mark.timeout(180), pytest.mark.deep]


def send(server: Server, number: signal.Signals) -> None:
    """Send a signal to the server and its children."""
    for pid in (server.pid, *children_of(server.pid)):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def stand_still(server: Server, seconds: float) -> None:
    send(server, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        send(server, signal.SIGCONT)


def started(folder: Path) -> set[str]:
    return {trace.name for trace in traces(folder) if trace.what == "started"}


def test_what_finished_while_the_server_stood_still_does_not_run_again(
    start_server, start_worker, tmp_path
):
    server = start_server()
    options = ("--lease", str(LEASE), "--concurrency", "4", "--poll-interval", "0.1")
    commands = [start_worker(server.url, *options) for _ in range(3)]
    with TaskQueue(server.url) as queue:
        wait_until(lambda: len(queue.workers()) == len(commands), within=60)
        handles = [queue.enqueue(note_after, str(tmp_path), f"{n}", 1.5) for n in range(12)]
        wait_until(lambda: len(started(tmp_path)) == 12, within=60)
        stand_still(server, GAP)
        for handle in handles:
            assert handle.result(timeout=60)
        results = [queue.get_result(handle.id) for handle in handles]
        workers = queue.workers()

    assert len(workers) == len(commands)
    assert set(runs(tmp_path).values()) == {1}
    assert {result and result.attempts for result in results} == {1}
    for command in commands:
        assert "tasks.given_back" not in command.text


def test_the_tasks_of_a_worker_that_died_in_the_gap_are_taken_after_one_lease(
    start_server, start_worker, tmp_path
):
    server = start_server()
    options = ("--lease", str(LEASE), "--concurrency", "1", "--poll-interval", "0.1")
    victim = start_worker(server.url, *options)
    with TaskQueue(server.url) as queue:
        handle = queue.enqueue(hold_at_first, str(tmp_path), "held")
        wait_until(lambda: traces(tmp_path), within=60)
        survivor = start_worker(server.url, *options)
        wait_until(lambda: len(queue.workers()) == 2, within=60)
        victim.kill()
        stand_still(server, GAP)
        gap_ended = time.monotonic()

        assert handle.result(timeout=60) == 2
        assert handle.status() is TaskStatus.SUCCESS
    (second,) = [trace for trace in traces(tmp_path) if trace.what == "started-2"]
    assert second.at / 1e9 - gap_ended > LEASE
    assert "tasks.given_back" in survivor.text
