"""Wake-ups from other processes: a connection that listens, and says when it wants to be told.

Whoever waits for work or for a result holds a shared lock meanwhile; a storage that enqueues or
records sends a message only when somebody does, one for a batch. With this connection lost nothing
is wrong: polls find the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from math import inf
from typing import Any

from omniq._futures import finish
from omniq.clock import Clock
from omniq.errors import StorageError
from omniq.storage.postgres import statements
from omniq.storage.postgres.connection import (
    Connection,
    Target,
    close,
    is_driver_error,
    is_lost,
    settle,
)
from omniq.storage.postgres.statements import Names
from omniq.storage.wakeups import Hints

_LOOK_AGAIN = 0.02
"""Seconds after which to look once more for what was being enqueued when the wait began."""

_BUSY_CLAIMS = 8
"""So many claims in a row that got all they asked for, and nobody needs to be told of work."""

_RESULTS_KEPT = 1.0
"""Seconds for which to go on listening for results after the last one came."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


class Wakeups:
    """What one storage object hears from others. Used on one event loop."""

    def __init__(
        self, target: Target, hints: Hints, clock: Clock, now: Callable[[], int | None]
    ) -> None:
        self._target = target
        self._hints = hints
        self._clock = clock
        self._now = now
        self._names = Names(target.schema)
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()
        self._is_closed = False
        self._failures = 0
        # Behind a pooler there is nobody to listen to.
        self._not_before = inf if target.poll_only else 0.0
        self._holds: set[str] = set()
        self._waiting: dict[str, int] = {}
        self._nudges: set[asyncio.Future[None]] = set()
        self._chores: set[asyncio.Task[None]] = set()
        self._told = False
        self._is_hungry = True
        self._full_claims = 0
        self._next_due: int | None = None
        self._ahead = 0
        self._queues: list[str] | None = None

    # What claims say

    def claim_begins(self, queues: Sequence[str] | None) -> None:
        """What is told from here on is news to the claim after this one."""
        self._told = False
        self._queues = None if queues is None else list(queues)

    def claimed(self, *, is_full: bool, at: int, next_due: int | None) -> None:
        """A claim came back: with all it asked for, or there is no more until `next_due`."""
        self._ahead = at - self._clock.micros()
        if is_full:
            self._full_claims += 1
            self._is_hungry = False
            if self._full_claims == _BUSY_CLAIMS:
                self._do(self._release("work"))
            return
        self._full_claims = 0
        self._next_due = next_due
        self._is_hungry = True
        # After the tasks that were claimed have begun, which would have to wait for it otherwise.
        asyncio.get_running_loop().call_soon(self._nudge)

    # Waiting for work

    async def wait_for_work(self, timeout: float) -> None:
        """Return when there may be work for the last claim's queues, or after that many seconds."""
        clock = self._clock
        deadline = clock.monotonic() + timeout
        look_again = inf
        with self._hints.listen_for_work() as hint:
            # Whoever waits again has just asked for a claim, which should not have to wait for this.
            await self._clock.sleep(0)
            while not (self._told or hint.done()):
                is_new = self._is_hungry and "work" not in self._holds
                if is_new and clock.monotonic() >= self._not_before:
                    if await self._begin_to_wait(is_new=True):
                        return
                    look_again = clock.monotonic() + _LOOK_AGAIN
                elif clock.monotonic() >= look_again:
                    look_again = inf
                    if await self._begin_to_wait(is_new=False):
                        return
                patience = self._patience(deadline)
                if patience <= 0:
                    return
                chore_at = self._not_before if is_new else look_again
                await self._rest(hint, min(patience, max(0.001, chore_at - clock.monotonic())))
        # Told once: the claim that follows finds it, and there is no need for another.
        self._told = False

    def _patience(self, deadline: float) -> float:
        """Seconds until there is something to claim, or the wait is over."""
        patience = deadline - self._clock.monotonic()
        if self._is_hungry and self._next_due is not None:
            until_due = (self._next_due - self._ahead - self._clock.micros()) / 1_000_000
            patience = min(patience, until_due)
        return patience

    async def _rest(self, hint: asyncio.Future[None], patience: float) -> None:
        """Until the hint, or until a claim or a message has changed what there is to wait for."""
        nudge: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._nudges.add(nudge)
        hint.add_done_callback(lambda _: finish(nudge))
        try:
            await self._clock.wait(nudge, patience)
        finally:
            self._nudges.discard(nudge)

    async def _begin_to_wait(self, *, is_new: bool) -> bool:
        """Take the lock that says so, if it is new, and look whether there is work already."""
        found = await self._ask(
            "SELECT * FROM {schema}.await_work($1, $2, $3)", self._queues, is_new, self._now()
        )
        if found is None:
            return False
        self._holds.add("work")
        self._next_due = found["next_due"]
        has_work: bool = found["has_work"]
        return has_work

    def _nudge(self) -> None:
        for nudge in self._nudges:
            finish(nudge)

    # Waiting for results

    @asynccontextmanager
    async def awaiting(self, task_id: str) -> AsyncIterator[bool]:
        """Be told of the task's end while inside; whether that works."""
        self._waiting[task_id] = self._waiting.get(task_id, 0) + 1
        try:
            if "results" not in self._holds:
                sql = "SELECT pg_advisory_lock_shared({schema}.lock_key('results'))"
                if "results" not in self._holds and await self._ask(sql) is not None:
                    self._holds.add("results")
            yield "results" in self._holds
        finally:
            self._waiting[task_id] -= 1
            if not self._waiting[task_id]:
                del self._waiting[task_id]
            if not self._waiting:
                self._do(self._stop_awaiting())

    async def _stop_awaiting(self) -> None:
        await self._clock.sleep(_RESULTS_KEPT)
        if not self._waiting:
            await self._release("results")

    # The connection

    async def _ask(self, sql: str, *parameters: Any) -> Any:
        """One line from the listening connection; None when there is none just now."""
        async with self._lock:
            connection = await self._connected()
            if connection is None:
                return None
            try:
                return await connection.fetchrow(self._names(sql), *parameters)
            except Exception as error:
                if not (is_driver_error(error) or is_lost(error)):
                    raise
                # A hint less: what it was for is found by polling.
                connection.terminate()
                self._lost()
                return None

    async def _connected(self) -> Connection | None:
        if self._connection is not None and not self._connection.is_closed():
            return self._connection
        if self._is_closed or self._clock.monotonic() < self._not_before:
            return None
        try:
            connection = await self._target.connect("listener")
            await self._begin_to_listen(connection)
        except Exception as error:
            if not (isinstance(error, StorageError) or is_driver_error(error) or is_lost(error)):
                raise
            self._lost()
            return None
        connection.add_termination_listener(self._end)
        self._connection, self._failures = connection, 0
        return connection

    async def _begin_to_listen(self, connection: Connection) -> None:
        try:
            await connection.add_listener(statements.channel(self._target.schema), self._hear)
            if self._is_closed:
                raise self._target.closed()
        except BaseException:
            # Also when cancelled or closed: nobody else knows of this connection yet.
            connection.terminate()
            raise

    def _end(self, connection: Connection) -> None:
        if connection is self._connection:
            self._lost()
            self._nudge()

    def _lost(self) -> None:
        self._connection = None
        self._holds.clear()
        self._failures += 1
        longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(self._failures, 10))
        self._not_before = self._clock.monotonic() + longest * (0.5 + self._clock.random() / 2)

    def _hear(self, _connection: Any, _pid: int, _channel: str, message: str) -> None:
        kind, text = message[:1], message[1:]
        if kind == "w" and int(text) > self._clock.micros() + self._ahead:
            due = int(text)
            self._next_due = due if self._next_due is None else min(due, self._next_due)
            self._nudge()
        elif kind == "w":
            self._told = True
            self._hints.work()
            self._nudge()
        elif kind == "r":
            self._hints.results(text.split() if text else list(self._waiting))
        elif kind == "c":
            self._hints.cancelled(text)

    async def _release(self, what: str) -> None:
        if what in self._holds:
            self._holds.discard(what)
            await self._ask(f"SELECT pg_advisory_unlock_shared({{schema}}.lock_key('{what}'))")

    def _do(self, work: Any) -> None:
        chore = asyncio.get_running_loop().create_task(work)
        self._chores.add(chore)
        chore.add_done_callback(self._chores.discard)

    async def close(self) -> None:
        """Stop listening, for good."""
        self._is_closed = True
        for chore in list(self._chores):
            chore.cancel()
            with suppress(asyncio.CancelledError):
                await chore
        await settle(self._lock)
        connection, self._connection = self._connection, None
        await close(connection)
        self._nudge()
