"""Lets a thread run a blocking call of a storage itself, without an event loop and another thread.

For a storage whose enqueue waits for nothing but its own files. One thread at a time does it; the calls
of the others go to the event loop of their queue, where those that arrive together are written together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any, TypeVar

from omniq.concurrency.coroutines import run_without_loop
from omniq.errors import StorageError

_T = TypeVar("_T")


class CallersLock:
    """Held by the thread that runs a call of one storage object itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None

    def run(
        self, work: Coroutine[Any, Any, _T], otherwise: Callable[[Coroutine[Any, Any, _T]], _T]
    ) -> _T:
        """Run the coroutine in this thread, which has no event loop; `otherwise` if another thread does so.

        It runs in a copy of the caller's context variables, as on an event loop.
        """
        if not self._lock.acquire(blocking=False):
            return otherwise(work)
        # An interrupt just before this line leaves the lock locked: later calls then go to the event loop.
        try:
            self._holder = threading.get_ident()
            return copy_context().run(run_without_loop, work)
        finally:
            # Before any call: after one, an interrupt could come.
            self._holder = None
            self._lock.release()
            # Has an effect only if an interrupt came before the coroutine began.
            work.close()

    def refuse_nested(self) -> None:
        """Raise `StorageError` if this thread runs a call already: another one would wait for it."""
        if self._holder == threading.get_ident():
            raise StorageError(
                "a blocking call from within an enqueue (a wrapper, a function of arguments, a signal "
                "handler) would wait for itself; make it before or after the enqueue"
            )
