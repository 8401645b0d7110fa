"""The clock of a store that has its own, as far as it is known here.

What a worker or a producer computes from the current time (when a retry is due, the next time of a
schedule, when a task expires) must not depend on whether its machine's wall clock is right. So a storage
on a server uses the server's time: each reply that contains it is compared with the boot clock of this
machine, which never jumps.
"""

from __future__ import annotations

import asyncio
from datetime import datetime

from omniq.clock import Clock, from_micros

_TOLERANCE = 1_000
"""Microseconds by which two observations may differ although no clock has changed."""


class StoreClock:
    """A `Clock` whose wall clock is the store's. Everything else is that of `clock`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset: int | None = None
        self.boot_micros = clock.boot_micros
        self.boot_id = clock.boot_id
        self.monotonic = clock.monotonic
        self.random = clock.random
        self.new_id = clock.new_id

    def observe(self, store_micros: int, *, sent_at: int) -> None:
        """Note the store's time in a reply; `sent_at` is the boot clock when the request was sent."""
        received_at = self._clock.boot_micros()
        offset = store_micros - (sent_at + received_at) // 2
        uncertainty = (received_at - sent_at) // 2 + _TOLERANCE
        # Kept while it may still be right, so that the time does not go back and forth.
        if self._offset is None or abs(offset - self._offset) > uncertainty:
            self._offset = offset

    def micros(self) -> int:
        """The store's time in microseconds since 1970; before the first reply, this machine's."""
        if self._offset is None:
            return self._clock.micros()
        return self._clock.boot_micros() + self._offset

    def now(self) -> datetime:
        """The store's time, as an aware UTC datetime."""
        return from_micros(self.micros())

    async def sleep(self, seconds: float) -> None:
        """Wait that many seconds."""
        await self._clock.sleep(seconds)

    async def wait(self, future: asyncio.Future[None], seconds: float | None) -> bool:
        """Wait for the future, at most that long; return whether it is done."""
        return await self._clock.wait(future, seconds)
