"""How people write durations, instants and values on the command line, and how they read them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from omniq.errors import InvalidTask

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)?")
_NAMED = re.compile(r"[\w.]+: ")
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_STEPS = ((604_800, "w"), (86_400, "d"), (3_600, "h"), (60, "m"))


def seconds_of(name: str, text: str | None) -> float | None:
    """A duration as people write it, in seconds.

    >>> [seconds_of("--delay", text) for text in ("90", "1.5h", "7d", None)]
    [90.0, 5400.0, 604800.0, None]
    """
    if text is None:
        return None
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise InvalidTask(f"{name} {text}: expected seconds, or a duration such as 30s, 5m, 2h, 7d")
    return float(found[1]) * _UNITS[found[2] or "s"]


def instant_of(name: str, text: str | None) -> datetime | None:
    """An instant with its time zone.

    >>> instant_of("--eta", "2026-01-01T12:00Z").isoformat()
    '2026-01-01T12:00:00+00:00'
    """
    if text is None:
        return None
    try:
        instant = datetime.fromisoformat(text.strip())
    except ValueError:
        instant = None
    if instant is None or instant.utcoffset() is None:
        raise InvalidTask(
            f"{name} {text}: expected a date and time with its zone, such as 2026-01-31T12:00Z "
            "or 2026-01-31T12:00+01:00"
        )
    return instant.astimezone(UTC)


def json_value(name: str, text: str) -> Any:
    """The value of an argument written as JSON."""
    try:
        return json.loads(text)
    except ValueError:
        quoted = json.dumps(text, ensure_ascii=False)
        raise InvalidTask(f"{name} {text}: not JSON; for text write '{quoted}'") from None


def named_values(name: str, pairs: Sequence[str]) -> dict[str, Any]:
    """What `name=json` options say.

    >>> named_values("--kwargs", ["a=1", 'b="x"'])
    {'a': 1, 'b': 'x'}
    """
    values = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator or not key:
            raise InvalidTask(f"{name} {pair}: expected name=value, the value as JSON")
        values[key] = json_value(f"{name} {key}", text)
    return values


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
