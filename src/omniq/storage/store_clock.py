"""The clock of a store that has its own, as far as it is known here.

What a worker or a producer computes from the current time (when a retry is due, the next time of a
schedule, when a task expires) must not depend on whether its machine's wall clock is right. So a storage
on a server uses the server's time: each reply that contains it is compared with the boot clock of this
machine, which never jumps. The earliest time that a reply allows is taken, because what a caller says
is due now must not be in the store's future. A clock that the storage was given, as in tests, replaces the server's.
"""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

from omniq.clock import SYSTEM_CLOCK, Clock, from_micros

_EPOCH = from_micros(0)
_EARLIEST, _LATEST = 1_577_836_800_000_000, 32_503_680_000_000_000
"""The years 2020 and 3000: another time is that of no clock, but a part of a reply of another shape. With an earlier
one, what ends now would have expired long ago; sums with a later one would have no date."""

_PRECISE = 1_000
_FRESH = 60_000_000
"""Microseconds after which an observation is stale: the store's clock may have been set meanwhile."""


class StoreClock:
    """A `Clock` whose wall clock is the store's. Everything else is that of `clock`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset: int | None = None
        """What to add to the boot clock, at least."""

        self._highest = 0
        self._used = 0
        """What is added: the least, or this machine's own difference, if the replies allow it."""

        self._observed_at = 0
        self.boot_micros = clock.boot_micros
        self.boot_id = clock.boot_id
        self.monotonic = clock.monotonic
        self.random = clock.random
        self.new_id = clock.new_id

    def observe(self, store_micros: int, *, sent_at: int, step: int = 0) -> None:
        """Note the store's time in a reply; `sent_at` is the boot clock when the request was sent.

        `step` is the precision of that time, which is rounded down. Within a step, this machine's wall clock is
        believed: most machines have the right time, and others are off by less than a step.
        Raises `ValueError` for an impossible time.
        """
        if not _EARLIEST <= store_micros < _LATEST:
            raise ValueError(f"an impossible time of the store: {store_micros}")
        self._observed_at = received_at = self._clock.boot_micros()
        low, high = store_micros - received_at, store_micros + step - sent_at
        if self._offset is None or high < self._offset or low > self._highest:
            self._offset, self._highest = low, high
        else:
            # Several replies together say more than each of them.
            self._offset, self._highest = max(low, self._offset), min(high, self._highest)
        own = self._clock.micros() - received_at if step else 0
        self._used = min(max(own, self._offset), self._highest) if step else self._offset

    def micros(self) -> int:
        """The store's time in microseconds since 1970; before the first reply, this machine's."""
        if self._offset is None:
            return self._clock.micros()
        return self._clock.boot_micros() + self._used

    def is_rough(self) -> bool:
        """Whether the time may be wrong by more than a millisecond: replies took longer."""
        return self._offset is None or self._highest - self._offset > _PRECISE

    def is_stale(self) -> bool:
        """Whether the last reply with the store's time was long ago."""
        return self._clock.boot_micros() - self._observed_at > _FRESH

    def now(self) -> datetime:
        """The store's time, as an aware UTC datetime."""
        # Not by `from_micros`: its cache never has a new time.
        return _EPOCH + timedelta(0, 0, self.micros())

    async def sleep(self, seconds: float) -> None:
        """Wait that many seconds."""
        await self._clock.sleep(seconds)

    async def wait(self, future: asyncio.Future[None], seconds: float | None) -> bool:
        """Wait for the future, at most that long; return whether it is done."""
        return await self._clock.wait(future, seconds)


def clock_of_store(clock: Clock) -> Clock:
    """The clock of a server's store, for a storage that was made with `clock`."""
    return StoreClock(clock) if clock is SYSTEM_CLOCK else clock


def observe(clock: Clock, store_micros: int, *, sent_at: int) -> None:
    """Note the store's time in a reply, unless the storage was given a clock."""
    if isinstance(clock, StoreClock):
        clock.observe(store_micros, sent_at=sent_at)


def is_rough(clock: Clock) -> bool:
    """Whether another reading of the store's time would help."""
    return isinstance(clock, StoreClock) and clock.is_rough()


def is_stale(clock: Clock) -> bool:
    """Whether the store's time should be read again."""
    return isinstance(clock, StoreClock) and clock.is_stale()


def given_time(clock: Clock) -> int | None:
    """The time of the clock that the storage was given; None stands for the server's own."""
    return None if isinstance(clock, StoreClock) else clock.micros()


def given_boot_time(clock: Clock) -> int | None:
    """The time for leases of the clock that the storage was given; None for the server's own."""
    return None if isinstance(clock, StoreClock) else clock.boot_micros()
