"""Tasks and all that is kept of them as plain data that any program can read. The keys are stable."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Set
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

import msgspec

from omniq.models import TaskError

_LONGEST_REPR = 1000
_DEEPEST = 64


def plain(value: Any, depth: int = 0) -> Any:
    """The value in terms of dictionaries, lists, text and numbers that JSON can hold.

    A record has all its fields, also those that say nothing. Times are ISO 8601, bytes base64,
    durations seconds; what has no such form, or is too deep, is shown as Python would print it, bounded.

    >>> plain({"at": datetime(2026, 1, 1), "raw": b"ab", 1: (1.5, math.inf)})
    {'at': '2026-01-01T00:00:00', 'raw': 'YWI=', '1': [1.5, 'inf']}
    """
    match value:
        case None | bool():
            return value
        case int():
            # Python itself does not write out more than 4,300 digits.
            return value if value.bit_length() < 14_000 else f"{value:#x}"[:_LONGEST_REPR]
        case Enum():
            return plain(value.value)
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case float():
            return value if math.isfinite(value) else repr(value)
        case datetime():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case bytes() | bytearray():
            return base64.b64encode(value).decode()
        case _ if depth > _DEEPEST:
            return _shown(value)
        case TaskError():
            return plain(value.to_record(), depth + 1)
        case msgspec.Struct():
            fields = value.__struct_fields__
            return {name: plain(getattr(value, name), depth + 1) for name in fields}
        case Mapping():
            return {_key(key): plain(item, depth + 1) for key, item in value.items()}
        case list() | tuple():
            return [plain(item, depth + 1) for item in value]
        case Set():
            return sorted((plain(item, depth + 1) for item in value), key=repr)
        case _:
            return _shown(value)


def _key(key: object) -> str:
    text = plain(key)
    return text if isinstance(text, str) else str(text)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:
        # The repr is the user's code.
        text = f"<{type(value).__name__}>"
    return plain(text[:_LONGEST_REPR])  # type: ignore[no-any-return]
