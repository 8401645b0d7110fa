"""Sets the wall clock of every Python process that has this folder on its path, and of no other.

`WALL_CLOCK_AHEAD` is the number of seconds by which it is ahead. The clocks that count from the start of
the machine stay right, as on a machine whose time was set wrongly.
"""

from __future__ import annotations

import os
import time
from datetime import datetime, tzinfo

import omniq.clock

_AHEAD = int(os.environ["WALL_CLOCK_AHEAD"])
_real_time, _real_time_ns = time.time, time.time_ns


class _WrongDatetime:
    @staticmethod
    def now(zone: tzinfo) -> datetime:
        return datetime.fromtimestamp(time.time(), zone)


time.time = lambda: _real_time() + _AHEAD
time.time_ns = lambda: _real_time_ns() + _AHEAD * 1_000_000_000
vars(omniq.clock)["datetime"] = _WrongDatetime
