"""The output of a task as people read it: text in one piece, one line for each log line, secrets hidden."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec

from omniq.operations.redaction import redacted
from omniq.storage.base import BaseStorage
from omniq.tasks.task_output import LogLevel, OutputChunk
from omniq.text.to_json import plain


class OutputPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of what is shown: where a run begins, how many chunks are left out, streamed text, a value, or a line."""

    kind: Literal["run", "missed", "text", "value", "line"]
    text: str
    at: datetime
    level: LogLevel | None = None


async def newest_output(storage: BaseStorage, task_id: str, tail: int) -> list[OutputChunk]:
    """The newest chunks of all runs of a task, at most `tail`; empty if there is no record of it."""
    page = await storage.read_output(task_id, all_runs=True, tail=tail)
    chunks: list[OutputChunk] = []
    while page is not None:
        chunks += page.chunks
        if not page.has_more or len(chunks) >= tail:
            break
        page = await storage.read_output(task_id, page.after, all_runs=True)
    return chunks


def parts_of(chunks: Sequence[OutputChunk]) -> list[OutputPart]:
    """The parts that show these chunks; consecutive texts of a run are one part."""
    parts: list[OutputPart] = []
    texts: list[str] = []

    def end_text(at: datetime) -> None:
        if texts:
            # Masked as a whole: the name of a secret and its value may be in two chunks.
            parts.append(OutputPart(kind="text", text=redacted("".join(texts)), at=at))
            texts.clear()

    at = None
    for chunk in chunks:
        text = _streamed_text(chunk)
        if at is not None and (text is None or chunk.is_first or chunk.missed):
            end_text(at)
        at = chunk.at
        parts += _before(chunk)
        if text is not None:
            texts.append(text)
        elif chunk.level is not None:
            parts.append(OutputPart(kind="line", text=_line(chunk), at=at, level=chunk.level))
        else:
            parts.append(OutputPart(kind="value", text=_shown(chunk.value), at=at))
    if at is not None:
        end_text(at)
    return parts


def _before(chunk: OutputChunk) -> Iterable[OutputPart]:
    if chunk.is_first:
        yield OutputPart(kind="run", text=f"attempt {chunk.attempt}", at=chunk.at)
    if chunk.missed:
        text = f"{chunk.missed:,} earlier chunks are not shown"
        yield OutputPart(kind="missed", text=text, at=chunk.at)


def _streamed_text(chunk: OutputChunk) -> str | None:
    if chunk.level is not None:
        return None
    if isinstance(chunk.value, bytes):
        return chunk.value.decode("utf-8", "backslashreplace")
    return chunk.value if isinstance(chunk.value, str) else None


def _line(chunk: OutputChunk) -> str:
    fields = "".join(
        f" {name}={_shown(value)}" for name, value in redacted(dict(chunk.fields)).items()
    )
    return f"{redacted(chunk.value)}{fields}"


def _shown(value: Any) -> str:
    return json.dumps(plain(redacted(value)), ensure_ascii=False)
