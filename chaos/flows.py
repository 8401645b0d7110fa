"""I21 and I22: no task begins before what it waits for has ended, and none is forgotten after that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from chaos.timeline import NEVER, TERMINAL, TaskTimeline, Timeline
from chaos.verdict import Verdict, Violation
from omniq.models import TaskStatus

if TYPE_CHECKING:
    from chaos.checker import Promises

_TICK = 0.001


def nothing_begins_before_its_source(
    timeline: Timeline, promises: Promises, _: Verdict
) -> Iterator[Violation]:
    """I21. A task that waits for another begins after the run with which that one ended."""
    for task, source in _waits(timeline):
        first = min((event.at for event in task.starts.values()), default=NEVER)
        ended = _first_end(source)
        if ended is not None and first < ended - _TICK - promises.skew:
            yield Violation("I21", task.id, f"began {ended - first:.3f} s before {source.id} ended")


def nothing_waits_for_what_has_ended(
    timeline: Timeline, _: Promises, __: Verdict
) -> Iterator[Violation]:
    """I22. After the run, no task that has not begun waits for one that has ended."""
    for task, source in _waits(timeline):
        if task.final is None or source.final is None or task.starts:
            continue
        if task.final.status is TaskStatus.PENDING and source.final.status.is_final:
            yield Violation("I22", task.id, f"was not released by the end of {source.id}")


def _waits(timeline: Timeline) -> Iterator[tuple[TaskTimeline, TaskTimeline]]:
    for task in list(timeline):
        if task.plan is not None and task.plan.after:
            source = timeline.tasks.get(task.plan.after)
            if source is not None and not source.dead_retries:
                yield task, source


def _first_end(source: TaskTimeline) -> float | None:
    """When the run ended whose outcome was final; None if that was not observed.

    A task that writes in a transaction ends with its commit, which is after the start of its run and
    before its function returns.
    """
    is_in_transaction = source.plan is not None and source.plan.writes
    observed = source.starts if is_in_transaction else source.ends
    ends = [
        observed[token].at
        for token, events in source.outcomes.items()
        if token in observed and any(event.what in TERMINAL for event in events)
    ]
    return min(ends, default=None)
