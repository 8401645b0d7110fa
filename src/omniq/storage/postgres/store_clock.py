"""Store clock: the server's time, between its replies counted on by the local clock."""

from __future__ import annotations

from omniq.clock import SYSTEM_CLOCK, Clock


class StoreClock:
    """The time of a store. A storage that was given a clock uses that one instead of the server's."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._is_given = clock is not SYSTEM_CLOCK
        self._ahead = clock.micros() - clock.boot_micros()

    @property
    def given(self) -> int | None:
        """The time of the clock that the storage was given; None means the server's."""
        return self._clock.micros() if self._is_given else None

    @property
    def given_for_leases(self) -> int | None:
        """The time on the given clock of leases; None means the server's."""
        return self._clock.boot_micros() if self._is_given else None

    def now(self) -> int:
        """The store's time in microseconds."""
        return self._clock.micros() if self._is_given else self._clock.boot_micros() + self._ahead

    def server_said(self, at: int) -> None:
        """Note the time in a reply of the server."""
        self._ahead = at - self._clock.boot_micros()
