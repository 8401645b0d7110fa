"""The waits and runs of a task as bars on one time axis."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import msgspec

from omniq.operations.task_detail import TaskDetail

_MAX_RUNS = 30
_LEAST = 0.4
"""The least width of a bar in percent, so that a short run can be seen."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A wait or a run: its bar in percent of the whole time, its length, and the worker that ran it."""

    label: str
    kind: str
    x: float
    width: float
    seconds: float
    started_at: datetime
    owner: str = ""


class _Part(msgspec.Struct, frozen=True):
    label: str
    kind: str
    start: datetime
    end: datetime
    owner: str = ""


def waterfall(
    detail: TaskDetail, started: datetime | None, finished: datetime | None, now: datetime
) -> list[Span]:
    """The waits and runs of a task, in order of time; of many runs the newest. Empty before the first run."""
    parts = list(_parts(detail, started, finished, now))[-2 * _MAX_RUNS :]
    if not any(part.kind != "wait" for part in parts):
        return []
    first, last = parts[0].start, max(part.end for part in parts)
    whole = max((last - first).total_seconds(), 0.001)
    return [
        Span(
            label=part.label,
            kind=part.kind,
            x=round(min(100 * (part.start - first).total_seconds() / whole, 100 - _LEAST), 2),
            width=round(max(100 * (part.end - part.start).total_seconds() / whole, _LEAST), 2),
            seconds=(part.end - part.start).total_seconds(),
            started_at=part.start,
            owner=part.owner,
        )
        for part in parts
    ]


def _parts(
    detail: TaskDetail, started: datetime | None, finished: datetime | None, now: datetime
) -> Iterator[_Part]:
    task, free_since = detail.task, detail.task.created_at
    known = set[datetime]()
    for attempt in detail.attempts:
        if attempt.started_at is None:
            continue
        known.add(attempt.started_at)
        yield _Part("waited", "wait", free_since, max(free_since, attempt.started_at))
        yield _Part(
            f"attempt {attempt.number}: {attempt.outcome}",
            "failed",
            attempt.started_at,
            max(attempt.started_at, attempt.finished_at),
            attempt.owner or "",
        )
        free_since = attempt.finished_at
    if started is None or started in known:
        return
    yield _Part("waited", "wait", free_since, max(free_since, started))
    status = "running" if finished is None else str(task.status)
    number = task.attempts + task.crashes + 1 if detail.result is None else detail.result.attempts
    yield _Part(
        f"attempt {number}: {status}",
        status,
        started,
        max(started, finished or now),
        task.owner or "",
    )
