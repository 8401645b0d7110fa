"""Keeps a worker's lease from a thread of its own, so that a blocked event loop loses nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from omniq.errors import LeaseLost, OmniqError
from omniq.storage.base import BaseStorage, Renewal

_BEATS_PER_LEASE = 3
_RETRIES_PER_BEAT = 10


class Heartbeat:
    """Renews the lease every third of it, over a connection and an event loop of its own."""

    def __init__(
        self,
        storage: BaseStorage,
        *,
        lease: float,
        concurrency: int,
        queues: tuple[str, ...],
        on_renewal: Callable[[Renewal], None],
        on_loss: Callable[[], None],
        may_beat: Callable[[], bool],
    ) -> None:
        self._twin = storage.twin()
        self._lease = lease
        self._concurrency = concurrency
        self._queues = queues
        self._on_renewal = on_renewal
        self._on_loss = on_loss
        self._may_beat = may_beat
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="omniq-heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to beat. The first renewal has been made by the worker itself."""
        self._thread.start()

    async def stop(self) -> None:
        """Beat no more; returns when the thread has ended."""
        if self._loop is not None and self._stopping is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stopping.set)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        asyncio.run(self._beat())

    async def _beat(self) -> None:
        self._stopping = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        async with self._twin as twin:
            pause = self._lease / _BEATS_PER_LEASE
            while not await _is_set_within(self._stopping, pause):
                # A loop that is stuck in a task past its timeout does not deserve its lease.
                if not self._may_beat():
                    self._on_loss()
                    return
                try:
                    renewal = await twin.renew(
                        lease=self._lease, concurrency=self._concurrency, queues=self._queues
                    )
                except LeaseLost:
                    self._on_loss()
                    pause = self._lease / _BEATS_PER_LEASE
                except OmniqError:
                    # The storage is away; until the lease ends it is worth asking again, often.
                    pause = self._lease / _BEATS_PER_LEASE / _RETRIES_PER_BEAT
                else:
                    self._on_renewal(renewal)
                    pause = self._lease / _BEATS_PER_LEASE


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True
