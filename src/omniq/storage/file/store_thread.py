"""The one thread of a storage object in which everything blocking happens.

Calls run one after the other. Enqueues that gather while another call runs are run together, so
that they share one durability barrier; nothing waits for company.
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


class Worker:
    """Runs calls in a thread of its own, in the order in which they were made."""

    def __init__(self, enqueue: Callable[[list[Batch]], None]) -> None:
        self._enqueue = enqueue
        self._jobs: deque[_Job | _Enqueue] = deque()
        self._ready = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="omniq-files", daemon=True)
        self._thread.start()

    def submit(self, act: Callable[[], T]) -> Future[T]:
        """Run the call in the thread."""
        future: Future[T] = Future()
        self._add((act, future))
        return future

    async def call(self, act: Callable[[], T]) -> T:
        """Run the call in the thread and wait for what it returns."""
        return await asyncio.wrap_future(self.submit(act))

    async def enqueue(self, batch: Batch) -> list[str]:
        """Enqueue the batch, together with those that gather meanwhile."""
        future: Future[list[str]] = Future()
        self._add((batch, future))
        return await asyncio.wrap_future(future)

    def stop(self) -> None:
        """Run what was submitted, then end the thread."""
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
                what, future = self._jobs.popleft()
                group = self._gather(what, future) if isinstance(what, Batch) else []
            if group:
                self._run_enqueues(group)
            elif future.set_running_or_notify_cancel() and not isinstance(what, Batch):
                _settle(future, what)

    def _gather(self, batch: Batch, future: Future[Any]) -> list[_Enqueue]:
        """The enqueues that stand next in line, as long as they do not concern each other."""
        group = [(batch, future)]
        ids = {row.id for row in batch.rows}
        is_alone = _has_keys(batch)
        while self._jobs and not is_alone:
            what, its_future = self._jobs[0]
            if not isinstance(what, Batch) or _has_keys(what):
                break
            if not ids.isdisjoint(row.id for row in what.rows):
                break
            ids.update(row.id for row in what.rows)
            group.append((what, its_future))
            self._jobs.popleft()
        return group

    def _run_enqueues(self, group: list[_Enqueue]) -> None:
        going = [pair for pair in group if pair[1].set_running_or_notify_cancel()]
        try:
            self._enqueue([batch for batch, _ in going])
        except BaseException as error:
            # A future must be settled whatever happens, or its caller waits for ever.
            for batch, _ in going:
                batch.error = error if isinstance(error, Exception) else RuntimeError(repr(error))
        for batch, future in going:
            if batch.error is not None:
                future.set_exception(batch.error)
            else:
                future.set_result(batch.ids)


def _has_keys(batch: Batch) -> bool:
    return any(row.unique is not None for row in batch.rows)


def _settle(future: Future[Any], act: Callable[[], Any]) -> None:
    try:
        future.set_result(act())
    except BaseException as error:
        # A future must be settled whatever happens, or its caller waits for ever.
        future.set_exception(error)
