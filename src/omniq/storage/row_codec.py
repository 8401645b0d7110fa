"""How a backend stores a row: some fields in columns of their own, all others together in one value.

A backend names the fields that it searches by or changes in a statement. A field that is added to
`Row` is then stored by every backend without further work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, get_type_hints

import msgspec

from omniq.clock import from_micros
from omniq.models import StoredLetter
from omniq.serialization import encode_internal, internal_decoder, lenient_decoder
from omniq.storage.row_rules import Row, copy_of

_decode_letter = lenient_decoder(StoredLetter, None)

_KNOWN_RESTS = 500

_LONGEST_KNOWN = 1_000
"""Bytes of a rest that is remembered. Longer ones have tracebacks, and no two of them are the same."""


class RowCodec:
    """Splits rows into `columns`, the body, and the rest.

    Rows that are written or read together mostly have the same rest, so some are remembered.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = tuple(columns)
        fields = {field.name: field for field in msgspec.structs.fields(Row)}
        unknown = [name for name in self.columns if name not in fields]
        if unknown:
            raise ValueError(f"a row has no field {', '.join(unknown)}")
        types = get_type_hints(Row, include_extras=True)
        rest = [name for name in fields if name not in self.columns and name != "body"]
        # With the shortest keys: these bytes are stored with every task.
        self._kind = msgspec.defstruct(
            "RowRest",
            [(name, types[name], _default(fields[name])) for name in rest],
            omit_defaults=True,
            gc=False,
        )
        self._rest = _getter(rest)
        self._rest_names = rest
        self._defaults = tuple(_default(fields[name]) for name in rest)
        self._values = _getter(self.columns)
        self._decode = internal_decoder(self._kind)
        self._last_written = (self._defaults, b"")
        self._read = lru_cache(_KNOWN_RESTS)(self._blank)

    def values(self, row: Row) -> tuple[Any, ...]:
        """The values of the columns."""
        return self._values(row)

    def rest(self, row: Row) -> bytes:
        """All other fields but the body, encoded; empty when all have their defaults."""
        values = self._rest(row)
        known, encoded = self._last_written
        if values != known:
            is_default = values == self._defaults
            encoded = b"" if is_default else encode_internal(self._kind(*values))
            self._last_written = (values, encoded)
        return encoded

    def row(self, values: Sequence[Any], rest: bytes, body: bytes = b"") -> Row:
        """The row with these values of the columns; `SerializationError` if `rest` is damaged."""
        row = self.without_columns(rest)
        for name, value in zip(self.columns, values, strict=True):
            setattr(row, name, value)
        row.body = body
        return row

    def without_columns(self, rest: bytes) -> Row:
        """A row with the fields of `rest`; the caller sets all columns and the body."""
        if len(rest) > _LONGEST_KNOWN:
            return self._blank(rest)
        return copy_of(self._read(rest))

    def _blank(self, rest: bytes) -> Row:
        row = Row(id="", queue="", priority=0, func_path="", due=0, visible=0, created_at=0)
        if rest:
            values = self._rest(self._decode(rest))
            for name, value, default in zip(self._rest_names, values, self._defaults, strict=True):
                if value is not default:
                    setattr(row, name, value)
        return row


def letter_of(data: bytes, task_id: str, func_path: str) -> StoredLetter:
    """The stored dead letter of that task; one that cannot be decoded is shown as damaged, alone."""
    letter = _decode_letter(data)
    if letter is None or letter.task_id != task_id:
        return damaged_letter(task_id, func_path)
    return letter


def damaged_letter(task_id: str, func_path: str) -> StoredLetter:
    """A dead letter of which nothing else can be read. It can be retried and deleted like any other."""
    return StoredLetter(
        task_id=task_id,
        func_path=func_path,
        failure_reason="damaged",
        attempt_count=0,
        first_failure=from_micros(0),
        last_failure=from_micros(0),
        error_details="the stored dead letter cannot be read",
        is_verified=False,
    )


def _getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that returns these attributes; for many names several times faster than `attrgetter`."""
    values = ", ".join(f"each.{name}" for name in names)
    getter: Callable[[Any], tuple[Any, ...]] = eval(f"lambda each: ({values},)")
    return getter


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default is _NO_DEFAULT:
        raise ValueError(f"{field.name} has no default: it must be a column")
    return field.default


_NO_DEFAULT = msgspec.NODEFAULT
