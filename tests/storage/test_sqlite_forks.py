"""A process that was forked while its parent had a SQLite store open, and opens the store itself."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from omniq import TaskQueue, failpoints
from omniq.storage.sqlite import forks
from tests.queue import sample_tasks

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/tasks.db"


@pytest.fixture(autouse=True)
def _no_failpoints() -> Iterator[None]:
    yield
    failpoints.configure("")


class _Child:
    """A forked process that does its work when it is asked to."""

    def __init__(self, work: Callable[[], str]) -> None:
        asked, self._ask = os.pipe()
        self._answer, answer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            # Ends a child that would wait for a lock of its parent.
            signal.alarm(10)
            try:
                os.read(asked, 1)
                os.write(answer, work().encode())
            except Exception as error:
                os.write(answer, str(error).encode())
            finally:
                os._exit(0)
        os.close(asked)
        os.close(answer)

    def work(self) -> str:
        os.write(self._ask, b"x")
        with open(self._answer, closefd=False) as file:
            answer = file.read()
        os.waitpid(self.pid, 0)
        os.close(self._ask)
        os.close(self._answer)
        return answer


def _enqueue(url: str) -> str:
    with TaskQueue(url) as queue:
        return queue.enqueue(sample_tasks.plain).id


@contextmanager
def _slow_commit(queue: TaskQueue) -> Iterator[None]:
    """Another thread is in a transaction when the block begins."""
    failpoints.configure("sqlite.before_commit=delay:300@1")
    thread = threading.Thread(target=queue.enqueue, args=(sample_tasks.plain,))
    thread.start()
    while not failpoints.hits().get("sqlite.before_commit"):
        pass
    try:
        yield
    finally:
        thread.join()


@pytest.mark.fault("F97")
def test_what_a_child_enqueues_stays_when_its_parent_closes_the_store_and_opens_it_again(
    url, tmp_path
):
    with TaskQueue(url):
        child = _Child(lambda: _enqueue(url))
        grandchild = _Child(lambda: _Child(lambda: _enqueue(url)).work())
    with TaskQueue(url) as queue:
        ids = [queue.enqueue(sample_tasks.plain).id, child.work(), grandchild.work()]
        ids.append(queue.enqueue(sample_tasks.plain).id)

    with TaskQueue(url) as queue:
        assert [task.id for task in map(queue.get_task, ids) if task] == ids
    with closing(sqlite3.connect(tmp_path / "tasks.db")) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.fault("F97")
def test_a_child_that_was_forked_during_a_transaction_enqueues(url):
    with TaskQueue(url) as queue:
        with _slow_commit(queue):
            child = _Child(lambda: _enqueue(url))
        task_id = child.work()

        assert queue.get_task(task_id), task_id


def test_a_child_is_refused_if_a_transaction_lasts_longer_than_a_fork_waits(url, monkeypatch):
    monkeypatch.setattr(forks, "_PATIENCE", 0.01)
    with TaskQueue(url) as queue:
        with _slow_commit(queue):
            child = _Child(lambda: _enqueue(url))
        answer = child.work()

        assert "forked while its parent wrote to the database" in answer
        assert queue.get_task(_enqueue(url))
