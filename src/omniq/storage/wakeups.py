"""Wake-ups inside one process. Hints only: whoever waits looks at the storage again anyway."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from omniq._futures import finish

_WORK, _SCHEDULES = "", "/"
"""The topics of claimable work and of schedules. No task id, the other topics, is like them."""


class Hints:
    """Tells waiters in any thread or event loop that a topic may have changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # In the order in which they came, so that what follows can be replayed.
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}
        # Replaced as a whole, never changed in place: `cancelled` walks it without the lock.
        self._on_cancel: tuple[Callable[[str], None], ...] = ()

    @contextmanager
    def listen_for_work(self) -> Iterator[asyncio.Future[None]]:
        """A future that is done when there may be something to claim."""
        with self._listen(_WORK) as future:
            yield future

    @contextmanager
    def listen_for_result(self, task_id: str) -> Iterator[asyncio.Future[None]]:
        """A future that is done when the task may have ended."""
        with self._listen(task_id) as future:
            yield future

    @contextmanager
    def listen_for_schedules(self) -> Iterator[asyncio.Future[None]]:
        """A future that is done when a schedule may have changed."""
        with self._listen(_SCHEDULES) as future:
            yield future

    def on_cancel(self, listener: Callable[[str], None]) -> Callable[[], None]:
        """Call `listener` with the id of each cancelled task, until the returned function is called."""
        with self._lock:
            self._on_cancel = (*self._on_cancel, listener)

        def forget() -> None:
            with self._lock:
                self._on_cancel = tuple(one for one in self._on_cancel if one is not listener)

        return forget

    def cancelled(self, task_id: str) -> None:
        """The task is not wanted any more."""
        for listener in self._on_cancel:
            listener(task_id)

    def work(self) -> None:
        """Something may have become claimable."""
        if self._waiting:
            self._wake((_WORK,))

    def schedules(self) -> None:
        """A schedule may have changed."""
        if self._waiting:
            self._wake((_SCHEDULES,))

    def results(self, task_ids: Iterable[str]) -> None:
        """These tasks may have ended."""
        if self._waiting:
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

    def _wake(self, topics: Iterable[str]) -> None:
        with self._lock:
            futures = [future for topic in topics for future in self._waiting.pop(topic, ())]
        here = _running_loop() if futures else None
        for future in futures:
            loop = future.get_loop()
            if loop is here:
                finish(future)
            elif not loop.is_closed():
                loop.call_soon_threadsafe(finish, future)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
