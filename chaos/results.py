"""I1 to I4, I8 and I20: nothing lost or invented, one outcome each, counted and computed right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from chaos.story import NEVER, TERMINAL, Story, TaskStory
from chaos.verdict import Verdict, Violation
from chaos.work import answer
from omniq.models import TaskStatus

if TYPE_CHECKING:
    from chaos.checker import Promises


def nothing_is_lost(story: Story, promises: Promises, _: Verdict) -> Iterator[Violation]:
    """I1. What was acknowledged has ended, in exactly one way."""
    for task in story:
        if task.kept_at == NEVER and not task.scheduled:
            continue
        if task.final is None:
            if not task.scheduled and not (promises.forgets and task.has_ended):
                # A nominal time without a task is for I11 to tell.
                yield Violation("I1", task.id, "was acknowledged, and is gone")
        elif not task.final.status.is_final:
            yield Violation("I1", task.id, f"has not ended: {task.final.status.value}")


def nothing_is_invented(story: Story, _: Promises, __: Verdict) -> Iterator[Violation]:
    """I2. What is there was wanted; what was refused is not there."""
    for task in story:
        is_there = task.final is not None or bool(task.starts)
        if is_there and not task.is_known:
            yield Violation("I2", task.id, "nobody ever enqueued it")
        if is_there and task.refused and task.kept_at == NEVER:
            yield Violation("I2", task.id, "was refused, and is there all the same")


def one_outcome_each(story: Story, promises: Promises, _: Verdict) -> Iterator[Violation]:
    """I3. One accepted end for a task, after which nothing happens to it; and the right one."""
    for task in story:
        ends = [
            event
            for outcomes in task.outcomes.values()
            for event in outcomes
            if event.what in TERMINAL
        ]
        if len({event.token for event in ends}) > 1 + task.revivals:
            yield Violation("I3", task.id, f"ended by claims {sorted({e.token for e in ends})}")
        if task.final is None:
            continue
        said = {event.what for event in ends}
        if said and not task.revivals and _WORD.get(task.final.status) not in said:
            yield Violation("I3", task.id, f"ended as {said}, and is {task.final.status.value}")
        yield from _against_its_fate(task, promises)
        late = [t for t, seen in task.stored.items() if seen[0].at > task.cancelled_at]
        if late and not task.revivals:
            yield Violation("I3", task.id, f"claim {late[0]} although it had been cancelled")


def _against_its_fate(task: TaskStory, promises: Promises) -> Iterator[Violation]:
    final, plan = task.final, task.plan
    if final is None or plan is None or not final.status.is_final:
        return
    if final.status is TaskStatus.CANCELLED:
        if not task.cancel_tried:
            yield Violation("I3", task.id, "is cancelled, which nobody asked for")
    elif final.status is not plan.fate and final.reason != "crashed":
        # A process that died of too many crashes is counted in I4.
        yield Violation("I3", task.id, f"is {final.status.value}, and {plan.fate.value} was due")
    if final.crashes > promises.max_crashes:
        yield Violation("I4", task.id, f"took {final.crashes} workers with it")


def attempts_add_up(story: Story, promises: Promises, _: Verdict) -> Iterator[Violation]:
    """I4. Every failed run is charged, once, and nothing else but a crash is."""
    for task in story:
        final, plan = task.final, task.plan
        if final is None or plan is None or task.revivals:
            # A dead letter that is retried begins to count anew.
            continue
        failures = final.attempts - final.crashes
        retried = {
            t for t, events in task.outcomes.items() if any(e.what == "retried" for e in events)
        }
        raised = sum(event.value == "raised" for event in task.ends.values())
        # A run that failed after the task was cancelled is not charged any more.
        if failures < len(retried) - (final.status is TaskStatus.CANCELLED):
            yield Violation("I4", task.id, f"failed {len(retried)} times, charged {failures}")
        if failures > raised:
            yield Violation("I4", task.id, f"failed {raised} times at most, charged {failures}")
        if failures > plan.max_retries + 1:
            yield Violation("I4", task.id, f"failed {failures} times of {plan.max_retries + 1}")
        if final.reason == "crashed" and final.crashes < promises.max_crashes:
            yield Violation("I4", task.id, f"given up as crashed after {final.crashes} crashes")


def values_are_right(story: Story, _: Promises, __: Verdict) -> Iterator[Violation]:
    """I8. The result is what follows from the arguments, and is that of the last claim."""
    for task in story:
        final, plan = task.final, task.plan
        if final is None or final.status is not TaskStatus.SUCCESS or plan is None:
            continue
        if not (isinstance(final.result, list) and len(final.result) == 2):
            yield Violation("I8", task.id, f"its result is {final.result!r}")
            continue
        value, token = final.result
        if value != answer(task.id, plan.text):
            yield Violation("I8", task.id, "its result does not follow from its arguments")
        newest = max([*task.tokens(), task.final_token], default=0)
        if token < newest:
            yield Violation("I6", task.id, f"kept the result of claim {token}, after {newest}")


def rows_are_written_once(story: Story, _: Promises, __: Verdict) -> Iterator[Violation]:
    """I20. What a task writes in its transaction is there once if it succeeded, and else is not."""
    for task in story:
        writes = task.plan is not None and task.plan.writes
        if task.final is not None:
            is_done = task.final.status is TaskStatus.SUCCESS
        else:
            is_done = any(e.what == "done" for events in task.outcomes.values() for e in events)
        if task.rows != int(writes and is_done):
            how = "succeeded" if is_done else "did not succeed"
            yield Violation("I20", task.id, f"{how}, and has {task.rows} rows")


_WORD = {
    TaskStatus.SUCCESS: "done",
    TaskStatus.FAILED: "dead",
    TaskStatus.CANCELLED: "cancelled",
}
