"""I10, I11, I13 and I18: no early start, each nominal time once, order, and drain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from chaos.timeline import NEVER, TaskTimeline, Timeline
from chaos.verdict import Verdict, Violation

if TYPE_CHECKING:
    from chaos.checker import Promises

_TICK = 0.001


def nothing_is_early(timeline: Timeline, promises: Promises, _: Verdict) -> Iterator[Violation]:
    """I10. No run begins before the time for which it was enqueued."""
    for task in timeline:
        eta = task.plan.eta if task.plan is not None else 0.0
        first = min((event.at for event in task.starts.values()), default=NEVER)
        if first < eta - _TICK - promises.skew:
            yield Violation("I10", task.id, f"started {eta - first:.3f} s early")


def schedules_fire_once(timeline: Timeline, promises: Promises, _: Verdict) -> Iterator[Violation]:
    """I11. A schedule has one task for each of its nominal times, and no others."""
    for schedule_id, due in timeline.schedules.items():
        fired = timeline.fired.get(schedule_id, {})
        for nominal, ids in fired.items():
            if len(ids) > 1:
                yield Violation("I11", schedule_id, f"{nominal}: fired as {sorted(ids)}")
        for nominal, task_id in due.items():
            task = timeline.tasks[task_id]
            if task.final is None and not (promises.purges_finished and task.has_ended):
                yield Violation("I11", schedule_id, f"{nominal}: has no task")
        for nominal in sorted(set(fired) - set(due)):
            if due and min(due) <= nominal <= max(due):
                yield Violation("I11", schedule_id, f"{nominal}: is not one of its times")


def sequences_keep_their_order(timeline: Timeline, _: Promises, __: Verdict) -> Iterator[Violation]:
    """I13. First claims of a sequence, where the store was observed, are in order of enqueue."""
    sequences: dict[str, list[TaskTimeline]] = defaultdict(list)
    for task in timeline:
        if task.plan is not None and task.plan.sequence and 1 in task.stored:
            sequences[task.plan.sequence].append(task)
    for tasks in sequences.values():
        tasks.sort(key=lambda task: task.tried_at)
        for first, second in pairwise(tasks):
            if first.acknowledged_at < second.tried_at and second.claimed_at(1) < first.claimed_at(
                1
            ):
                yield Violation("I13", second.id, f"was claimed before {first.id}")


def the_queue_drains(timeline: Timeline, promises: Promises, _: Verdict) -> Iterator[Violation]:
    """I18. After the last fault every task ends within the allowed time."""
    if promises.drain is None or timeline.calm_at == NEVER:
        return
    last = max((event.at for task in timeline for event in task.ends.values()), default=0.0)
    if last > timeline.calm_at + promises.drain:
        yield Violation(
            "I18", "queue", f"drained {last - timeline.calm_at:.1f} s after the last fault"
        )
