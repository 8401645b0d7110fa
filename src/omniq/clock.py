"""Time, sleep, random numbers and ids: the only module that gets them from the operating system.

Code that needs the time takes a `Clock`. Internally an instant is an integer, microseconds since
1970 (UTC): integers compare, sort and store exactly; text and floats do not.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import threading
import time
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Protocol

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = [a + b for a in _CROCKFORD for b in _CROCKFORD]


def to_micros(instant: datetime) -> int:
    """Microseconds since 1970 of an aware datetime, exactly.

    >>> to_micros(datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC))
    1000000
    """
    if instant.tzinfo is UTC:
        return _utc_to_micros(instant)
    return (instant - _EPOCH) // _MICROSECOND


# Cached, because the tasks of one batch often have equal times. Only for UTC: in other zones the
# two datetimes of a repeated hour compare equal.
@lru_cache(maxsize=256)
def _utc_to_micros(instant: datetime) -> int:
    return (instant - _EPOCH) // _MICROSECOND


# Cached, because the tasks of one claim often have equal times.
@lru_cache(maxsize=256)
def from_micros(micros: int) -> datetime:
    """The UTC datetime of that many microseconds since 1970.

    >>> from_micros(1_000_000).isoformat()
    '1970-01-01T00:00:01+00:00'
    """
    return _EPOCH + timedelta(0, 0, micros)


def seconds_to_micros(seconds: float) -> int:
    """Whole microseconds in that many seconds.

    >>> seconds_to_micros(1.5)
    1500000
    """
    return round(seconds * 1_000_000)


class Clock(Protocol):
    """The engine's only access to time and random numbers. Tests and simulations pass another one."""

    def now(self) -> datetime:
        """The wall clock, as an aware UTC datetime."""
        ...

    def micros(self) -> int:
        """The wall clock, in microseconds since 1970."""
        ...

    def boot_micros(self) -> int:
        """A clock that all processes of this machine share; never jumps, includes suspended time."""
        ...

    def boot_id(self) -> str:
        """Identifies one boot of the machine; `boot_micros` is comparable within it."""
        ...

    def monotonic(self) -> float:
        """Seconds that never decrease, for measurements inside one process."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait that many seconds of this clock."""
        ...

    async def wait(self, future: asyncio.Future[None], seconds: float | None) -> bool:
        """Wait for the future, at most that long; return whether it is done. Does not cancel it."""
        ...

    def random(self) -> float:
        """A number in [0, 1)."""
        ...

    def new_id(self) -> str:
        """A new id of 26 characters that sorts after all earlier ids of this process."""
        ...


class SystemClock:
    """The clocks and the random numbers of the operating system."""

    def __init__(self) -> None:
        self._ids = _Ids()

    def now(self) -> datetime:
        return datetime.now(UTC)

    def micros(self) -> int:
        return time.time_ns() // 1000

    def boot_micros(self) -> int:
        return time.clock_gettime_ns(_BOOT_CLOCK) // 1000

    def boot_id(self) -> str:
        return _boot_id()

    monotonic = staticmethod(time.monotonic)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def wait(self, future: asyncio.Future[None], seconds: float | None) -> bool:
        done, _ = await asyncio.wait((future,), timeout=seconds)
        return bool(done)

    def random(self) -> float:
        return random.random()

    def new_id(self) -> str:
        return self._ids.next(time.time_ns() // 1_000_000)


class _Ids:
    """Generates ids of 48 bits of milliseconds and 80 random bits, each larger than the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._millis = -1
        self._tail = 0
        # The cached first characters of the last id; the next id usually begins with them too.
        self._high = -1
        self._start = ""
        # A forked child starts with the parent's state: without new random bits both would make
        # the same ids. The lock may have been held by a thread that the child does not have.
        os.register_at_fork(after_in_child=self._reset_after_fork)

    def _reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._tail = _fresh_tail()

    def next(self, millis: int) -> str:
        with self._lock:
            if millis > self._millis:
                self._millis = millis
                self._tail = _fresh_tail()
                self._high = -1
            else:
                # The increment need not be secret; it only has to differ between processes.
                self._tail += 1 + random.getrandbits(32)
            tail = self._tail
            if tail >> 40 != self._high:
                self._high = tail >> 40
                self._start = encode_id(self._millis, tail)[:18]
            low = tail & _LOW
            return (
                f"{self._start}{_PAIRS[low >> 30]}{_PAIRS[low >> 20 & 1023]}"
                f"{_PAIRS[low >> 10 & 1023]}{_PAIRS[low & 1023]}"
            )


def _fresh_tail() -> int:
    """79 random bits: the highest bit is left free for increments."""
    return int.from_bytes(os.urandom(10)) >> 1


def encode_id(millis: int, tail: int) -> str:
    """The 26-character id of a time and an 80-bit number.

    >>> encode_id(0, 1)
    '00000000000000000000000001'
    """
    return _text_of(millis, _HEAD_SHIFTS) + _text_of(tail, _TAIL_SHIFTS)


def _text_of(number: int, shifts: tuple[int, ...]) -> str:
    return "".join([_PAIRS[(number >> shift) & 1023] for shift in shifts])


def new_secret() -> str:
    """192 random bits as URL-safe text. Not a method of `Clock`: a seed must not determine it."""
    return secrets.token_urlsafe(24)


_LOW = (1 << 40) - 1
_HEAD_SHIFTS, _TAIL_SHIFTS = tuple(range(40, -1, -10)), tuple(range(70, -1, -10))
_BOOT_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_boot_id_cache: str | None = None


def _boot_id() -> str:
    global _boot_id_cache
    if _boot_id_cache is None:
        try:
            text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError:
            # The system has no boot id: the minute of the machine's start identifies the boot.
            text = f"boot-{round((time.time() - time.clock_gettime(_BOOT_CLOCK)) / 60)}"
        _boot_id_cache = text
    return _boot_id_cache


SYSTEM_CLOCK = SystemClock()
