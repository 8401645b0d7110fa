"""How durations, instants and numbers are worded for people, on a terminal and on a page."""

from __future__ import annotations

import re
from datetime import UTC, datetime

_NAMED = re.compile(r"[\w.]+: ")
_STEPS = ((604_800, "w"), (86_400, "d"), (3_600, "h"), (60, "m"))


def span(seconds: float) -> str:
    """How long that is, in one or two units.

    >>> [span(seconds) for seconds in (0.0042, 7, 90, 7_500, 200_000)]
    ['4 ms', '7.0 s', '1m 30s', '2h 5m', '2d 7h']
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for size, unit in _STEPS:
        if whole >= size:
            rest = whole % size
            smaller, word = _smaller(size)
            return f"{whole // size}{unit} {rest // smaller}{word}"
    return f"{whole} s"


def _smaller(size: int) -> tuple[int, str]:
    below = [(step, unit) for step, unit in (*_STEPS, (1, "s")) if step < size]
    return below[0]


def moment(instant: datetime | None) -> str:
    """An instant to the second, in UTC, or nothing.

    >>> moment(datetime(2026, 1, 31, 12, 0, 5, tzinfo=UTC))
    '2026-01-31 12:00:05Z'
    """
    if instant is None:
        return ""
    return instant.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def away(instant: datetime | None, now: datetime) -> str:
    """How far an instant is from now.

    >>> now = datetime(2026, 1, 1, tzinfo=UTC)
    >>> away(datetime(2026, 1, 1, 1, tzinfo=UTC), now), away(now, now)
    ('in 1h 0m', 'now')
    """
    if instant is None:
        return ""
    seconds = (instant - now).total_seconds()
    if abs(seconds) < 1:
        return "now"
    return f"in {span(seconds)}" if seconds > 0 else f"{span(-seconds)} ago"


def error_line(details: str) -> str:
    """The line of a traceback that names the error.

    >>> error_line("Traceback (most recent call last):\\n  File …\\nValueError: two\\nlines\\n")
    'ValueError: two'
    """
    lines = details.strip().splitlines()
    named = [line for line in lines if _NAMED.match(line)]
    return (named or lines or [""])[-1]


def count_of(number: int, one: str, many: str = "") -> str:
    """A number with its noun.

    >>> count_of(1, "task"), count_of(2, "task"), count_of(0, "dead letter")
    ('1 task', '2 tasks', '0 dead letters')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"
