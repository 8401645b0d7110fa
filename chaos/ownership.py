"""I4 to I7 and I9: one owner at a time, the old ones refused, the dead ones replaced."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from chaos.history import Event
from chaos.story import NEVER, OUTCOMES, Story, TaskStory
from chaos.verdict import Verdict, Violation, percentile

if TYPE_CHECKING:
    from chaos.checker import Promises

_TICK = 0.001
"""Clocks are read before and after what they time: so much is not a contradiction."""


def claims_are_exclusive(story: Story, _: Promises, __: Verdict) -> Iterator[Violation]:
    """I4, I5. A claim is one owner's, is made once, and every next one is later."""
    for task in story:
        for token, claims in task.claims.items():
            if len({(event.by, event.owner) for event in claims}) > 1:
                yield Violation("I5", task.id, f"claim {token} was given to two owners")
        for token, stored in task.stored.items():
            if len({event.owner for event in stored}) > 1:
                yield Violation("I5", task.id, f"claim {token} was given to two owners")
        for before, after in pairwise(task.tokens()):
            if task.claimed_at(after) < task.claimed_at(before) - _TICK:
                yield Violation("I4", task.id, f"claim {after} came before claim {before}")


def leases_are_disjoint(story: Story, promises: Promises, verdict: Verdict) -> Iterator[Violation]:
    """I5, I7. What runs is not claimed by another while the lease of its owner lasts."""
    for task in story:
        for before, after in pairwise(task.tokens()):
            run = task.starts.get(before)
            at = task.claimed_at(after)
            if run is None or task.end_of(before) <= at:
                continue
            owner = next((event.owner for event in task.claims.get(before, ())), "")
            if owner and story.lease_end(owner, at) > at + _TICK:
                yield Violation("I5", task.id, f"claim {after} while the lease of {before} lasted")
            yield from _zombie(story, promises, verdict, task, run, at)


def _zombie(
    story: Story, promises: Promises, verdict: Verdict, task: TaskStory, run: Event, at: float
) -> Iterator[Violation]:
    """A run that goes on beside the next one: its process stood still, or does not keep its word."""
    end = task.end_of(run.token)
    if end == NEVER or story.killed_between(run.by, run.at, at) is not None:
        return
    verdict.zombie_runs += 1
    if promises.no_zombies and not story.was_stopped(run.by, run.at, at):
        yield Violation("I7", task.id, f"claim {run.token} ran on beside the next, on {run.by}")


def stale_outcomes_are_refused(story: Story, _: Promises, __: Verdict) -> Iterator[Violation]:
    """I6. Nothing that a run came to after the next claim was made is accepted."""
    for task in story:
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
    story: Story, promises: Promises, verdict: Verdict
) -> Iterator[Violation]:
    """I9. What a killed process held is claimed again within lease, poll and a little.

    While a process is stopped (perhaps inside a write of SQLite), the server is away or the machine
    itself gives nobody any time, that is not to be expected: those are counted apart.
    """
    stalls = [
        _span(event)
        for events in story.harm.values()
        for event in events
        if event.what in ("stop", "restart", "cut", "stall")
    ]
    for task in story:
        for token, run in task.starts.items():
            took = _recovery(story, task, token, run)
            if took is None:
                continue
            killed_at, seconds = took
            is_apart = any(b <= killed_at + seconds and e >= killed_at for b, e in stalls)
            (verdict.apart if is_apart else verdict.recoveries).append(seconds)
    p99 = percentile(verdict.recoveries, 0.99)
    if promises.recovery is not None and p99 > promises.recovery:
        yield Violation("I9", "recovery", f"p99 is {p99:.2f} s, above {promises.recovery:.2f} s")


def _span(event: Event) -> tuple[float, float]:
    # These two are written down when they are over.
    begin = event.at - event.until if event.what in ("stall", "restart") else event.at
    return begin, begin + event.until


def _recovery(story: Story, task: TaskStory, token: int, run: Event) -> tuple[float, float] | None:
    """When the process of a run was killed under it, and how long it took until the next claim."""
    if token in task.ends:
        return None
    killed_at = story.killed_between(run.by, run.at, NEVER)
    following = [t for t in task.tokens() if t > token]
    if killed_at is None or not following or following[0] != token + 1:
        return None
    return killed_at, task.claimed_at(following[0]) - killed_at
