"""The worker's threads for sync functions: one for each running call.

Not `ThreadPoolExecutor`: a thread that outlives its timeout cannot be stopped, so the worker must be
able to abandon it, start another in its place, and let the process end without it.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from omniq.concurrency.futures import set_result
from omniq.models import TaskError
from omniq.tasks.control import Signal
from omniq.tasks.signature import as_raised

_Ending = tuple[bool, Any]
"""Whether the call returned, and its value; otherwise the exception to raise."""


class _Job:
    """A call in a thread. `ending` and `abandoned` change under the executor's lock."""

    __slots__ = ("abandoned", "call", "ending", "explain", "future", "loop")

    def __init__(
        self, call: Callable[[], Any], explain: Callable[[BaseException], BaseException]
    ) -> None:
        self.call: Callable[[], Any] | None = call
        self.explain = explain
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[_Ending] = self.loop.create_future()
        self.ending: _Ending | None = None
        self.abandoned = False


class ThreadExecutor:
    """Daemon threads that are started when needed and reused for the next call.

    It calls `on_change`, on the event loop, when `leaked` has changed.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._is_closed = False
        self.leaked = 0
        """How many threads still run a call that was abandoned."""

    async def call(
        self, call: Callable[[], Any], *, explain: Callable[[BaseException], BaseException]
    ) -> Any:
        """Make the call in a thread, with the context variables that are set here.

        Raises a `Signal` as it was raised, and in place of any other exception what `explain`, called
        in the thread, returns for it. When cancelled, the thread is abandoned; a call that has just
        returned counts.
        """
        job = _Job(partial(contextvars.copy_context().run, call), explain)
        self._submit(job)
        try:
            succeeded, value = await job.future
        except asyncio.CancelledError:
            ending = self._abandon(job)
            if ending is None:
                self._on_change()
                raise
            succeeded, value = ending
        if succeeded:
            return value
        raise value

    def close(self) -> None:
        """Let idle threads end; busy ones end with their call."""
        with self._lock:
            self._is_closed = True
            for _ in range(self._idle):
                self._jobs.put(None)
            self._idle = 0

    def _submit(self, job: _Job) -> None:
        with self._lock:
            if self._idle:
                # Counted down here and not by the thread, which may take a while to wake up:
                # until then another call would be given to it too, and wait for both.
                self._idle -= 1
                self._jobs.put(job)
                return
        threading.Thread(target=self._serve, args=(job,), name="omniq-task", daemon=True).start()

    def _abandon(self, job: _Job) -> _Ending | None:
        """Stop waiting for the call; returns how it ended, if it ended just now."""
        with self._lock:
            if job.ending is None:
                job.abandoned = True
                self.leaked += 1
            return job.ending

    def _serve(self, job: _Job | None) -> None:
        while job is not None and self._run(job):
            # A thread that waits for its next call must not hold references of the last one.
            del job
            job = self._jobs.get()

    def _run(self, job: _Job) -> bool:
        """Run one call; returns False when the thread should end."""
        ending = _end_of(job)
        with self._lock:
            job.ending = ending
            was_abandoned = job.abandoned
            is_reusable = not was_abandoned and not self._is_closed
            self._idle += is_reusable
            self.leaked -= was_abandoned
        # The loop may be closed: a pool that abandoned this thread does not wait for it.
        with suppress(RuntimeError):
            if was_abandoned:
                job.loop.call_soon_threadsafe(self._on_change)
            else:
                job.loop.call_soon_threadsafe(set_result, job.future, ending)
        return is_reusable


def _end_of(job: _Job) -> _Ending:
    call, job.call = job.call, None
    assert call is not None
    try:
        return True, call()
    except Signal as raised:
        return False, raised.with_traceback(None)
    except BaseException as error:
        # Explained here: the methods of the exception are the user's code and may block. The result
        # is data, since a traceback would keep every local variable alive.
        try:
            return False, job.explain(as_raised(error))
        except BaseException as broken:
            # The caller must receive an error, whatever the methods of the exception do.
            return False, TaskError.from_exception(broken)
