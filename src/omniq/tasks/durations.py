"""Durations: turns the seconds or `timedelta` of a caller into checked seconds."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import overload

from omniq.errors import InvalidTask, InvalidValue
from omniq.models import check_seconds
from omniq.retry import UNIT_SECONDS as UNIT_SECONDS

Duration = float | timedelta
"""Seconds, or a `timedelta`."""


@overload
def seconds_of(
    name: str,
    value: Duration,
    *,
    above_zero: bool = False,
    error: type[InvalidValue] = InvalidTask,
) -> float: ...
@overload
def seconds_of(
    name: str,
    value: Duration | None,
    *,
    above_zero: bool = False,
    error: type[InvalidValue] = InvalidTask,
) -> float | None: ...
def seconds_of(
    name: str,
    value: Duration | None,
    *,
    above_zero: bool = False,
    error: type[InvalidValue] = InvalidTask,
) -> float | None:
    """Return the duration in seconds; None stays None. Raises `error` for a wrong value.

    >>> seconds_of("timeout", timedelta(minutes=1))
    60.0
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    check_seconds(name, seconds, above_zero=above_zero, error=error)
    return None if seconds is None else float(seconds)


_WRITTEN = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*([smhdw]?)")


def seconds_in(text: str) -> float:
    """The seconds of a duration that is written as `90`, `5m` or `1.5h`.

    >>> seconds_in("90"), seconds_in("5m")
    (90.0, 300.0)
    """
    found = _WRITTEN.fullmatch(text.strip())
    if found is None:
        raise InvalidValue(f"{text}: expected seconds, or a duration such as 30s, 5m or 2h")
    return float(found[1]) * UNIT_SECONDS[found[2] or "s"]


def instant_before(
    name: str,
    value: Duration | datetime,
    now: datetime,
    *,
    error: type[InvalidValue] = InvalidTask,
) -> datetime:
    """Return a datetime unchanged, or the instant that a duration lies before `now`."""
    if isinstance(value, datetime):
        return value
    seconds = seconds_of(name, value, error=error)
    if seconds is None:
        raise error(f"{name}: expected a datetime or a duration")
    return now - timedelta(seconds=seconds)
