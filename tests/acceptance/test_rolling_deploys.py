"""Workers of an old and of a new release beside each other: nothing is lost, and nothing becomes a dead letter."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omniq import TaskQueue, TaskStatus
from tests.acceptance.command import WorkerCommand, clean_environment, wait_until

OLD = """
from omniq import task

@task
def send(mail, subject):
    return f"old {mail} {subject}"

@task
def other(number):
    return number
"""

NEW = """
from omniq import Args, task

def send_1(mail, subject):
    return Args(subject, to={"mail": mail})

@task(version=2, upcasters={1: send_1})
def send(subject, *, to):
    return f"new {to['mail']} {subject}"

@task
def other(number):
    return number
"""

PRODUCER = """
import sys
from omniq import TaskQueue
from letters import send

first, last, url = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
with TaskQueue(url) as queue:
    for number in range(first, last):
        {call}
"""

ENQUEUE = {
    "old": 'queue.options(task_id=f"t{number}").enqueue(send, f"m{number}", "s")',
    "new": 'queue.options(task_id=f"t{number}").enqueue(send, "s", to={"mail": f"m{number}"})',
}

COUNT = 40


@pytest.fixture(params=["sqlite", "postgres", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/tasks.db?durability=os"
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


@pytest.fixture
def releases(tmp_path: Path) -> dict[str, Path]:
    folders = {}
    for name, code in (("old", OLD), ("new", NEW)):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        (folders[name] / "letters.py").write_text(code)
        (folders[name] / "produce.py").write_text(PRODUCER.replace("{call}", ENQUEUE[name]))
    return folders


@pytest.fixture
def start_worker(releases: dict[str, Path], url: str) -> Any:
    commands: list[WorkerCommand] = []

    def start(release: str) -> WorkerCommand:
        command = WorkerCommand(
            releases[release], "--url", url, "--poll-interval", "0.1", modules=("letters",)
        )
        commands.append(command)
        return command

    yield start
    for command in commands:
        command.kill()
        print(command.text)  # noqa: T201 - pytest shows it when the test has failed


@pytest.fixture
def enqueue(releases: dict[str, Path], url: str) -> Any:
    def run(release: str, first: int, last: int) -> None:
        subprocess.run(
            [sys.executable, "produce.py", str(first), str(last), url],
            cwd=releases[release],
            env=clean_environment(),
            check=True,
        )

    return run


def results(queue: TaskQueue, first: int, last: int) -> list[str]:
    found = [queue.get_result(f"t{number}", timeout=60) for number in range(first, last)]
    assert all(each is not None and each.status is TaskStatus.SUCCESS for each in found), found
    return [each.result for each in found if each is not None]


def test_an_old_worker_leaves_the_tasks_of_a_new_producer_to_a_new_worker(
    url, start_worker, enqueue
):
    with TaskQueue(url) as queue:
        old = start_worker("old")
        old.wait_for("worker.started")
        enqueue("new", 0, COUNT)
        old.wait_for("version 2")
        other = queue.enqueue("letters.other", 5)
        assert other.result(timeout=60) == 5
        assert queue.stats().dead == 0
        first = queue.get_task("t0")
        assert first is not None
        assert first.status is TaskStatus.PENDING

        start_worker("new")

        assert results(queue, 0, COUNT) == [f"new m{number} s" for number in range(COUNT)]
        assert queue.stats().dead == 0


def test_a_new_worker_runs_what_an_old_producer_enqueues(url, start_worker, enqueue):
    with TaskQueue(url) as queue:
        enqueue("old", 0, COUNT)
        start_worker("new")
        enqueue("old", COUNT, 2 * COUNT)

        assert results(queue, 0, 2 * COUNT) == [f"new m{each} s" for each in range(2 * COUNT)]


def test_a_rolling_deploy_loses_nothing_and_leaves_no_dead_letter(url, start_worker, enqueue):
    with TaskQueue(url) as queue:
        old = [start_worker("old"), start_worker("old")]
        for worker in old:
            worker.wait_for("worker.started")
        enqueue("old", 0, COUNT)
        new = start_worker("new")
        new.wait_for("worker.started")
        enqueue("new", COUNT, 2 * COUNT)
        old[0].send(signal.SIGTERM)
        # The producers of the old release end last.
        enqueue("old", 2 * COUNT, 3 * COUNT)
        start_worker("new")
        old[1].send(signal.SIGTERM)

        assert [worker.ends() for worker in old] == [0, 0]
        mails = [each.split()[1] for each in results(queue, 0, 3 * COUNT)]
        assert mails == [f"m{number}" for number in range(3 * COUNT)]
        stats = queue.stats()
        assert stats.dead == 0
        assert {status for status, count in stats.by_status.items() if count} == {
            TaskStatus.SUCCESS
        }
        wait_until(lambda: len(queue.workers()) == 2)
