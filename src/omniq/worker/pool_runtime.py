"""One run of a pool, from its start to its stop: everything is opened, run, and closed again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

from omniq import events
from omniq.concurrency.futures import finish
from omniq.errors import LeaseLost, OmniqError, PoolStopped, StorageError
from omniq.storage.types import Renewal
from omniq.worker.drain import Drain
from omniq.worker.pool_parts import PoolContext, PoolParts
from omniq.worker.running_tasks import SHORT_GRACE

_FORCE = (SHORT_GRACE * 3, 0.25, 0.25, 0.25, 0.25)
"""Seconds that a forced stop gives to the runs, and then to each step of closing the pool."""


class PoolRuntime:
    """Claims and runs tasks on the event loop it was made in, once.

    It is one asyncio task that opens what it needs, runs the claim loop until it is to stop, and
    closes everything however it ends. Its parts report to it: it implements `PoolEvents`.
    """

    _asked_stop: asyncio.Task[bool] | None = None

    def __init__(self, context: PoolContext) -> None:
        self._storage = context.storage
        self._config = context.config
        self._events = context.events
        self._is_supervised = context.is_supervised
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._error: Exception | None = None
        self.parts = PoolParts(context, self)
        self._main = self._loop.create_task(self._run(), name="omniq-pool")

    # For the pool

    @property
    def running(self) -> bool:
        """Whether it claims tasks."""
        has_started = self._started.done() and self._started.exception() is None
        return has_started and not self.parts.stop_requested.done()

    @property
    def is_stopping(self) -> bool:
        """Whether it was stopped, or has ended by itself."""
        return self.parts.stop_requested.done()

    @property
    def has_ended(self) -> bool:
        """Whether everything it had opened is closed again, or its loop is closed with all of it."""
        return self._main.done() or self._loop.is_closed()

    @property
    def active(self) -> int:
        """How many tasks run now."""
        return 0 if self.parts.running is None else len(self.parts.running.active)

    @property
    def leaked_threads(self) -> int:
        """How many threads still run a call that was abandoned."""
        return self.parts.leaked_threads

    async def start(self) -> None:
        """Return once it claims tasks; raises when it cannot, with everything closed again."""
        try:
            await asyncio.wait((self._started,))
        except asyncio.CancelledError:
            self._main.cancel()
            await asyncio.wait((self._main,))
            raise
        if self._started.exception() is not None:
            # Closed before the caller sees the error: it may start the pool again immediately.
            await asyncio.wait((self._main,))
        self._started.result()
        if self.parts.stop_requested.done():
            raise PoolStopped("the pool was stopped before it had started")

    async def stop(self, timeout: float | None, cancel_in_flight: bool) -> bool:
        """Stop, and wait for the end; returns whether it ended by itself within `timeout`."""
        if self.has_ended:
            return True
        finish(self.parts.stop_requested)
        self.parts.wake.set()
        if cancel_in_flight and self.parts.running is not None:
            self.parts.running.stop_all("shutdown")
        in_time = await self._storage.clock.wait(self._main, timeout)
        if not in_time:
            await self._force()
        return in_time

    def is_run_by(self, task_id: str) -> bool:
        """Whether the caller is the run of that task in this pool, which then waits for the caller."""
        return self.parts.running is not None and self.parts.running.is_run_by(task_id)

    async def until_empty(self) -> int:
        """Run what is there; returns how many tasks other workers hold, as far as it has looked."""
        assert self.parts.claim_loop is not None and self.parts.maintenance is not None  # noqa: PT018
        self.parts.is_draining = True
        drain = Drain(
            self._storage,
            self._events,
            self.parts.claim_loop,
            self.parts.maintenance,
            self.parts.schedule_loop,
            self._main,
            lambda: self.running,
            self._config.queues,
        )
        return await (drain.run_with_killed() if self._is_supervised else drain.run())

    async def count_left(self) -> int:
        """How many tasks wait; reports which of their functions no live worker runs."""
        assert self.parts.claim_loop
        return await self.parts.claim_loop.count_left()

    async def wait(self) -> None:
        """Return when it has ended."""
        if not self.has_ended:
            await asyncio.wait((self._main,))

    def raise_error(self) -> None:
        """Raise the error that ended it, if one did, once."""
        error, self._error = self._error, None
        if isinstance(error, OmniqError):
            raise error
        if error is not None:
            raise PoolStopped(f"the pool died of an unexpected error: {error!r}") from error

    async def _force(self) -> None:
        """End it by force: its time is up, and the storage may not answer."""
        self.parts.was_forced = True
        if self.parts.running is not None:
            self.parts.running.stop_all("shutdown", SHORT_GRACE)
        for patience in _FORCE:
            if await self._storage.clock.wait(self._main, patience):
                return
            self._main.cancel()

    # For its parts: PoolEvents

    @property
    def is_ending(self) -> bool:
        return self._main.cancelling() > 0

    @property
    def is_recycling(self) -> bool:
        return self.parts.recycling.check()

    def on_renewal(self, renewal: Renewal, asked_at: int) -> None:
        assert self.parts.claim_loop is not None
        # In the heartbeat's thread: the pool's event loop may be blocked.
        self.parts.watch.answered(is_renewal=True)
        self.call_on_loop(self.parts.claim_loop.on_renewal, renewal, asked_at)

    def on_lease_lost(self, lost: LeaseLost) -> None:
        assert self.parts.claim_loop is not None
        self.call_on_loop(self.parts.claim_loop.on_lease_lost, lost)

    def on_heartbeat_failure(self, error: Exception) -> None:
        if type(error) is TimeoutError:
            error = StorageError(f"no answer to a renewal within {self._config.lease / 2:g} s")
        self.parts.problems.report("heartbeat", error)

    def on_stop_request(self, *, restart: bool) -> None:
        self._events.emit(events.WorkerStopRequested(owner=self._storage.owner, restart=restart))
        if not self._is_supervised:
            self.call_on_loop(self._stop_as_asked)

    def _stop_as_asked(self) -> None:
        if self.parts.stop_requested.done():
            return
        timeout = self._storage.settings.shutdown_timeout
        self._events.emit(events.WorkerStopping(owner=self._storage.owner, timeout=timeout))
        # Referenced until it ends: the event loop holds only a weak reference.
        self._asked_stop = self._loop.create_task(self.stop(timeout, False))

    def on_slots_request(self, slots: int) -> None:
        self.call_on_loop(self._resize, slots)

    def _resize(self, slots: int) -> None:
        before = self.parts.slots
        self.parts.resize(slots)
        self._events.emit(
            events.WorkerResized(owner=self._storage.owner, slots=slots, before=before)
        )

    def on_cancel(self, task_id: str) -> None:
        assert self.parts.claim_loop is not None
        self.call_on_loop(self.parts.claim_loop.on_cancel, task_id)

    def on_finished(self) -> None:
        self.parts.wake.set()

    def on_leaked_threads_change(self) -> None:
        self.parts.recycling.check()
        self.parts.wake.set()

    def call_on_loop(self, call: Callable[..., None], *args: Any) -> None:
        """Call it on the pool's event loop, from the heartbeat's or from a caller's thread."""
        # A loop that was closed under the pool has nothing to stop any more.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)

    # From start to end

    async def _run(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                await self.parts.open(stack)
                self._started.set_result(None)
                await self._run_claim_loop()
        except Exception as error:
            if self._started.done():
                self._error = self._error or error
            else:
                self._started.set_exception(error)
        finally:
            if not self._started.done():
                # Cancelled: stopped by force, or the event loop is being closed.
                self._started.set_exception(
                    PoolStopped("the pool was stopped before it had started")
                )
            # Marks the error as retrieved: the caller of `start` may have given up waiting for it.
            self._started.exception()
            finish(self.parts.stop_requested)

    async def _run_claim_loop(self) -> None:
        assert self.parts.claim_loop is not None
        try:
            await self.parts.claim_loop.run()
        except Exception as error:
            # Broken beyond repair: end, and raise the error to the caller that stops the pool.
            self._error = error
            self.parts.problems.report_final("pool", error)
        finally:
            finish(self.parts.stop_requested)
