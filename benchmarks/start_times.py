"""Start times in shared memory: how often and when each task started, in any process.

They are in a file that producer, workers and harness map into memory, so one read shows what
happened in all of them. Recording a start costs well under a microsecond. Only the standard library
is used, because peers run this in separate environments.
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


class StartTimes:
    """The number of starts of each task, then the time of the newest start of each."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, _SIZE)
        self._map = mmap.mmap(descriptor, _SIZE)
        os.close(descriptor)

    def record(self, number: int) -> None:
        """Record that task `number` starts now. Two concurrent starts of one task may count as one."""
        self._map[number] += 1
        _TIME.pack_into(self._map, CAPACITY + _TIME.size * number, time.monotonic_ns())

    def clear(self) -> None:
        self._map[:] = bytes(_SIZE)

    def has_started(self, number: int) -> bool:
        return self._map[number] > 0

    def started_at(self, number: int) -> int:
        """Return its start time in nanoseconds of the monotonic clock."""
        return int(_TIME.unpack_from(self._map, CAPACITY + _TIME.size * number)[0])

    def count_started(self, count: int) -> int:
        """Return how many of the first `count` tasks have started."""
        return count - self._map[:count].count(0)

    def count_repeated(self, count: int) -> int:
        """Return how many of them have started more than once."""
        counts = self._map[:count]
        return count - counts.count(0) - counts.count(1)

    def times(self, count: int) -> list[int]:
        """Return the start times of those that have started, in order."""
        all_times = struct.unpack_from(f"{count}q", self._map, CAPACITY)
        return sorted(each for each in all_times if each)
