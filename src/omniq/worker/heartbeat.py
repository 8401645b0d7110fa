"""Renews a worker's lease from a separate thread, so that a blocked event loop does not lose it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from omniq.concurrency.futures import finish
from omniq.errors import LeaseLost
from omniq.models import Runnable
from omniq.storage.base import BaseStorage
from omniq.worker.loop_watchdog import LoopWatchdog
from omniq.worker.pool_events import PoolEvents
from omniq.worker.worker_requests import WorkerRequests

_RENEWALS_PER_LEASE = 3
_LONGEST_PAUSE = 3.0
"""A renewal also reports cancelled tasks, and requests to the worker are read with it: they should not wait
for a third of a long lease."""

_RETRIES_PER_PAUSE = 10
_STOP_SECONDS = 2.0
"""How long `stop` waits for a storage that does not answer; then the thread is abandoned."""


class Heartbeat:
    """Renews the lease at least three times before it expires, over a dedicated connection.

    It calls `pool` in the heartbeat's thread. The watchdog runs in the same thread. While its
    `may_renew` returns False, the lease is not renewed and expires.
    """

    def __init__(
        self,
        storage: BaseStorage,
        pool: PoolEvents,
        watchdog: LoopWatchdog,
        *,
        lease: float,
        concurrency: Callable[[], int],
        queues: tuple[str, ...],
        runnable: Callable[[], Runnable | None],
        requests: WorkerRequests,
        runs: Callable[[], tuple[int, int, int]],
    ) -> None:
        self._sibling = storage.sibling()
        self._register = storage.register
        self._clock = storage.clock
        self._pool = pool
        self._watchdog = watchdog
        self._lease = lease
        pause = lease / _RENEWALS_PER_LEASE
        has_slow_writes = storage.capabilities.slow_writes
        self._pause = pause if has_slow_writes else min(pause, _LONGEST_PAUSE)
        self._concurrency = concurrency
        self._queues = queues
        self._runnable = runnable
        self._requests = requests
        self._runs = runs
        self._is_failing = False

    def start(self) -> None:
        """Start the thread. The worker itself has taken the lease."""
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Made here, so that `stop` can reach it however soon it is called.
        self._loop = asyncio.new_event_loop()
        self._stopping: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._run, name="omniq-heartbeat", daemon=True).start()

    async def stop(self) -> None:
        """Stop renewing; returns when the thread has ended, or after two seconds if it hangs."""
        # The thread may have ended by itself, and closed its loop.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(finish, self._stopping)
        await self._clock.wait(self._ended, _STOP_SECONDS)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._live())
        finally:
            # The worker's loop may be closed by now, if `stop` did not wait to the end.
            with suppress(RuntimeError):
                self._ended.get_loop().call_soon_threadsafe(finish, self._ended)

    async def _live(self) -> None:
        tasks = [asyncio.ensure_future(work) for work in (self._renew_forever(), self._watch())]
        await self._stopping
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        # Closing releases nothing; a connection that cannot be closed ends with the process.
        with suppress(Exception):
            await self._sibling.close()

    async def _watch(self) -> None:
        """Run the watchdog; an error in it must not stop the renewals."""
        while True:
            try:
                await self._watchdog.watch()
            except Exception as error:
                self._pool.on_heartbeat_failure(error)
            await self._clock.sleep(self._pause)

    async def _renew_forever(self) -> None:
        pause = self._pause
        while True:
            await self._clock.sleep(pause)
            try:
                # A loop that hangs in a task past its timeout does not renew its lease.
                if self._watchdog.may_renew():
                    await self._renew()
            except LeaseLost as lost:
                self._pool.on_lease_lost(lost)
            except Exception as error:
                # The storage is unreachable, or something is broken. Until the lease expires it is
                # worth many retries; the failure is reported once, not ten times a pause.
                if not self._is_failing:
                    self._pool.on_heartbeat_failure(error)
                self._is_failing = True
                pause = self._pause / _RETRIES_PER_PAUSE
                continue
            self._is_failing = False
            pause = self._pause

    async def _renew(self) -> None:
        # Half a lease, so that there is time for a retry when no answer comes at all.
        async with asyncio.timeout(self._lease / 2):
            if not self._sibling.is_open:
                await self._sibling.open()
            asked_at = self._register.tick()
            # At the same time: a storage that commits in batches answers both in one round trip.
            renewal, failure = await asyncio.gather(
                self._sibling.renew(
                    lease=self._lease,
                    concurrency=self._concurrency(),
                    queues=self._queues,
                    stalled=self._watchdog.is_blocked(),
                    stopping=self._pool.is_stopping,
                    runnable=self._runnable(),
                    runs=self._runs(),
                ),
                self._requests.follow(self._sibling),
                return_exceptions=True,
            )
        if isinstance(renewal, BaseException):
            raise renewal
        self._pool.on_renewal(renewal, asked_at)
        if failure is not None:
            raise failure
