"""A task that kills its workers is a dead letter after three crashes; other tasks run (F07)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from omniq import TaskQueue, TaskStatus
from tests.acceptance.command import WorkerCommand, wait_until
from tests.faults.shared_stores import SHARED, url_of

TASKS = '''
import os
import signal

from omniq import task


async def good(number):
    return number


@task(max_retries=100)
async def poison(path, how):
    """Takes its worker with it, and writes down that it did."""
    with open(path, "a") as file:
        file.write("x")
    if how == "descriptors":
        os.closerange(3, 1024)
        return
    if how == "exit":
        os._exit(7)
    os.kill(os.getpid(), signal.SIGKILL)
'''

GOOD = 1000


@pytest.fixture(params=SHARED)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(request.param, tmp_path, request)


@pytest.fixture
def worker(tmp_path: Path, url: str) -> Iterator[WorkerCommand]:
    (tmp_path / "poisonous.py").write_text(TASKS)
    arguments = ("--url", url, "--processes", "2", "--concurrency", "8")
    command = WorkerCommand(tmp_path, *arguments, modules=("poisonous",), OMNIQ_LEASE="1")
    yield command
    command.kill()
    print(command.text)


@pytest.mark.deep_on("file")
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.fault("F06", "F07")
def test_a_task_that_kills_its_workers_becomes_a_dead_letter_after_three_crashes(
    worker, url, tmp_path
):
    how = "exit" if url.startswith("sqlite") else "kill"
    crashes = tmp_path / "crashes"
    with TaskQueue(url) as queue:
        before = queue.enqueue_many("poisonous.good", range(GOOD // 2))
        # More retries than crashes, so that the crashes end the task and not its retries.
        poison = queue.options(max_retries=100).enqueue("poisonous.poison", str(crashes), how)
        after = queue.enqueue_many("poisonous.good", range(GOOD // 2, GOOD))
        values = [handle.result(timeout=60) for handle in [*before, *after]]
        wait_until(lambda: queue.dead.get(poison.id), "a dead letter", within=40)
        (letter,) = queue.dead.list()
        attempts = queue.dead.attempts(poison.id)
        worker.wait_for("task.dead")
        counted = queue.stats()

    assert values == list(range(GOOD))
    assert crashes.read_text() == "x" * 3
    assert (letter.failure_reason, letter.attempt_count) == ("crashed", 3)
    errors = [attempt.error.error_type for attempt in attempts if attempt.error is not None]
    assert [attempt.outcome for attempt in attempts] == ["crashed"] * 3
    assert errors == ["WorkerLost"] * 3
    assert counted.by_status[TaskStatus.SUCCESS] == GOOD
    # One process was replaced for each crash, and no more.
    assert sum("process.ended" in line for line in worker.lines) == 3


@pytest.mark.fault("F06")
@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_task_that_ends_a_process_in_its_first_moment_does_not_end_the_worker(
    worker, url, tmp_path
):
    with TaskQueue(url) as queue:
        poison = queue.enqueue("poisonous.poison", str(tmp_path / "crashes"), "exit")
        wait_until(lambda: queue.dead.get(poison.id), "a dead letter", within=40)
        good = queue.enqueue("poisonous.good", 1)

        assert good.result(timeout=20) == 1


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.fault("F07", "F81")
@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_task_that_closes_all_descriptors_is_the_only_one_to_fail(worker, url, tmp_path):
    crashes = tmp_path / "crashes"
    with TaskQueue(url) as queue:
        before = queue.enqueue_many("poisonous.good", range(20))
        poison = queue.enqueue("poisonous.poison", str(crashes), "descriptors")
        after = queue.enqueue_many("poisonous.good", range(20, 40))
        values = [handle.result(timeout=60) for handle in [*before, *after]]
        wait_until(lambda: queue.dead.get(poison.id), "a dead letter", within=40)
        (letter,) = queue.dead.list()

    assert values == list(range(40))
    assert crashes.read_text() == "x" * 3
    assert (letter.task_id, letter.failure_reason) == (poison.id, "crashed")
