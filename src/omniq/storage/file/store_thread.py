"""Store thread: the one thread of a storage, in which all blocking calls run, one after the other."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class StoreThread:
    """Runs calls in one thread, in the order in which they were made."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._ready = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="omniq-files", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` in the thread; returns a future of its result."""
        future: Future[T] = Future()
        with self._ready:
            self._jobs.append((work, future))
            self._ready.notify()
        return future

    def stop(self) -> None:
        """Run the submitted calls, then end the thread."""
        with self._ready:
            self._is_stopping = True
            self._ready.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._ready:
                while not self._jobs and not self._is_stopping:
                    self._ready.wait()
                if not self._jobs:
                    return
                work, future = self._jobs.popleft()
            if future.set_running_or_notify_cancel():
                _complete(future, work)


def _complete(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        # Every future must be completed, or its caller waits for ever.
        future.set_exception(error)
