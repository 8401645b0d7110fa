"""A clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio
import heapq
import random
from datetime import UTC, datetime, timedelta

from omniq.clock import encode_id, from_micros, to_micros
from omniq.concurrency.futures import finish

START = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)


class ManualClock:
    """A clock that only `advance` moves; ids and random numbers come from a seed.

    Sleepers wake up in the order of their deadlines when the clock passes them.
    """

    def __init__(self, start: datetime = START, *, seed: int = 0) -> None:
        self._micros = to_micros(start)
        self._boot_micros = 1_000_000_000
        self._boot = 1
        self._random = random.Random(seed)
        self._ids = 0
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []

    def advance(self, by: timedelta | float) -> None:
        """Move all clocks forward by this duration (a number is seconds)."""
        seconds = by.total_seconds() if isinstance(by, timedelta) else by
        self._micros += round(seconds * 1_000_000)
        self._boot_micros += round(seconds * 1_000_000)
        while self._sleepers and self._sleepers[0][0] <= self._boot_micros:
            _, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.get_loop().call_soon_threadsafe(finish, future)

    def jump(self, by: timedelta) -> None:
        """Set the wall clock, forward or back, as an administrator or NTP would."""
        self._micros += by // timedelta(microseconds=1)

    def reboot(self) -> None:
        """Reboot the machine: leases from before the reboot are no longer valid."""
        self._boot += 1
        self._boot_micros = 0

    def now(self) -> datetime:
        return from_micros(self._micros)

    def micros(self) -> int:
        return self._micros

    def boot_micros(self) -> int:
        return self._boot_micros

    def boot_id(self) -> str:
        return f"boot-{self._boot}"

    def monotonic(self) -> float:
        return self._boot_micros / 1_000_000

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wake_at(seconds, future)
        await future

    async def wait(self, future: asyncio.Future[None], seconds: float | None) -> bool:
        if seconds is None:
            await asyncio.wait((future,))
            return True
        alarm: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if seconds <= 0:
            await asyncio.sleep(0)
            return future.done()
        self._wake_at(seconds, alarm)
        await asyncio.wait((future, alarm), return_when=asyncio.FIRST_COMPLETED)
        alarm.cancel()
        return future.done()

    def random(self) -> float:
        return self._random.random()

    def new_id(self) -> str:
        self._ids += 1
        return encode_id(self._micros // 1000, self._ids)

    def _wake_at(self, seconds: float, future: asyncio.Future[None]) -> None:
        self._ids += 1
        deadline = self._boot_micros + round(seconds * 1_000_000)
        heapq.heappush(self._sleepers, (deadline, self._ids, future))
