"""A producer that enqueues while servers fail, and the check that nothing it was promised is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omniq import StorageError, StorageRefused, TaskQueue, TaskStatus
from omniq.clock import SYSTEM_CLOCK
from tests.fleet.fleet_tasks import note_slowly
from tests.fleet.traces import runs


class Producer:
    """Enqueues continuously, and records the acknowledged tasks."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder = url, folder
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.acknowledged: list[str] = []
        self.failed_calls = 0
        self.error: BaseException | None = None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            self._thread.join(30)
        assert not self._thread.is_alive()
        assert self.error is None, f"the producer died of {self.error!r}"

    def _run(self) -> None:
        try:
            with TaskQueue(self._url) as queue:
                while not self._stopping.wait(0.05):
                    self._enqueue(queue)
        except BaseException as error:
            self.error = error

    def _enqueue(self, queue: TaskQueue) -> None:
        names = [SYSTEM_CLOCK.new_id() for _ in range(8)]
        calls: list[Any] = [(note_slowly, (str(self._folder), name), {}) for name in names]
        try:
            handles = queue.enqueue_many(calls)
        except StorageRefused:
            raise
        except StorageError:
            # Not acknowledged: the task may or may not be stored.
            self.failed_calls += 1
        else:
            self.acknowledged += [handle.id for handle in handles]


def is_drained(queue: TaskQueue) -> bool:
    counts = queue.stats().by_status
    waiting = (TaskStatus.PENDING, TaskStatus.RUNNING, TaskStatus.RETRYING)
    return not any(counts.get(status, 0) for status in waiting)


def check_nothing_is_lost(url: str, folder: Path, producer: Producer) -> None:
    ran = runs(folder)
    with TaskQueue(url) as queue:
        for task_id in producer.acknowledged:
            result = queue.get_result(task_id)
            assert result is not None, f"{task_id} was acknowledged and is lost"
            assert result.status is TaskStatus.SUCCESS
            assert ran[result.result] >= 1
        assert queue.dead.list(limit=10) == []
