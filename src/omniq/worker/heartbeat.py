"""Keeps a worker's lease from a thread of its own, so that a blocked event loop loses nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

from omniq._futures import finish
from omniq.errors import LeaseLost
from omniq.storage.base import BaseStorage
from omniq.storage.types import Renewal

_BEATS_PER_LEASE = 3
_LONGEST_PAUSE = 2.0
"""A renewal also says what was cancelled: that should not take a third of a long lease."""

_RETRIES_PER_BEAT = 10
_STOP_SECONDS = 2.0
"""How long the end waits for a storage that does not answer; then the thread is left to itself."""


class Heartbeat:
    """Renews the lease at least three times before it ends, over a connection of its own.

    All callbacks are called in the heartbeat's thread. `may_beat` is asked before each renewal;
    while it says no, the lease is left to run out. `is_stalled` is passed on with each. `beside` runs
    in the same thread until the end.
    """

    def __init__(
        self,
        storage: BaseStorage,
        *,
        lease: float,
        concurrency: int,
        queues: tuple[str, ...],
        on_renewal: Callable[[Renewal], None],
        on_loss: Callable[[], None],
        on_failure: Callable[[Exception], None],
        may_beat: Callable[[], bool],
        is_stalled: Callable[[], bool],
        beside: Callable[[], Awaitable[None]],
    ) -> None:
        self._sibling = storage.sibling()
        self._clock = storage.clock
        self._lease = lease
        self._pause = min(lease / _BEATS_PER_LEASE, _LONGEST_PAUSE)
        self._concurrency = concurrency
        self._queues = queues
        self._on_renewal = on_renewal
        self._on_loss = on_loss
        self._on_failure = on_failure
        self._may_beat = may_beat
        self._is_stalled = is_stalled
        self._beside = beside
        self._is_failing = False

    def start(self) -> None:
        """Begin to beat. The first renewal has been made by the worker itself."""
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Made here, so that `stop` can reach it however soon it comes.
        self._loop = asyncio.new_event_loop()
        self._stopping: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._run, name="omniq-heartbeat", daemon=True).start()

    async def stop(self) -> None:
        """Beat no more; returns when the thread has ended, or hangs on a storage that is away."""
        # It may have ended by itself, with its loop.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(finish, self._stopping)
        await self._clock.wait(self._ended, _STOP_SECONDS)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._live())
        finally:
            # The worker's loop may be closed by now, if nobody waited for this.
            with suppress(RuntimeError):
                self._ended.get_loop().call_soon_threadsafe(finish, self._ended)

    async def _live(self) -> None:
        tasks = [asyncio.ensure_future(work) for work in (self._beat(), self._guard())]
        await self._stopping
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        # Closing gives nothing back; what cannot be closed goes with the process.
        with suppress(Exception):
            await self._sibling.close()

    async def _guard(self) -> None:
        """Whatever runs beside the heart must not stop it."""
        while True:
            try:
                await self._beside()
            except Exception as error:
                self._on_failure(error)
            await self._clock.sleep(self._pause)

    async def _beat(self) -> None:
        pause = self._pause
        while True:
            await self._clock.sleep(pause)
            try:
                # A loop that is stuck in a task past its timeout does not deserve its lease.
                if self._may_beat():
                    await self._renew()
            except LeaseLost:
                self._on_loss()
            except Exception as error:
                # The storage is away, or something is broken. Until the lease ends it is worth
                # asking again, often; told once, or it would be told ten times a beat.
                if not self._is_failing:
                    self._on_failure(error)
                self._is_failing = True
                pause = self._pause / _RETRIES_PER_BEAT
                continue
            self._is_failing = False
            pause = self._pause

    async def _renew(self) -> None:
        # Half a lease, so that there is time to ask again when an answer does not come at all.
        async with asyncio.timeout(self._lease / 2):
            if not self._sibling.is_open:
                await self._sibling.open()
            renewal = await self._sibling.renew(
                lease=self._lease,
                concurrency=self._concurrency,
                queues=self._queues,
                stalled=self._is_stalled(),
            )
        self._on_renewal(renewal)
