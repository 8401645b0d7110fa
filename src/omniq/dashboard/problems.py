"""The problems that an operator should act on: one line per cause, the worst first, with a link to the page."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Literal
from urllib.parse import quote, urlencode

import msgspec

from omniq.dashboard.sampler import Snapshot
from omniq.operations.formatting import count_of, format_duration
from omniq.operations.health import describe_unrunnable
from omniq.operations.overview import Overview

Severity = Literal["critical", "warning", "note"]

_ORDER: dict[Severity, int] = {"critical": 0, "warning": 1, "note": 2}
_OVERDUE = timedelta(minutes=2)
_STORM = 0.5
"""The fraction of retried runs from which on it is called a retry storm."""

_STORM_RATE = 0.2


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A problem, the page about it, and optionally a button that solves it."""

    severity: Severity
    text: str
    path: str
    action: str = ""
    fields: dict[str, str] = {}
    button: str = ""


def problems(snapshot: Snapshot, now: datetime) -> list[Problem]:
    """All problems, the worst first."""
    overview = snapshot.overview
    found = [
        *_workers(overview, now),
        *_unserved(overview),
        *_breakers(overview),
        *_paused(overview),
        *_runs(overview),
        *_schedules(snapshot, now),
    ]
    if overview.dead:
        text = f"{count_of(overview.dead, 'dead letter')} to retry or delete"
        found.append(Problem(severity="note", text=text, path="/dead"))
    return sorted(found, key=lambda each: _ORDER[each.severity])


def _workers(overview: Overview, now: datetime) -> Iterator[Problem]:
    for worker in overview.workers:
        if not worker.stalled:
            continue
        name = f"worker {worker.host} process {worker.pid}"
        if worker.late:
            silence = format_duration((now - worker.last_heartbeat).total_seconds())
            held = count_of(len(worker.running), "task")
            text = f"{name} has sent no heartbeat for {silence}: killed, suspended or cut off, with {held}"
        else:
            text = f"{name}: event loop blocked"
        yield Problem(severity="critical", text=text, path=f"/workers/{worker.id}")


def _unserved(overview: Overview) -> Iterator[Problem]:
    lines = [line for line in overview.queues if line.waiting and not line.workers]
    if lines and not overview.workers:
        waiting = sum(line.waiting for line in lines)
        text = f"no worker is alive: {count_of(waiting, 'task')} in {count_of(len(lines), 'queue')}"
        yield Problem(severity="critical", text=text, path="/workers")
        return
    for line in lines:
        text = f"queue {line.name}: {count_of(line.waiting, 'task')} and no worker serves it"
        if line.paused:
            text += "; it is paused too"
        yield Problem(severity="critical", text=text, path=_queue_path(line.name))
    for function in overview.unrunnable:
        path = f"/tasks?{urlencode({'q': f'fn:{function.func_path}'})}"
        yield Problem(severity="critical", text=describe_unrunnable(function), path=path)


def _breakers(overview: Overview) -> Iterator[Problem]:
    for breaker in overview.breakers:
        if breaker.state != "closed":
            yield Problem(
                severity="warning",
                text=f"breaker {breaker.name} is {breaker.state}: {breaker.reason}",
                path="/limits",
                action="breakers/close",
                fields={"name": breaker.name},
                button="Close",
            )


def _paused(overview: Overview) -> Iterator[Problem]:
    for line in overview.queues:
        if line.paused and line.waiting and (line.workers or not overview.workers):
            yield Problem(
                severity="note",
                text=f"queue {line.name} is paused and has {count_of(line.waiting, 'task')}",
                path=_queue_path(line.name),
                action="queues/resume",
                fields={"queue": line.name},
                button="Resume",
            )


def _runs(overview: Overview) -> Iterator[Problem]:
    rates = overview.rates
    if rates is None:
        return
    runs = rates.finished + rates.retried
    if rates.retried > _STORM_RATE and rates.retried / runs >= _STORM:
        text = f"{rates.retried / runs:.0%} of all runs fail and are retried"
        yield Problem(severity="warning", text=text, path="/functions?sort=errors&range=15m")


def _schedules(snapshot: Snapshot, now: datetime) -> Iterator[Problem]:
    for schedule in snapshot.schedules:
        if schedule.next_at and not schedule.paused and now - schedule.next_at > _OVERDUE:
            late = format_duration((now - schedule.next_at).total_seconds())
            text = f"schedule {schedule.id} is overdue by {late}"
            yield Problem(severity="warning", text=text, path=f"/schedules#{schedule.id}")


def _queue_path(name: str) -> str:
    return f"/queues/{quote(name, safe='')}"
