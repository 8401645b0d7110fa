"""The only bridge from blocking code to the event loop: a loop in a separate thread.

omniq is async inside; the blocking classes pass their coroutines to a `Portal`. It works from any
thread, also from a thread that runs an event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import weakref
from collections.abc import Coroutine, Iterator
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, Generic, NamedTuple, TypeVar, cast

from omniq.clock import SYSTEM_CLOCK
from omniq.concurrency.callers_lock import CallersLock
from omniq.concurrency.event_loop import has_event_loop, run_until_done
from omniq.concurrency.process_id import PROCESS_ID, OfOneProcess
from omniq.errors import CallTimeout, InvalidTask, StorageClosed, StorageError

_T = TypeVar("_T")

# Long enough for clean-up that waits for a disk; a coroutine that ignores its cancellation must
# not keep the interpreter from ending.
_JOIN_SECONDS = 10.0

# How long the caller waits for the clean-up of a call that has exceeded its deadline and was cancelled.
# The clean-up goes on if it takes longer.
_CLEAN_UP_SECONDS = 0.5


class _Deadline(NamedTuple):
    """When the calls of a block must have ended; None: without limit."""

    at: float | None


class _CallingThread(threading.local):
    """What a portal knows of the thread that calls it: the deadline of its innermost block, if any."""

    deadline: _Deadline | None = None


class Portal(OfOneProcess):
    """Runs coroutines on an event loop in a daemon thread, which the first call starts.

    A portal belongs to one process: a fork copies the loop but not its thread. It closes itself
    when it is garbage collected, and when the interpreter exits. A call may take `call_timeout`
    seconds; None: without limit. `callers_lock` is that of the storage whose calls it runs, if it has one.
    """

    def __init__(
        self, call_timeout: float | None = None, callers_lock: CallersLock | None = None
    ) -> None:
        self.call_timeout = call_timeout
        self.callers_lock = callers_lock
        self._of_thread = _CallingThread()
        self._lock = threading.Lock()
        self._loop_thread: _LoopThread | None = None
        self._closed = False
        self._finalizer: weakref.finalize[[], Portal] | None = None

    @property
    def forked(self) -> bool:
        """Whether this is a child process and the loop is the parent's."""
        return self._loop_thread is not None and self._loop_thread.pid != PROCESS_ID.number

    @property
    def usable(self) -> bool:
        """Whether `run` can still reach the loop: not closed, and not the parent's."""
        return not self._closed and not self.forked

    def run(self, coroutine: Coroutine[Any, Any, _T], wait: float | None = 0.0) -> _T:
        """Run the coroutine on the loop; return its result or raise its exception.

        An exception in the waiting thread, such as KeyboardInterrupt, cancels the coroutine and
        waits for its clean-up; a second exception ends the wait. Raises `StorageClosed` after
        `close`, and `StorageError` in a forked child or when called from the loop itself.

        Raises `CallTimeout` when the call takes longer than it may. `wait`: the seconds that it waits
        on purpose, which do not count; None: without limit.
        """
        call = _Call(coroutine)
        try:
            if self.callers_lock is not None and not self.forked:
                self.callers_lock.refuse_nested()
            seconds = self._seconds_left(wait)
            if seconds is not None and seconds <= 0:
                raise CallTimeout(0.0, was_sent=False)
            self._submit(call)
            return call.result() if seconds is None else call.result_within(seconds)
        except CallTimeout:
            call.close_unless_sent()
            raise
        except BaseException:
            # An interrupt may arrive at any point, even just after the call was passed to the loop.
            call.abandon()
            raise

    def run_in_caller(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine that waits for nothing but the storage in this thread; otherwise as `run` does.

        Not in this thread if it has an event loop or a deadline, or if another caller does it now.
        """
        lock = self.callers_lock
        if (
            lock is None
            or not self.usable
            or has_event_loop()
            or self._seconds_left(0.0) is not None
        ):
            return self.run(coroutine)
        return lock.run(coroutine, otherwise=self.run)

    @contextmanager
    def deadline(self, seconds: float | None) -> Iterator[None]:
        """Bound the time that all calls of this thread in the block take together; None: no limit."""
        before = self._of_thread.deadline
        self._of_thread.deadline = _Deadline(
            None if seconds is None else SYSTEM_CLOCK.monotonic() + seconds
        )
        try:
            yield
        finally:
            self._of_thread.deadline = before

    def _seconds_left(self, wait: float | None) -> float | None:
        """How long a call that begins now may take; None: without limit."""
        deadline = self._of_thread.deadline
        if deadline is not None:
            return None if deadline.at is None else deadline.at - SYSTEM_CLOCK.monotonic()
        if self.call_timeout is None or wait is None:
            return None
        return self.call_timeout + wait

    def close(self) -> None:
        """Cancel all running calls and stop the loop. May be called again, and after a fork."""
        if self.forked:
            # The lock may have been held by a thread that does not exist here.
            self._closed = True
            return
        with self._lock:
            self._closed = True
            finalizer = self._finalizer
        if finalizer is not None:
            finalizer()

    def _submit(self, call: _Call[Any]) -> None:
        if self.forked:
            raise StorageError(
                "this queue was opened before a fork and belongs to the parent process; "
                "open a new queue in the child"
            )
        with self._lock:
            if self._closed:
                raise StorageClosed("this queue is closed; open a new one")
            if self._loop_thread is None:
                self._loop_thread = _LoopThread()
                self._finalizer = weakref.finalize(self, self._loop_thread.stop)
            if self._loop_thread.is_current():
                raise StorageError(
                    "a blocking call from the queue's own event loop would wait for itself; "
                    "use AsyncTaskQueue inside coroutines"
                )
            # Under the lock, so that every call reaches the loop before `close` stops it.
            self._loop_thread.start(call)


def run_here(coroutine: Coroutine[Any, Any, _T], connection: object) -> _T:
    """Run a coroutine that uses the connection in this thread, without an event loop.

    The coroutine must never suspend. Raises `InvalidTask` when the connection is for async code.
    """
    if not is_async(type(connection)):
        try:
            coroutine.send(None)
        except StopIteration as returned:
            return cast(_T, returned.value)
    coroutine.close()
    raise InvalidTask(
        f"connection: {type(connection).__module__}.{type(connection).__qualname__} is for async "
        "code; use AsyncTaskQueue with it, or give TaskQueue a blocking connection"
    )


def is_async(connection: type) -> bool:
    """Whether the methods of this connection class are coroutines."""
    methods = (getattr(connection, name, None) for name in ("execute", "commit", "close"))
    return any(
        inspect.iscoroutinefunction(inspect.unwrap(method))
        for method in methods
        if callable(method)
    )


class _LoopThread:
    """An event loop and its thread. Has no reference to its portal, so that the portal can be collected."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(
            target=_run_loop, args=(started,), name="omniq-portal", daemon=True
        )
        self._thread.start()
        self._loop, self._stopping = started.result()

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def start(self, call: _Call[Any]) -> None:
        call.submit(self._loop)

    def stop(self) -> None:
        # In a forked child the wake-up pipe is shared: a byte written here would go to the parent.
        if self.pid != os.getpid() or not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._stopping.set)
        if not self.is_current():
            self._thread.join(_JOIN_SECONDS)


def _run_loop(started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    async def serve() -> None:
        stopping = asyncio.Event()
        started.set_result((asyncio.get_running_loop(), stopping))
        await stopping.wait()

    runner = asyncio.Runner()
    try:
        run_until_done(runner, serve())
    except OSError as error:
        # Without file descriptors there is no loop; the thread that waits for it gets the error.
        if started.done():
            raise
        started.set_exception(error)
    finally:
        # Cancels the remaining calls and waits for them. Some versions of Python start no thread
        # once the interpreter exits, not even the one that shuts down the loop's executor.
        with suppress(RuntimeError):
            runner.close()


class _Call(Generic[_T]):
    """One coroutine that runs on the loop while its caller waits in another thread."""

    def __init__(self, coroutine: Coroutine[Any, Any, _T]) -> None:
        self._coroutine = coroutine
        self._outcome: Future[_T] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    def submit(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the coroutine on the loop, with the caller's context variables. For any thread."""
        self._loop = loop
        try:
            loop.call_soon_threadsafe(self._start)
        except RuntimeError:
            self._loop = None
            raise

    def result(self) -> _T:
        """Block the calling thread until the coroutine is done."""
        return self._outcome.result()

    def result_within(self, seconds: float) -> _T:
        """Like `result`, but after that time cancel the coroutine and raise `CallTimeout`."""
        if not futures.wait([self._outcome], seconds).not_done:
            return self._outcome.result()
        # The loop may have been closed in between: then the call has ended as well.
        with suppress(RuntimeError):
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._cancel)
        if futures.wait([self._outcome], _CLEAN_UP_SECONDS).not_done:
            raise CallTimeout(seconds, was_sent=True)
        try:
            # It may have ended by itself meanwhile: then its result is known after all.
            return self._outcome.result()
        except StorageError as error:
            raise CallTimeout(seconds, was_sent=True) from error

    def close_unless_sent(self) -> None:
        """Close the coroutine of a call that was never passed to the loop."""
        if self._loop is None:
            self._coroutine.close()

    def abandon(self) -> None:
        """Cancel the coroutine and wait for its clean-up, unless it has ended."""
        if self._loop is None:
            # Never started; without this Python warns that it was never awaited.
            self._coroutine.close()
        elif not self._outcome.done():
            # The loop may have been closed in between: then the call has ended as well.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._cancel)
            futures.wait([self._outcome])

    def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            # Interrupted before the loop started it: it will not run.
            self._coroutine.close()
            self._outcome.cancel()

    async def _run(self) -> None:
        try:
            value = await self._coroutine
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self._outcome.set_exception(error)
        except BaseException as error:
            # Also SystemExit and KeyboardInterrupt: they would stop the loop for all callers, so
            # they go to the caller of this coroutine instead.
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(value)

    def _end(self, task: asyncio.Task[None]) -> None:
        # A task that is cancelled before its first step never enters `_run`.
        if task.cancelled():
            self._coroutine.close()
            self._outcome.set_exception(StorageClosed("this queue was closed during the call"))
