"""Wake-ups: notifications from other processes, over the connection of `listener`.

A storage that waits for work or for a result holds a shared advisory lock meanwhile. A storage that
enqueues or records sends a notification only if that lock is held, one for each batch. Notifications
are hints: when this connection is lost, polling still finds the work.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from math import inf
from typing import Any

from omniq.clock import Clock
from omniq.concurrency.futures import finish
from omniq.storage.postgres.connection import Target
from omniq.storage.postgres.encoding import wanted_tasks
from omniq.storage.postgres.listener import Listener
from omniq.storage.store_clock import given_time
from omniq.storage.wakeups import LocalWakeups

_RECHECK_SECONDS = 0.02
"""When to check for work again after a wait began: an enqueue that saw no lock may commit meanwhile."""

_FULL_CLAIMS_BEFORE_RELEASE = 8
"""After this many full claims in a row the worker is busy and needs no notifications of work."""

_RESULTS_LOCK_SECONDS = 1.0
"""How long the lock 'results' is held after the last wait for a result has ended."""

_MOST_LOOKED_UP = 1_000
"""Cancelled tasks that one lookup asks for, at most."""

_LOOKUP_PAUSE = 0.05
"""Seconds between two lookups of cancelled tasks."""

_INSTANT = re.compile(r"\d{1,19}")


class Wakeups:
    """Receives notifications for one storage object. Used on one event loop."""

    def __init__(self, target: Target, wakeups: LocalWakeups, clock: Clock) -> None:
        self._local_wakeups = wakeups
        self._clock = clock
        self._listener = Listener(target, clock, self._on_notification, self._wake_sleepers)
        # Task id to the number of callers that wait for its result.
        self._awaited_results: dict[str, int] = {}
        self._ended_waits = 0
        self._release_of_results: asyncio.Task[None] | None = None
        # Completed when the reason to sleep may have changed: see `_sleep`.
        self._sleepers: set[asyncio.Future[None]] = set()
        self._background: set[asyncio.Task[None]] = set()
        # The tasks that are said to be cancelled, and the task that asks the store about them.
        self._cancelled: set[str] = set()
        self._lookup: asyncio.Task[None] | None = None
        # Whether a notification of work has arrived since the last claim began.
        self._was_notified = False
        # Whether the last claim returned fewer tasks than its limit.
        self._wants_work = True
        self._full_claims_in_a_row = 0
        # When the next delayed task is due, on the server's clock.
        self._next_due: float = inf
        # The earliest that was notified since a claim or a check began, which may not have seen it.
        self._notified_due: float = inf
        # What the last claim wanted.
        self._wanted = wanted_tasks(None, None)

    # Called by claims

    def claim_started(self, wanted: tuple[Any, ...]) -> None:
        """A claim of the `wanted_tasks` begins: notifications from now on are for the next one."""
        self._was_notified = False
        self._notified_due = inf
        self._wanted = wanted

    def claim_returned(self, *, is_full: bool, next_due: int | None) -> None:
        """A claim has returned: with `limit` tasks, or with fewer, and no more until `next_due`."""
        if is_full:
            self._full_claims_in_a_row += 1
            self._wants_work = False
            if self._full_claims_in_a_row == _FULL_CLAIMS_BEFORE_RELEASE:
                self._run_in_background(self._listener.release("work"))
            return
        self._full_claims_in_a_row = 0
        self._note_due(next_due)
        self._wants_work = True
        # Later, so that the claimed tasks start first.
        asyncio.get_running_loop().call_soon(self._wake_sleepers)

    # Waiting for work

    async def wait_for_work(self, timeout: float) -> None:
        """Return when there may be work for the last claim's queues, or after `timeout` seconds."""
        clock = self._clock
        deadline = clock.monotonic() + timeout
        recheck_at = inf
        with self._local_wakeups.listen_for_work() as notified:
            # The caller has just started a claim, which is to run before this.
            await self._clock.sleep(0)
            while not (self._was_notified or notified.done()):
                needs_lock = self._wants_work and "work" not in self._listener.held_locks
                if needs_lock and clock.monotonic() >= self._listener.connect_not_before:
                    if await self._check_for_work(takes_lock=True):
                        return
                    recheck_at = clock.monotonic() + _RECHECK_SECONDS
                elif clock.monotonic() >= recheck_at:
                    recheck_at = inf
                    if await self._check_for_work(takes_lock=False):
                        return
                remaining = self._seconds_to_wait(deadline)
                if remaining <= 0:
                    return
                next_check = self._listener.connect_not_before if needs_lock else recheck_at
                await self._sleep(
                    notified, min(remaining, max(0.001, next_check - clock.monotonic()))
                )
        # Reset: the claim that follows this wait finds the work.
        self._was_notified = False

    def _seconds_to_wait(self, deadline: float) -> float:
        """Seconds until the deadline, or until the next delayed task is due if that is earlier."""
        seconds = deadline - self._clock.monotonic()
        if self._wants_work:
            until_due = (self._next_due - self._clock.micros()) / 1_000_000
            seconds = min(seconds, until_due)
        return seconds

    def _note_due(self, next_due: int | None) -> None:
        self._next_due = min(inf if next_due is None else next_due, self._notified_due)

    async def _sleep(self, notified: asyncio.Future[None], seconds: float) -> None:
        """Sleep until a local wake-up, a notification, or the return of a claim."""
        sleeper: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.add(sleeper)
        notified.add_done_callback(lambda _: finish(sleeper))
        try:
            await self._clock.wait(sleeper, seconds)
        finally:
            self._sleepers.discard(sleeper)

    async def _check_for_work(self, *, takes_lock: bool) -> bool:
        """Whether there is work to claim. First take the lock 'work', if it is not held."""
        self._notified_due = inf
        found = await self._listener.fetch_row(
            "SELECT * FROM {schema}.await_work($1, $2, $3)",
            self._wanted,
            takes_lock,
            given_time(self._clock),
        )
        if found is None:
            return False
        self._listener.held_locks.add("work")
        self._note_due(found["next_due"])
        has_work: bool = found["has_work"]
        return has_work

    def _wake_sleepers(self) -> None:
        for sleeper in self._sleepers:
            finish(sleeper)

    # Waiting for results

    @asynccontextmanager
    async def awaiting_result(self, task_id: str) -> AsyncIterator[bool]:
        """Receive a notification when the task ends; yields whether the server will send one."""
        self._awaited_results[task_id] = self._awaited_results.get(task_id, 0) + 1
        try:
            yield await self._listener.take("results")
        finally:
            self._awaited_results[task_id] -= 1
            if not self._awaited_results[task_id]:
                del self._awaited_results[task_id]
            self._ended_waits += 1
            if not self._awaited_results and (
                self._release_of_results is None or self._release_of_results.done()
            ):
                self._release_of_results = self._run_in_background(self._release_results())

    async def _release_results(self) -> None:
        """Release the lock 'results' when no result was awaited for a while."""
        while not self._awaited_results and "results" in self._listener.held_locks:
            seen = self._ended_waits
            await self._clock.sleep(_RESULTS_LOCK_SECONDS)
            if not self._awaited_results and seen == self._ended_waits:
                await self._listener.release("results")

    # Notifications

    def _on_notification(self, message: str) -> None:
        """Handle "w<visible>" (work), "r<ids>" (results; no ids: any) or "c<id>" (cancelled)."""
        kind, text = message[:1], message[1:]
        if kind == "w" and _INSTANT.fullmatch(text):
            if int(text) > self._clock.micros():
                self._next_due = min(self._next_due, int(text))
                self._notified_due = min(self._notified_due, int(text))
            else:
                self._was_notified = True
                self._local_wakeups.notify_work()
            self._wake_sleepers()
        elif kind == "r":
            ids = text.split() if text else list(self._awaited_results)
            self._local_wakeups.notify_results(ids)
        elif kind == "c" and len(self._cancelled) < _MOST_LOOKED_UP:
            self._cancelled.add(text)
            if self._lookup is None or self._lookup.done():
                self._lookup = self._run_in_background(self._look_up_cancelled())

    async def _look_up_cancelled(self) -> None:
        """Pass on which of the tasks are cancelled according to the store: a message proves nothing.

        With many messages, few lookups: what is not looked up is found at the next renewal.
        """
        while self._cancelled:
            ids, self._cancelled = self._cancelled, set()
            sql = (
                "SELECT pg_catalog.array_agg(id) FROM {schema}.live "
                "WHERE id = ANY ($1) AND cancel_requested"
            )
            found = await self._listener.fetch_row(sql, list(ids))
            for task_id in (None if found is None else found[0]) or ():
                self._local_wakeups.notify_cancelled(task_id)
            await self._clock.sleep(_LOOKUP_PAUSE)

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def close(self) -> None:
        """Stop listening and close the connection."""
        for task in list(self._background):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self._listener.close()
        self._wake_sleepers()
