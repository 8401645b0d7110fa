"""Durations, instants and counts as text for people, on a terminal and on a page."""

from __future__ import annotations

import re
import shlex
from datetime import UTC, datetime

from omniq.models import DeadLetter, Task, timeout_of

_ERROR_NAME = re.compile(r"[\w.]+: ")
_UNITS = ((604_800, "w"), (86_400, "d"), (3_600, "h"), (60, "m"))


def timeout_text(task: Task) -> str:
    """The timeout that the task was given; empty if it was given none."""
    if task.timeout is None:
        return ""
    timeout = timeout_of(task, None)
    return "none" if timeout is None else format_duration(timeout)


def format_duration(seconds: float) -> str:
    """A duration in one or two units.

    >>> [format_duration(seconds) for seconds in (0.0042, 7, 90, 7_500, 200_000)]
    ['4 ms', '7.0 s', '1m 30s', '2h 5m', '2d 7h']
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for size, unit in _UNITS:
        if whole >= size:
            remainder = whole % size
            next_size, next_unit = _next_smaller_unit(size)
            return f"{whole // size}{unit} {remainder // next_size}{next_unit}"
    return f"{whole} s"


def _next_smaller_unit(size: int) -> tuple[int, str]:
    smaller = [(seconds, unit) for seconds, unit in (*_UNITS, (1, "s")) if seconds < size]
    return smaller[0]


def format_instant(instant: datetime | None) -> str:
    """An instant to the second, in UTC; empty for None.

    >>> format_instant(datetime(2026, 1, 31, 12, 0, 5, tzinfo=UTC))
    '2026-01-31 12:00:05Z'
    """
    if instant is None:
        return ""
    return instant.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def relative_time(instant: datetime | None, now: datetime) -> str:
    """The distance of an instant from now; empty for None.

    >>> now = datetime(2026, 1, 1, tzinfo=UTC)
    >>> relative_time(datetime(2026, 1, 1, 1, tzinfo=UTC), now), relative_time(now, now)
    ('in 1h 0m', 'now')
    """
    if instant is None:
        return ""
    seconds = (instant - now).total_seconds()
    if abs(seconds) < 1:
        return "now"
    return f"in {format_duration(seconds)}" if seconds > 0 else f"{format_duration(-seconds)} ago"


def error_line(details: str) -> str:
    """The line of a traceback that names the error.

    >>> error_line("Traceback (most recent call last):\\n  File …\\nValueError: two\\nlines\\n")
    'ValueError: two'
    """
    lines = details.strip().splitlines()
    named = [line for line in lines if _ERROR_NAME.match(line)]
    return (named or lines or [""])[-1]


def letter_line(letter: DeadLetter) -> str:
    """The line that names the error of a dead letter, and whether anyone may have written it."""
    line = error_line(letter.error_details)
    return line if letter.is_verified else f"not verified: {line}"


def count_of(number: int, one: str, many: str = "") -> str:
    """A number with its noun in the singular or plural.

    >>> count_of(1, "task"), count_of(2, "task"), count_of(0, "dead letter")
    ('1 task', '2 tasks', '0 dead letters')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def as_argument(text: str) -> str:
    """The text as one argument of a shell command that is shown to be copied, never as an option.

    >>> print(as_argument("mail"), as_argument("a;b"), as_argument("-x"))
    mail 'a;b' -- -x
    """
    quoted = shlex.quote(text)
    return f"-- {quoted}" if text.startswith("-") else quoted
