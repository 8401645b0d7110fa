"""I10, I11, I13 and I18: not early, each nominal time once, in order, and done in the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from chaos.story import NEVER, Story, TaskStory
from chaos.verdict import Verdict, Violation

if TYPE_CHECKING:
    from chaos.checker import Promises

_TICK = 0.001


def nothing_is_early(story: Story, promises: Promises, _: Verdict) -> Iterator[Violation]:
    """I10. No run begins before the time for which it was enqueued."""
    for task in story:
        eta = task.plan.eta if task.plan is not None else 0.0
        first = min((event.at for event in task.starts.values()), default=NEVER)
        if first < eta - _TICK - promises.skew:
            yield Violation("I10", task.id, f"started {eta - first:.3f} s early")


def schedules_fire_once(story: Story, promises: Promises, _: Verdict) -> Iterator[Violation]:
    """I11. The tasks of a schedule are those of its nominal times, one for each."""
    for schedule_id, due in story.schedules.items():
        fired = story.fired.get(schedule_id, {})
        for nominal, ids in fired.items():
            if len(ids) > 1:
                yield Violation("I11", schedule_id, f"{nominal}: fired as {sorted(ids)}")
        for nominal, task_id in due.items():
            task = story.tasks[task_id]
            if task.final is None and not (promises.forgets and task.has_ended):
                yield Violation("I11", schedule_id, f"{nominal}: has no task")
        for nominal in sorted(set(fired) - set(due)):
            if due and min(due) <= nominal <= max(due):
                yield Violation("I11", schedule_id, f"{nominal}: is not one of its times")


def sequences_keep_their_order(story: Story, _: Promises, __: Verdict) -> Iterator[Violation]:
    """I13. First claims of a sequence, where the store was watched, are in order of enqueue."""
    sequences: dict[str, list[TaskStory]] = defaultdict(list)
    for task in story:
        if task.plan is not None and task.plan.sequence and 1 in task.stored:
            sequences[task.plan.sequence].append(task)
    for tasks in sequences.values():
        tasks.sort(key=lambda task: task.tried_at)
        for first, second in pairwise(tasks):
            if first.kept_at < second.tried_at and second.claimed_at(1) < first.claimed_at(1):
                yield Violation("I13", second.id, f"was claimed before {first.id}")


def the_queue_drains(story: Story, promises: Promises, _: Verdict) -> Iterator[Violation]:
    """I18. After the last fault everything ends, and soon."""
    if promises.drain is None or story.calm_at == NEVER:
        return
    last = max((event.at for task in story for event in task.ends.values()), default=0.0)
    if last > story.calm_at + promises.drain:
        yield Violation(
            "I18", "queue", f"drained {last - story.calm_at:.1f} s after the last fault"
        )
