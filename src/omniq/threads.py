"""The worker's own threads for sync functions: as many as it has slots.

Not `ThreadPoolExecutor`: a thread that outlives its timeout cannot be stopped, so it must be
possible to give it up, put another in its place, and let the process end without it.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any

from omniq import context
from omniq.context import TaskContext


class _Job:
    """A call on its way through a thread. `abandoned` once nobody waits for it any more."""

    __slots__ = ("abandoned", "args", "func", "future", "kwargs", "loop", "task_context")

    def __init__(
        self,
        task_context: TaskContext,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.task_context = task_context
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[tuple[bool, Any]] = self.loop.create_future()
        self.abandoned = False


class ThreadSlots:
    """Daemon threads that take calls from one queue. Started when needed."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = 0
        self._threads = 0
        self._lock = threading.Lock()
        self.leaked = 0
        """Threads that still run a call that was given up."""

    async def call(
        self,
        task_context: TaskContext,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call the function in a thread. When cancelled, the thread is left to itself."""
        job = _Job(task_context, func, args, kwargs)
        with self._lock:
            # One more thread when none is free for it; abandoned ones do not count.
            if self._idle <= self._jobs.qsize() and self._threads - self.leaked < self._size:
                self._threads += 1
                threading.Thread(target=self._serve, name="omniq-task", daemon=True).start()
            self._jobs.put(job)
        try:
            succeeded, value = await job.future
        except asyncio.CancelledError:
            self._abandon(job)
            raise
        if succeeded:
            return value
        raise value

    def close(self) -> None:
        """Let idle threads end; busy ones end with their call."""
        with self._lock:
            for _ in range(self._threads):
                self._jobs.put(None)

    def _abandon(self, job: _Job) -> None:
        job.task_context.cancelled = True
        with self._lock:
            if not job.abandoned:
                job.abandoned = True
                self.leaked += 1

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            job = self._jobs.get()
            with self._lock:
                self._idle -= 1
                if job is None:
                    self._threads -= 1
                    return
            if not self._run(job):
                return

    def _run(self, job: _Job) -> bool:
        """Run one call; False when the thread was given up meanwhile and should end."""
        with self._lock:
            given_up = job.abandoned
        outcome: tuple[bool, Any]
        if given_up:
            outcome = (False, None)
        else:
            try:
                outcome = (True, contextvars.copy_context().run(_enter_and_call, job))
            except BaseException as error:
                # Handed over as data: raised through a future, StopIteration would hang the awaiter.
                outcome = (False, error)
        with self._lock:
            if job.abandoned:
                self.leaked -= 1
                self._threads -= 1
                return False
        if not job.loop.is_closed():
            job.loop.call_soon_threadsafe(_deliver, job.future, outcome)
        return True


def _enter_and_call(job: _Job) -> Any:
    context.enter(job.task_context)
    return job.func(*job.args, **job.kwargs)


def _deliver(future: asyncio.Future[tuple[bool, Any]], outcome: tuple[bool, Any]) -> None:
    if not future.done():
        future.set_result(outcome)
