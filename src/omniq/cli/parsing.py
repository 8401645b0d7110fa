"""How people write durations, instants and values on the command line, and how they read them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from omniq.errors import InvalidTask
from omniq.operations.formatting import away, count_of, error_line, moment, span

__all__ = [
    "away",
    "count_of",
    "error_line",
    "instant_of",
    "json_value",
    "moment",
    "named_values",
    "seconds_of",
    "span",
]

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)?")
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


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
