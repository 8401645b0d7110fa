"""Store thread: the one thread of a storage, in which all blocking calls run.

Calls run one after the other. Enqueues that arrive while another call runs are run as a group, so
that they share one wait for the disk. No call is delayed to wait for more.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from omniq.storage.file.enqueue import Batch

T = TypeVar("T")

_Job = tuple[Callable[[], Any], Future[Any]]
_Enqueue = tuple[Batch, Future[list[str]]]


class StoreThread:
    """Runs calls in one thread, in the order in which they were made."""

    def __init__(self, enqueue: Callable[[list[Batch]], None]) -> None:
        self._enqueue = enqueue
        self._jobs: deque[_Job | _Enqueue] = deque()
        self._ready = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="omniq-files", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` in the thread; returns a future of its result."""
        future: Future[T] = Future()
        self._add((work, future))
        return future

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread, and return its result."""
        return await asyncio.wrap_future(self.submit(work))

    async def enqueue(self, batch: Batch) -> list[str]:
        """Enqueue the batch, in a group with other waiting batches; returns its ids."""
        future: Future[list[str]] = Future()
        self._add((batch, future))
        return await asyncio.wrap_future(future)

    def stop(self) -> None:
        """Run the submitted calls, then end the thread."""
        with self._ready:
            self._is_stopping = True
            self._ready.notify()
        self._thread.join()

    def _add(self, job: _Job | _Enqueue) -> None:
        with self._ready:
            self._jobs.append(job)
            self._ready.notify()

    def _run(self) -> None:
        while True:
            with self._ready:
                while not self._jobs and not self._is_stopping:
                    self._ready.wait()
                if not self._jobs:
                    return
                work, future = self._jobs.popleft()
                group = self._collect(work, future) if isinstance(work, Batch) else []
            if group:
                self._run_enqueues(group)
            elif future.set_running_or_notify_cancel() and not isinstance(work, Batch):
                _complete(future, work)

    def _collect(self, batch: Batch, future: Future[Any]) -> list[_Enqueue]:
        """Take the next enqueues from the queue, as long as they share no id and no unique key."""
        group = [(batch, future)]
        ids = {row.id for row in batch.rows}
        is_alone = _has_keys(batch)
        while self._jobs and not is_alone:
            work, job_future = self._jobs[0]
            if not isinstance(work, Batch) or _has_keys(work):
                break
            if not ids.isdisjoint(row.id for row in work.rows):
                break
            ids.update(row.id for row in work.rows)
            group.append((work, job_future))
            self._jobs.popleft()
        return group

    def _run_enqueues(self, group: list[_Enqueue]) -> None:
        running = [pair for pair in group if pair[1].set_running_or_notify_cancel()]
        try:
            self._enqueue([batch for batch, _ in running])
        except BaseException as error:
            # Every future must be completed, or its caller waits for ever.
            for batch, _ in running:
                batch.error = error if isinstance(error, Exception) else RuntimeError(repr(error))
        for batch, future in running:
            if batch.error is not None:
                future.set_exception(batch.error)
            else:
                future.set_result(batch.ids)


def _has_keys(batch: Batch) -> bool:
    return any(row.unique is not None for row in batch.rows)


def _complete(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        # Every future must be completed, or its caller waits for ever.
        future.set_exception(error)
