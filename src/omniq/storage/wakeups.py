"""Wake-ups within one process: tell waiters that tasks, results or schedules may have changed.

A wake-up is only a hint. A waiter that misses one finds the change at its next poll.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager

from omniq.concurrency.futures import finish

_WORK, _SCHEDULES, _NEXT_DUE = "", "/", "//"
"""The topics of claimable tasks, schedules and delays. All other topics are task ids, which differ."""


class LocalWakeups:
    """Wakes waiters in any thread or event loop of this process when a topic may have changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Futures in the order in which they were added, so that a simulation can be replayed.
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}
        # Replaced as a whole, never changed in place: `notify_cancelled` reads it without the lock.
        self._on_cancel: tuple[Callable[[str], None], ...] = ()

    def listen_for_work(self) -> AbstractContextManager[asyncio.Future[None]]:
        """A future that is done when there may be a task to claim."""
        return self._listen(_WORK)

    def listen_for_result(self, task_id: str) -> AbstractContextManager[asyncio.Future[None]]:
        """A future that is done when the task may have ended."""
        return self._listen(task_id)

    def listen_for_schedules(self) -> AbstractContextManager[asyncio.Future[None]]:
        """A future that is done when a schedule may have changed."""
        return self._listen(_SCHEDULES)

    def listen_for_next_due(self) -> AbstractContextManager[asyncio.Future[None]]:
        """A future that is done when another delayed task may be the next one."""
        return self._listen(_NEXT_DUE)

    def on_cancel(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Call `callback` with the id of each cancelled task, until the returned function is called."""
        with self._lock:
            self._on_cancel = (*self._on_cancel, callback)

        def unsubscribe() -> None:
            with self._lock:
                self._on_cancel = tuple(each for each in self._on_cancel if each is not callback)

        return unsubscribe

    def notify_cancelled(self, task_id: str) -> None:
        """Run the `on_cancel` callbacks for this task."""
        for callback in self._on_cancel:
            callback(task_id)

    def notify_work(self) -> None:
        """Wake the waiters for work: a task may have become claimable."""
        self._wake((_WORK,))

    def notify_schedules(self) -> None:
        """Wake the waiters for schedules: one may have changed."""
        self._wake((_SCHEDULES,))

    def notify_next_due(self) -> None:
        """Wake the waiters for work, so that they wait for another delayed task."""
        self._wake((_NEXT_DUE,))

    def notify_results(self, task_ids: Collection[str]) -> None:
        """Wake the waiters for these tasks: they may have ended."""
        self._wake(task_ids)

    @contextmanager
    def _listen(self, topic: str) -> Iterator[asyncio.Future[None]]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.setdefault(topic, {})[future] = None
        try:
            yield future
        finally:
            with self._lock:
                waiting = self._waiting.get(topic)
                if waiting is not None:
                    waiting.pop(future, None)
                    if not waiting:
                        del self._waiting[topic]

    def _wake(self, topics: Collection[str]) -> None:
        with self._lock:
            if self._waiting.keys().isdisjoint(topics):
                return
            futures = [future for topic in topics for future in self._waiting.pop(topic, ())]
        this_loop = _running_loop() if futures else None
        for future in futures:
            loop = future.get_loop()
            if loop is this_loop:
                finish(future)
            elif not loop.is_closed():
                loop.call_soon_threadsafe(finish, future)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
