"""I4 to I7 and I9: one owner at a time, stale outcomes refused, dead workers replaced."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from chaos.history import Event
from chaos.timeline import NEVER, OUTCOMES, TaskTimeline, Timeline
from chaos.verdict import Verdict, Violation, percentile

if TYPE_CHECKING:
    from chaos.checker import Promises

_TICK = 0.001
"""Clocks are read before or after the event: a difference of this size is no violation."""


def claims_are_exclusive(timeline: Timeline, _: Promises, __: Verdict) -> Iterator[Violation]:
    """I4, I5. A claim has one owner, is made once, and is later than the one before."""
    for task in timeline:
        for token, claims in task.claims.items():
            if len({(event.by, event.owner) for event in claims}) > 1:
                yield Violation("I5", task.id, f"claim {token} was given to two owners")
        for token, stored in task.stored.items():
            if len({event.owner for event in stored}) > 1:
                yield Violation("I5", task.id, f"claim {token} was given to two owners")
        for before, after in pairwise(task.tokens()):
            begin, end = task.claimed_at(after), task.claimed_at(before)
            if begin < end - _TICK and not _was_noted_late(timeline, task, before, begin, end):
                yield Violation("I4", task.id, f"claim {after} came before claim {before}")


def _was_noted_late(
    timeline: Timeline, task: TaskTimeline, token: int, begin: float, end: float
) -> bool:
    """Whether the worker was stopped between its claim and its note of it, so that the note came late."""
    claims = task.claims.get(token, ())
    return token not in task.stored and any(
        timeline.was_stopped(claim.by, begin, end) for claim in claims
    )


def leases_are_disjoint(
    timeline: Timeline, promises: Promises, verdict: Verdict
) -> Iterator[Violation]:
    """I5, I7. A running task is not claimed again while the lease of its owner is valid."""
    for task in timeline:
        for before, after in pairwise(task.tokens()):
            run = task.starts.get(before)
            at = task.claimed_at(after)
            if run is None or task.end_of(before) <= at:
                continue
            owner = next((event.owner for event in task.claims.get(before, ())), "")
            if owner and timeline.lease_end(owner, at) > at + _TICK:
                yield Violation("I5", task.id, f"claim {after} while the lease of {before} lasted")
            yield from _zombie(timeline, promises, verdict, task, run, at)


def _zombie(
    timeline: Timeline,
    promises: Promises,
    verdict: Verdict,
    task: TaskTimeline,
    run: Event,
    at: float,
) -> Iterator[Violation]:
    """Check a run that overlaps with the next one: its process was stopped, or is at fault."""
    end = task.end_of(run.token)
    if end == NEVER or timeline.killed_between(run.by, run.at, at) is not None:
        return
    verdict.zombie_runs += 1
    if promises.no_zombies and not timeline.was_stopped(run.by, run.at, at):
        yield Violation(
            "I7", task.id, f"claim {run.token} ran at the same time as the next, on {run.by}"
        )


def stale_outcomes_are_refused(timeline: Timeline, _: Promises, __: Verdict) -> Iterator[Violation]:
    """I6. No outcome of a run that ended after the next claim was made is accepted."""
    for task in timeline:
        tokens = task.tokens()
        for token, outcomes in task.outcomes.items():
            accepted = next((event for event in outcomes if event.what in OUTCOMES), None)
            later = bisect_right(tokens, token)
            if accepted is None or later == len(tokens) or token not in task.ends:
                continue
            at = task.claimed_at(tokens[later])
            if task.end_of(token) > at + _TICK:
                yield Violation("I6", task.id, f"claim {token} was recorded after the next one")


def dead_workers_are_replaced(
    timeline: Timeline, promises: Promises, verdict: Verdict
) -> Iterator[Violation]:
    """I9. A killed process's tasks are claimed again within lease, poll interval and slack.

    Recoveries are counted separately while a process is stopped (perhaps inside a write of SQLite),
    the server is down, or the machine is too busy to run processes in time.
    """
    stalls = [
        _span(event)
        for events in timeline.faults_by_process.values()
        for event in events
        if event.what in ("stop", "restart", "cut", "stall")
    ]
    for task in timeline:
        for token, run in task.starts.items():
            took = _recovery(timeline, task, token, run)
            if took is None:
                continue
            killed_at, seconds = took
            is_excluded = any(b <= killed_at + seconds and e >= killed_at for b, e in stalls)
            (verdict.excluded_recoveries if is_excluded else verdict.recoveries).append(seconds)
    p99 = percentile(verdict.recoveries, 0.99)
    if promises.recovery is not None and p99 > promises.recovery:
        yield Violation("I9", "recovery", f"p99 is {p99:.2f} s, above {promises.recovery:.2f} s")


def _span(event: Event) -> tuple[float, float]:
    # These two are recorded when they are over.
    begin = event.at - event.until if event.what in ("stall", "restart") else event.at
    return begin, begin + event.until


def _recovery(
    timeline: Timeline, task: TaskTimeline, token: int, run: Event
) -> tuple[float, float] | None:
    """Return when the process of a run was killed, and the time until the next claim."""
    if token in task.ends:
        return None
    killed_at = timeline.killed_between(run.by, run.at, NEVER)
    following = [t for t in task.tokens() if t > token]
    if killed_at is None or not following or following[0] != token + 1:
        return None
    return killed_at, task.claimed_at(following[0]) - killed_at
