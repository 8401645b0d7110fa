"""Why a worker died is stored with the tasks that it ran, where its supervisor knows it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from omniq import TaskQueue
from tests.acceptance.command import wait_until
from tests.fleet.fleet_tasks import hold_at_first
from tests.fleet.traces import traces

LEASE = "3"
KILLED = "killed by SIGKILL (out of memory?)"

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def url(tmp_path) -> str:
    return f"sqlite:///{tmp_path}/tasks.db"


def shown(url: str, *arguments: str) -> str:
    """The output of a command, without the line breaks that a narrow terminal needs."""
    command = subprocess.run(
        [sys.executable, "-m", "omniq", *arguments, "--url", url],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    return " ".join(command.stdout.split())


def kill_worker(folder: Path) -> None:
    """Kill the process that has begun to run the task."""
    wait_until(lambda: traces(folder), "a worker runs it", within=60)
    os.kill(traces(folder)[0].pid, signal.SIGKILL)


def test_a_killed_worker_leaves_the_reason_in_the_history_of_its_tasks(url, start_worker, tmp_path):
    start_worker(url, "--processes", "2", "--lease", LEASE, "--poll-interval", "0.2")
    with TaskQueue(url) as queue:
        handle = queue.enqueue(hold_at_first, str(tmp_path), "held")
        kill_worker(tmp_path)

        assert handle.result(timeout=60) == 2
        (attempt,) = queue.history(handle.id)
    assert attempt.outcome == "crashed"
    assert attempt.error is not None
    assert attempt.error.message.endswith(f"was lost while it ran the task: {KILLED}")


@pytest.mark.deep
def test_the_reason_is_shown_with_the_task_and_its_dead_letter(url, start_worker, tmp_path):
    start_worker(url, "--processes", "2", "--lease", LEASE, "--poll-interval", "0.2")
    with TaskQueue(url) as queue:
        once = queue.options(max_crashes=0)
        handle = once.enqueue(hold_at_first, str(tmp_path), "held")
        kill_worker(tmp_path)
        wait_until(lambda: queue.dead.get(handle.id), "a dead letter", within=60)
        letter = queue.dead.get(handle.id)

    assert letter is not None
    assert letter.failure_reason == "crashed"
    assert KILLED in letter.error_details
    assert KILLED in shown(url, "tasks", "show", handle.id)
    assert KILLED in shown(url, "explain", handle.id)


def test_a_worker_without_a_supervisor_has_lost_its_lease(url, start_worker, tmp_path):
    victim = start_worker(url, "--lease", LEASE)
    with TaskQueue(url) as queue:
        handle = queue.enqueue(hold_at_first, str(tmp_path), "held")
        wait_until(lambda: traces(tmp_path), within=60)
        victim.kill()
        start_worker(url, "--lease", LEASE, "--poll-interval", "0.2")

        assert handle.result(timeout=60) == 2
        (attempt,) = queue.history(handle.id)
    assert attempt.error is not None
    assert attempt.error.message.endswith(": it did not renew its lease")
