"""Tasks and all other stored values as plain data for JSON. The keys are stable.

`JsonRecord` is the base of the models that web frameworks can return as they are.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Set
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

import msgspec

from omniq.text.masking import is_secret_name, mask_text

REDACTED = "[redacted]"

_MAX_REPR = 1000
_MAX_DEPTH = 64


def plain(value: Any, depth: int = 0) -> Any:
    """Convert the value to dictionaries, lists, text and numbers, which JSON can hold.

    A record has all its fields, also empty ones, under the names they are stored with. Times are
    ISO 8601, bytes base64, durations seconds; any other value, and one that is nested too deeply,
    is its `repr`, cut to a maximum length.

    >>> plain({"at": datetime(2026, 1, 1), "raw": b"ab", 1: (1.5, math.inf)})
    {'at': '2026-01-01T00:00:00', 'raw': 'YWI=', '1': [1.5, 'inf']}
    """
    match value:
        case None | bool():
            return value
        case int():
            # Python refuses to convert integers of more than 4,300 digits to text.
            return value if value.bit_length() < 14_000 else f"{value:#x}"[:_MAX_REPR]
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
        case _ if depth > _MAX_DEPTH:
            return _bounded_repr(value)
        case Exception() if hasattr(value, "to_record"):
            return plain(value.to_record(), depth + 1)
        case msgspec.Struct():
            names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
            fields = {key: plain(getattr(value, name), depth + 1) for key, name in names}
            return value._as_json(fields) if isinstance(value, JsonRecord) else fields
        case Mapping():
            return {_key(key): plain(item, depth + 1) for key, item in value.items()}
        case list() | tuple():
            return [plain(item, depth + 1) for item in value]
        case Set():
            return sorted((plain(item, depth + 1) for item in value), key=repr)
        case _:
            return _bounded_repr(value)


def redacted(value: Any) -> Any:
    """The value, with `[redacted]` for every item whose key looks like the name of a secret.

    >>> redacted({"user": "ada", "password": "x", "headers": [{"Authorization": "Bearer y"}]})
    {'user': 'ada', 'password': '[redacted]', 'headers': [{'Authorization': '[redacted]'}]}
    """
    match value:
        case Mapping():
            return {
                key: REDACTED if is_secret_name(str(key)) else redacted(item)
                for key, item in value.items()
            }
        case list() | tuple():
            return [redacted(item) for item in value]
        case set() | frozenset():
            return type(value)(map(redacted, value))
        case str():
            return mask_text(value)
        case bytes() | bytearray():
            text = value.decode("utf-8", "surrogateescape")
            masked = mask_text(text)
            return value if masked == text else masked.encode("utf-8", "surrogateescape")
        case _:
            return value


class JsonRecord:
    """A record that is JSON for a web framework: FastAPI, pydantic and `dict()` can read it."""

    __slots__ = ()

    def _as_json(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The stored fields, with those that only JSON has."""
        return fields

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as values for JSON."""
        fields: dict[str, Any] = plain(self)
        return fields

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """The items of `as_dict`, so that `dict(record)` works, as it does with models of pydantic."""
        return iter(self.as_dict().items())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        # Called by pydantic alone, which brings this module.
        from pydantic_core import core_schema

        written = core_schema.plain_serializer_function_ser_schema(
            cls.as_dict, return_schema=core_schema.dict_schema()
        )
        return core_schema.is_instance_schema(cls, serialization=written)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        return {"type": "object", "title": cls.__name__}


def _key(key: object) -> str:
    text = plain(key)
    return text if isinstance(text, str) else str(text)


def _bounded_repr(value: object) -> str:
    try:
        text = repr(value)
    except Exception:
        # `__repr__` is user code.
        text = f"<{type(value).__name__}>"
    return plain(text[:_MAX_REPR])  # type: ignore[no-any-return]
