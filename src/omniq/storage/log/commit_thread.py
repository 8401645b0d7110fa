"""A thread that runs the calls of one process on its replica, and commits their changes.

All calls that wait are run one after the other, and their changes are appended as one commit. Calls
that arrive during the append wait for the next one: no timer delays a call. Reads wait like changes.
A call returns when the append has shown that the replica was at the end of the log; if there is nothing
to append, when the log has been read to its end after the call began.

Processes that append at the same time take turns: a process waits for its turn before it runs the waiting calls.

It is a thread, so that no lease expires while the user's event loop is blocked. Its event loop uses real time,
even if the storage uses the clock of a test.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from omniq.errors import OmniqError, StorageClosed, StorageError
from omniq.storage.log.log import Log
from omniq.storage.log.replica import Replica
from omniq.storage.log.undoable_tables import UndoableTables

_T = TypeVar("_T")

_SHORTEST_TURN = 0.001
_LATE = 4
"""After this many turns without a commit, a process reads the log first: others may have committed."""

Run = Callable[[UndoableTables, int], _T]
"""Reads and changes the tables at a time of the store. May be called again, if others commit first."""


class _Call:
    """A function to run on the tables, and the future of its result."""

    def __init__(self, run: Run[Any], *, writes: bool) -> None:
        self.writes = writes
        self.future: Future[Any] = Future()
        self._run = run
        self._result: Any = None
        self._error: Exception | None = None

    def run(self, tables: UndoableTables, now: int) -> None:
        """Run the function, and keep its result or its error."""
        self._result = self._error = None
        try:
            self._result = self._run(tables, now)
        except Exception as error:
            # Raised to the caller, which handles it.
            self._error = error

    def answer(self, failure: Exception | None = None) -> None:
        """Give the caller its result or its error; or this failure, if nothing was committed."""
        error = failure or self._error
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(self._result)


class CommitThread:
    """Runs until it is stopped. Errors of the log are raised to the callers, and it goes on."""

    def __init__(self, log: Log, replica: Replica) -> None:
        self.next_due: int | None = None
        """When the next delayed task becomes visible, as far as this process knows."""
        self._log = log
        self._replica = replica
        self._lock = threading.Lock()
        self._waiting: list[_Call] = []
        self._is_stopping = False
        self._saving: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._is_woken = asyncio.Event()
        self._never: asyncio.Future[None] = self._loop.create_future()
        self._append_seconds = 0.0
        """About how long an append takes."""
        self._number = 0
        self._moved_at = 0.0
        """When a commit was read or appended last."""
        self._looked_at = 0.0
        """When the log was read to its end last."""
        # A daemon, so that a storage that was not closed does not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="omniq-log", daemon=True)
        self._thread.start()

    async def call(self, run: Run[_T], *, writes: bool = True) -> _T:
        """Run the function on the newest state; returns its result when its changes are committed."""
        call = _Call(run, writes=writes)
        with self._lock:
            if self._is_stopping:
                raise StorageClosed("the storage was closed")
            self._waiting.append(call)
            if len(self._waiting) == 1:
                self._loop.call_soon_threadsafe(self._is_woken.set)
        result: _T = await asyncio.wrap_future(call.future)
        return result

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine that uses the log in its event loop, beside the calls."""
        with self._lock:
            if self._is_stopping:
                work.close()
                raise StorageClosed("the storage was closed")
            running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            this_task = asyncio.current_task()
            if this_task is not None and this_task.cancelling():
                raise
            # The thread has ended; this task was not cancelled.
            raise StorageClosed("the storage was closed during the call") from None

    async def stop(self) -> None:
        """Answer the calls that wait, disconnect, and end the thread."""
        with self._lock:
            self._is_stopping = True
            self._loop.call_soon_threadsafe(self._is_woken.set)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        while calls := await self._next_calls():
            try:
                await self._commit(calls)
                failure = None
            except Exception as error:
                failure = self._recover(error)
            self._note_move()
            # Before the calls return: a caller may then wait for work.
            self.next_due = self._replica.tables.next_due()
            for call in calls:
                call.answer(failure)
            if self._replica.needs_snapshot and self._saving is None:
                self._saving = asyncio.create_task(self._save(*self._replica.snapshot()))
        if self._saving is not None:
            self._saving.cancel()
        await self._log.close()

    async def _next_calls(self) -> list[_Call]:
        """Wait for calls, and return all that wait; none when the thread is to end."""
        while True:
            self._is_woken.clear()
            with self._lock:
                is_write = any(call.writes for call in self._waiting)
            if is_write:
                await self._wait_for_turn()
            with self._lock:
                waiting, self._waiting = self._waiting, []
                is_stopping = self._is_stopping
            # A call whose caller was cancelled is not run.
            calls = [call for call in waiting if call.future.set_running_or_notify_cancel()]
            if calls or is_stopping:
                return calls
            await self._is_woken.wait()

    # The order of appends

    async def _wait_for_turn(self) -> None:
        """Read the log while other processes have their turns. Calls that arrive meanwhile join the next commit."""
        replica = self._replica
        turn = max(_SHORTEST_TURN, 2 * self._append_seconds)
        try:
            while replica.is_loaded and not self._is_stopping:
                left = replica.append_order.before_own() * turn - self._since_moved()
                if left > 0:
                    replica.competes = True
                    await asyncio.wait((self._never,), timeout=min(left, turn / 2))
                elif (
                    replica.append_order.last == replica.writer
                    or self._since_looked() < _LATE * turn
                ):
                    return
                await self._follow()
        except Exception as error:
            # The next commit gets the same error, and raises it in its callers.
            self._recover(error)

    async def _follow(self) -> bool:
        is_changed = await self._replica.catch_up()
        self._looked_at = self._loop.time()
        self._note_move()
        return is_changed

    def _note_move(self) -> None:
        if self._replica.number != self._number:
            self._number = self._replica.number
            self._moved_at = self._looked_at = self._loop.time()

    def _since_moved(self) -> float:
        return self._loop.time() - self._moved_at

    def _since_looked(self) -> float:
        return self._loop.time() - self._looked_at

    async def _commit(self, calls: list[_Call]) -> None:
        """Run the calls, again and again until their answers hold."""
        replica = self._replica
        is_fresh = False
        if not replica.is_loaded:
            await self._log.open()
            await replica.load()
            is_fresh = True
        elif not any(call.writes for call in calls):
            await self._follow()
            is_fresh = True
        while True:
            now = replica.begin()
            for call in calls:
                call.run(replica.tables, now)
            if replica.is_changed:
                began = self._loop.time()
                is_won = await replica.commit()
                self._append_seconds += (self._loop.time() - began - self._append_seconds) / 5
                if is_won:
                    return
                self._note_move()
                await self._wait_for_turn()
            else:
                replica.undo()
                if is_fresh or not await self._follow():
                    return
            # The log was read to its end, after these calls were made.
            is_fresh = True

    def _recover(self, error: Exception) -> Exception:
        """Return to the committed state; returns the error for the callers."""
        if isinstance(error, OmniqError):
            self._replica.undo()
            return error
        # A defect: load the state again, instead of trusting what is left of it.
        self._replica.is_loaded = False
        failure = StorageError(f"the log: {error!r}")
        failure.__cause__ = error
        return failure

    async def _save(self, number: int, data: bytes) -> None:
        # If it fails, the next snapshot replaces it; until then, opening reads more commits.
        with suppress(StorageError):
            await self._replica.save(number, data)
        self._saving = None
