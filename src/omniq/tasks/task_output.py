"""The output of tasks: what `ctx.log` and `ctx.stream` make, and what its readers get.

A chunk is encoded where the task makes it, so that a later change of the value does not matter, and decoded for
its readers. In between it is bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, get_args

import msgspec

from omniq.clock import from_micros
from omniq.errors import InvalidTask, OutputTooLarge, SerializationError
from omniq.serialization import encode_internal, internal_decoder
from omniq.text.to_json import JsonRecord

MAX_CHUNK = 65_536
"""Bytes of one encoded chunk, at most."""

_MAX_DEPTH = 64

Instant = Annotated[int, msgspec.Meta(ge=-62_135_596_800_000_000, le=253_402_300_799_999_999)]
"""Microseconds since 1970 that a `datetime` can hold; a damaged chunk may have any number."""

JsonValue = None | bool | int | float | str | Sequence["JsonValue"] | Mapping[str, "JsonValue"]
"""A value that JSON can hold."""

LogLevel = Literal["debug", "info", "warning", "error"]

_LEVELS = frozenset(get_args(LogLevel))


class OutputChunk(JsonRecord, msgspec.Struct, frozen=True, kw_only=True):
    """One chunk of the output of a task: a `value` of `ctx.stream`, or a line of `ctx.log`, which has a `level`.

    `attempt` is that of the run that made it, and `run` the fencing token of that run: a task that was released
    or has slept runs again in the same attempt. `number` counts the chunks of a run from 1. `missed` is the
    number of chunks of the run between the chunk before and this one that the reader does not get: they were
    dropped, or the reader did not ask for them. `is_first`: it is the first one of its run that the reader gets.
    """

    value: Any
    attempt: int
    run: int
    number: int
    at: datetime
    missed: int = 0
    is_first: bool = False
    level: LogLevel | None = None
    fields: Mapping[str, Any] = {}


class OutputPosition(msgspec.Struct, frozen=True):
    """How far a reader is: the run and the number of the last chunk that it has."""

    run: int
    number: int


class OutputPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some of the output of a task, in order, and the position at its end.

    `has_more`: more is stored now. `is_final`: the task has ended, and there is no more.
    """

    chunks: Sequence[OutputChunk] = ()
    after: OutputPosition | None = None
    has_more: bool = False
    is_final: bool = False


class StoredChunk(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A chunk as it is stored: when it was made, and its encoded `Line`."""

    at: Instant
    data: bytes


class OutputBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Chunks of one run of a task, in order. `first` is the number of the first one of them."""

    task_id: str
    token: int
    attempt: int
    first: int
    chunks: Sequence[StoredChunk]


class Line(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True):
    """The content of a chunk."""

    value: Any
    level: LogLevel | None = None
    fields: dict[str, Any] = {}


_decode_line = internal_decoder(Line)


def encode_chunk(value: object) -> bytes:
    """Encode a chunk of `ctx.stream`; `InvalidTask` for one that is neither text, bytes nor plain JSON data."""
    if type(value) is not str and type(value) is not bytes:
        _check_plain(value, "chunk")
    return _encoded(Line(value))


def encode_log(message: object, level: LogLevel, fields: dict[str, Any]) -> bytes:
    """Encode a line of `ctx.log`."""
    if level not in _LEVELS:
        raise InvalidTask(f"level {level!r}: expected one of {', '.join(get_args(LogLevel))}")
    _check_plain(fields, "fields")
    # A line is for people: text that is not Unicode, such as a file name, is shown as well as it can be.
    text = str(message).encode("utf-8", "backslashreplace").decode()
    return _encoded(Line(text, level, fields))


def check_encoded(data: bytes) -> None:
    """Raise `SerializationError` for what `encode_chunk` and `encode_log` cannot have made."""
    if len(data) > MAX_CHUNK:
        raise SerializationError("a chunk of output is too large")
    _decode_line(data)


def _encoded(line: Line) -> bytes:
    try:
        data = encode_internal(line)
    except (UnicodeEncodeError, OverflowError) as error:
        raise InvalidTask(f"output: it cannot be stored: {error}") from error
    if len(data) > MAX_CHUNK:
        raise OutputTooLarge(len(data), MAX_CHUNK)
    return data


def _check_plain(value: object, where: str, depth: int = 0) -> None:
    """Refuse what JSON cannot hold: readers may be other programs, without the classes of this one."""
    kind = type(value)
    if depth > _MAX_DEPTH:
        raise InvalidTask(f"{where}: nested more than {_MAX_DEPTH} deep")
    if value is None or kind is bool or kind is int or kind is float or kind is str:
        return
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]", depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                raise InvalidTask(f"{where}: the key {key!r:.100} is not text")
            _check_plain(item, f"{where}[{key[:100]!r}]", depth + 1)
    else:
        raise InvalidTask(
            f"{where}: {kind.__qualname__} is not text, bytes, or a value of JSON; convert it first"
        )


def decoded_chunk(stored: StoredChunk, run: int, attempt: int, number: int) -> OutputChunk:
    """Return the chunk as readers get it; `SerializationError` for damaged bytes."""
    line = _decode_line(stored.data)
    return OutputChunk(
        value=line.value,
        attempt=attempt,
        run=run,
        number=number,
        at=from_micros(stored.at),
        level=line.level,
        fields=line.fields,
    )
