"""Parses durations, instants and values of the command line. Also exports their formatting."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from omniq.errors import InvalidValue
from omniq.operations.formatting import (
    count_of,
    format_duration,
    format_instant,
    letter_line,
    relative_time,
)
from omniq.retry import Backoff, policy_from_text
from omniq.tasks.durations import UNIT_SECONDS

__all__ = [
    "count_of",
    "format_duration",
    "format_instant",
    "letter_line",
    "parse_duration",
    "parse_instant",
    "parse_json_value",
    "parse_pairs",
    "parse_retry",
    "relative_time",
]

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)?")


def parse_duration(name: str, text: str | None) -> float | None:
    """Parse a duration to seconds.

    >>> [parse_duration("--delay", text) for text in ("90", "1.5h", "7d", None)]
    [90.0, 5400.0, 604800.0, None]
    """
    if text is None:
        return None
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise InvalidValue(
            f"{name} {text}: expected seconds, or a duration such as 30s, 5m, 2h, 7d"
        )
    return float(found[1]) * UNIT_SECONDS[found[2] or "s"]


def parse_retry(name: str, text: str | None) -> Backoff | tuple[float, ...] | None:
    """Parse the delays before retries, or a backoff.

    >>> parse_retry("--retry", "10s,1m"), parse_retry("--retry", "linear(step=5s)")
    ((10.0, 60.0), LinearBackoff(step=5.0, cap=None))
    """
    if text is None:
        return None
    try:
        return policy_from_text(text)
    except ValueError:
        raise InvalidValue(
            f"{name} {text}: expected delays such as 10s,30s,1m, or a backoff such as "
            "'linear(step=5s)' or 'exponential(base=1s, cap=10m)'"
        ) from None


def parse_instant(name: str, text: str | None) -> datetime | None:
    """Parse an instant, which must have a time zone.

    >>> parse_instant("--eta", "2026-01-01T12:00Z").isoformat()
    '2026-01-01T12:00:00+00:00'
    """
    if text is None:
        return None
    try:
        instant = datetime.fromisoformat(text.strip())
    except ValueError:
        instant = None
    if instant is None or instant.utcoffset() is None:
        raise InvalidValue(
            f"{name} {text}: expected a date and time with its zone, such as 2026-01-31T12:00Z "
            "or 2026-01-31T12:00+01:00"
        )
    return instant.astimezone(UTC)


def parse_json_value(name: str, text: str) -> Any:
    """Parse an argument written as JSON."""
    try:
        return json.loads(text)
    except ValueError:
        quoted = json.dumps(text, ensure_ascii=False)
        raise InvalidValue(f"{name} {text}: not JSON; for text write '{quoted}'") from None


def parse_pairs(name: str, pairs: Sequence[str]) -> dict[str, Any]:
    """Parse options of the form `name=json`.

    >>> parse_pairs("--kwargs", ["a=1", 'b="x"'])
    {'a': 1, 'b': 'x'}
    """
    values = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator or not key:
            raise InvalidValue(f"{name} {pair}: expected name=value, the value as JSON")
        values[key] = parse_json_value(f"{name} {key}", text)
    return values
