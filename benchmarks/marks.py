"""The mark that a task leaves when it starts: how often it ran, and when, whoever ran it.

Marks live in a file that producer, workers and harness map into memory, so that one look tells
what has happened in all of them. A mark costs well under a microsecond. Only the standard library
is used: peers run this in environments of their own.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

CAPACITY = 1_200_000
_TIME = struct.Struct("q")
_SIZE = CAPACITY * (1 + _TIME.size)


class Marks:
    """The counts of all tasks, then the times of their newest starts."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, _SIZE)
        self._map = mmap.mmap(descriptor, _SIZE)
        os.close(descriptor)

    def leave(self, number: int) -> None:
        """Task `number` starts now. Two that mark one number at once may count as one."""
        self._map[number] += 1
        _TIME.pack_into(self._map, CAPACITY + _TIME.size * number, time.monotonic_ns())

    def clear(self) -> None:
        self._map[:] = bytes(_SIZE)

    def has(self, number: int) -> bool:
        return self._map[number] > 0

    def started_at(self, number: int) -> int:
        """When it started, in nanoseconds of the monotonic clock."""
        return int(_TIME.unpack_from(self._map, CAPACITY + _TIME.size * number)[0])

    def ran(self, count: int) -> int:
        """How many of the first `count` tasks have started."""
        return count - self._map[:count].count(0)

    def doubled(self, count: int) -> int:
        """How many of them have started more than once."""
        counts = self._map[:count]
        return count - counts.count(0) - counts.count(1)

    def times(self, count: int) -> list[int]:
        """When those that started did, in order."""
        all_times = struct.unpack_from(f"{count}q", self._map, CAPACITY)
        return sorted(each for each in all_times if each)
