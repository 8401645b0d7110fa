"""I1 to I4, I8 and I20: no task lost or invented, one outcome each, correct counts and results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from chaos.tasks import expected_value
from chaos.timeline import NEVER, TERMINAL, TaskTimeline, Timeline
from chaos.verdict import Verdict, Violation
from omniq.models import TaskStatus

if TYPE_CHECKING:
    from chaos.checker import Promises


def nothing_is_lost(timeline: Timeline, promises: Promises, _: Verdict) -> Iterator[Violation]:
    """I1. Every acknowledged task has ended."""
    for task in timeline:
        if task.acknowledged_at == NEVER and not task.scheduled:
            continue
        if task.final is None:
            if not task.scheduled and not (promises.purges_finished and task.has_ended):
                # I11 reports a nominal time without a task.
                yield Violation("I1", task.id, "was acknowledged, and is absent")
        elif not task.final.status.is_final:
            yield Violation("I1", task.id, f"has not ended: {task.final.status.value}")


def nothing_is_invented(timeline: Timeline, _: Promises, __: Verdict) -> Iterator[Violation]:
    """I2. Every stored task was requested, and no refused task is stored."""
    for task in timeline:
        is_stored = task.final is not None or bool(task.starts)
        if is_stored and not task.is_known:
            yield Violation("I2", task.id, "was never enqueued")
        if is_stored and task.refused and task.acknowledged_at == NEVER:
            yield Violation("I2", task.id, "was refused, and is stored")


def one_outcome_each(timeline: Timeline, promises: Promises, _: Verdict) -> Iterator[Violation]:
    """I3. A task has one accepted final outcome, the right one, and nothing happens after it."""
    for task in timeline:
        ends = [
            event
            for outcomes in task.outcomes.values()
            for event in outcomes
            if event.what in TERMINAL
        ]
        if len({event.token for event in ends}) > 1 + task.dead_retries:
            yield Violation("I3", task.id, f"ended by claims {sorted({e.token for e in ends})}")
        if task.final is None:
            continue
        recorded = {event.what for event in ends}
        if (
            recorded
            and not task.dead_retries
            and _OUTCOME_OF.get(task.final.status) not in recorded
        ):
            yield Violation("I3", task.id, f"ended as {recorded}, and is {task.final.status.value}")
        yield from _compare_with_plan(task, promises)
        late = [t for t, seen in task.stored.items() if seen[0].at > task.cancelled_at]
        if late and not task.dead_retries:
            yield Violation("I3", task.id, f"claim {late[0]} although it had been cancelled")


def _compare_with_plan(task: TaskTimeline, promises: Promises) -> Iterator[Violation]:
    final, plan = task.final, task.plan
    if final is None or plan is None or not final.status.is_final:
        return
    if final.status is TaskStatus.CANCELLED:
        if not task.cancel_tried:
            yield Violation("I3", task.id, "is cancelled, without a request")
    elif final.status is not plan.expected_status and final.reason != "crashed":
        # A task that ended by too many crashes is checked in I4.
        yield Violation(
            "I3", task.id, f"is {final.status.value}, and {plan.expected_status.value} was expected"
        )
    if final.crashes > promises.max_crashes:
        yield Violation("I4", task.id, f"counts {final.crashes} crashes")


def attempts_add_up(timeline: Timeline, promises: Promises, _: Verdict) -> Iterator[Violation]:
    """I4. Every failed run uses one attempt, and nothing else does."""
    for task in timeline:
        final, plan = task.final, task.plan
        if final is None or plan is None or task.dead_retries:
            # A dead letter that is retried starts with no attempts.
            continue
        failures = final.attempts
        retried = {
            t for t, events in task.outcomes.items() if any(e.what == "retried" for e in events)
        }
        raised = sum(event.value == "raised" for event in task.ends.values())
        # A run that failed after the task was cancelled uses no attempt.
        if failures < len(retried) - (final.status is TaskStatus.CANCELLED):
            yield Violation("I4", task.id, f"failed {len(retried)} times, counted {failures}")
        if failures > raised:
            yield Violation("I4", task.id, f"failed {raised} times at most, counted {failures}")
        if failures > plan.max_retries + 1:
            yield Violation("I4", task.id, f"failed {failures} times of {plan.max_retries + 1}")
        if final.reason == "crashed" and final.crashes < promises.max_crashes:
            yield Violation("I4", task.id, f"given up as crashed after {final.crashes} crashes")


def values_are_right(timeline: Timeline, _: Promises, __: Verdict) -> Iterator[Violation]:
    """I8. The result follows from the arguments and belongs to the last claim."""
    for task in timeline:
        final, plan = task.final, task.plan
        if final is None or final.status is not TaskStatus.SUCCESS or plan is None:
            continue
        if not (isinstance(final.result, list) and len(final.result) == 2):
            yield Violation("I8", task.id, f"its result is {final.result!r}")
            continue
        value, token = final.result
        run = task.starts.get(token)
        text = str(run.value) if plan.replaces and run is not None else plan.text
        if value != expected_value(task.id, text):
            yield Violation("I8", task.id, "its result does not follow from its arguments")
        newest = max([*task.tokens(), task.final_token], default=0)
        if token < newest:
            yield Violation("I6", task.id, f"has the result of claim {token}, after {newest}")


def rows_are_written_once(timeline: Timeline, _: Promises, __: Verdict) -> Iterator[Violation]:
    """I20. A task has one row from its transaction if it succeeded, and none otherwise."""
    for task in timeline:
        writes = task.plan is not None and task.plan.writes
        if task.final is not None:
            is_done = task.final.status is TaskStatus.SUCCESS
        else:
            is_done = any(e.what == "done" for events in task.outcomes.values() for e in events)
        if task.rows != int(writes and is_done):
            how = "succeeded" if is_done else "did not succeed"
            yield Violation("I20", task.id, f"{how}, and has {task.rows} rows")


_OUTCOME_OF = {
    TaskStatus.SUCCESS: "done",
    TaskStatus.FAILED: "dead",
    TaskStatus.CANCELLED: "cancelled",
}
