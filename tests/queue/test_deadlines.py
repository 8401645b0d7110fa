"""Blocking calls have a deadline: a setting for each call, or a block for several together."""

from __future__ import annotations

import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from omniq import (
    CallTimeout,
    DuplicateTask,
    InvalidValue,
    ResultTimeout,
    Settings,
    StorageError,
    TaskQueue,
    WorkerPool,
)
from omniq.storage import open_storage
from tests.queue import sample_tasks

SOON = 5.0
"""Seconds: far less than SQLite waits for a lock, and more than a slow machine needs."""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/tasks.db?durability=os"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Another program holds the write lock of the database."""
    with closing(sqlite3.connect(folder / "tasks.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


@pytest.mark.timeout(60)
def test_a_call_on_a_locked_database_ends_at_the_deadline_and_writes_nothing(tmp_path, url):
    settings = Settings(call_timeout=1.0)
    with TaskQueue(url, settings=settings) as queue:
        with locked(tmp_path):
            began = time.monotonic()
            with pytest.raises(
                CallTimeout, match=r"no answer within 1 s; .*as a whole or not at all"
            ):
                queue.options(task_id="a").enqueue(sample_tasks.plain)
            took = time.monotonic() - began

        # Behind it in the only thread that writes: when this one is stored, that one will not be.
        queue.options(task_id="b").enqueue(sample_tasks.plain)
        assert took < SOON
        assert [task.id for task in queue.list_tasks()] == ["b"]
        assert queue.options(task_id="a").enqueue(sample_tasks.plain).id == "a"
        with pytest.raises(DuplicateTask):
            queue.options(task_id="a").enqueue(sample_tasks.plain)


@pytest.mark.timeout(60)
def test_the_error_says_whether_anything_was_sent(tmp_path, url):
    with TaskQueue(url) as queue:
        with locked(tmp_path), queue.deadline(0.2), pytest.raises(CallTimeout) as sent:
            queue.enqueue(sample_tasks.plain)
        with queue.deadline(0), pytest.raises(CallTimeout) as not_sent:
            queue.enqueue(sample_tasks.plain)

        assert queue.list_tasks() == []
    assert (sent.value.was_sent, not_sent.value.was_sent) == (True, False)
    assert "nothing was sent" in str(not_sent.value)
    assert isinstance(sent.value, TimeoutError)
    assert isinstance(sent.value, StorageError)


@pytest.mark.timeout(60)
def test_the_calls_of_a_block_share_its_deadline(tmp_path, url):
    with TaskQueue(url) as queue:
        handle = queue.enqueue(sample_tasks.plain)
        began = time.monotonic()
        with locked(tmp_path), queue.deadline(timedelta(seconds=0.5)):
            with pytest.raises(CallTimeout):
                queue.cancel(handle.id)
            for call in (queue.stats, handle.status, queue.dead.list, queue.schedules.list):
                with pytest.raises(CallTimeout):
                    call()
        took = time.monotonic() - began

        assert took < SOON
        assert queue.cancel(handle.id)


@pytest.mark.timeout(60)
def test_a_block_replaces_the_setting_and_ends_with_the_block(tmp_path, url):
    with TaskQueue(url, settings=Settings(call_timeout=1.0)) as queue, locked(tmp_path):
        began = time.monotonic()
        with queue.deadline(2.0), pytest.raises(CallTimeout):
            queue.enqueue(sample_tasks.plain)
        in_block = time.monotonic() - began
        with pytest.raises(CallTimeout, match=r"within 1 s"):
            queue.enqueue(sample_tasks.plain)

    assert in_block >= 2.0


def test_a_deadline_is_for_its_thread_alone(url):
    with TaskQueue(url) as queue:
        found: list[object] = []
        with queue.deadline(0):
            other = threading.Thread(target=lambda: found.append(queue.stats()))
            other.start()
            other.join()

        assert len(found) == 1


def test_time_that_a_call_waits_on_purpose_does_not_count(url):
    with TaskQueue(url, settings=Settings(call_timeout=1.0)) as queue:
        handle = queue.enqueue(sample_tasks.plain)

        with pytest.raises(ResultTimeout):
            handle.result(timeout=1.2)
        assert queue.get_result(handle.id, timeout=1.2) is None
        with queue.worker():
            assert handle.result() is None


@pytest.mark.timeout(60)
def test_the_setting_is_for_submit_of_a_blocking_pool_too(tmp_path, url):
    storage = open_storage(url, settings=Settings(call_timeout=1.0))
    with WorkerPool(storage) as pool, locked(tmp_path), pytest.raises(CallTimeout):
        pool.submit(sample_tasks.plain)


@pytest.mark.timeout(60)
def test_a_server_that_never_answers_is_an_error_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"redis://127.0.0.1:{server.getsockname()[1]}/0"
        queue = TaskQueue(address, settings=Settings(call_timeout=0.3))
        began = time.monotonic()
        with pytest.raises(CallTimeout):
            queue.open()
        queue.close()

    assert time.monotonic() - began < SOON


def test_a_wrong_deadline_is_refused():
    queue = TaskQueue("memory://")

    with pytest.raises(InvalidValue, match="deadline"):
        queue.deadline(-1)
