"""I31 to I36: shares, sequences, units, replaced calls, batches and changed limits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING

from chaos.history import Event
from chaos.limits import run_end, runs_by
from chaos.tasks import BATCH_SIZE, WEIGHTS
from chaos.timeline import NEVER, OUTCOMES, TaskTimeline, Timeline
from chaos.verdict import Verdict, Violation
from omniq.models import TaskStatus

if TYPE_CHECKING:
    from chaos.checker import Promises

_TICK = 0.001
_PAYS = {"retried", "snoozed", "dead"}
"""Outcomes after which the next run of a task takes another turn of its key."""


@dataclass
class _Shares:
    """What the tenants have started as cost by weight, and since when two of them both wait."""

    waiting: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    started: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    unsure: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Runs of which the history does not say whether they took a turn."""
    cancelled: set[str] = field(default_factory=set)
    """Tenants that may get less: what they have not cancelled stays where it was in line."""
    begun: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)

    def follow(self) -> None:
        """Begin to compare the tenants that have begun to wait; forget those of which nothing waits."""
        pairs = combinations(sorted(key for key, ids in self.waiting.items() if ids), 2)
        self.begun = {pair: self.begun.get(pair, self._lead(*pair)) for pair in pairs}

    def _lead(self, one: str, other: str) -> tuple[float, float]:
        unsure = self.unsure[one] + self.unsure[other]
        return self.started[one] - self.started[other], unsure

    def unfair(self) -> tuple[str, str, float] | None:
        """The tenant that is ahead of another by more than it may be, and how far."""
        for (one, other), (before, unsure_before) in self.begun.items():
            lead, unsure = self._lead(one, other)
            ahead, most = lead - before, 1 / WEIGHTS[one] + 1 / WEIGHTS[other]
            most += unsure - unsure_before + 1e-6
            if ahead > most and other not in self.cancelled:
                return one, other, ahead
            if -ahead > most and one not in self.cancelled:
                return other, one, -ahead
        return None


def shares_are_kept(timeline: Timeline, _: Promises, __: Verdict) -> Iterator[Violation]:
    """I31. Where the store was observed: of tenants that wait throughout, none gets more than its share."""
    shares = _Shares()
    for event in timeline.events:
        task = timeline.tasks.get(event.id)
        if task is None or task.plan is None or not task.plan.tenant:
            continue
        tenant, was_claimed = task.plan.tenant, any(_before(task, event.at))
        match event.what:
            case "enqueue.ok" if not was_claimed:
                shares.waiting[tenant].add(task.id)
            case "cancel.try":
                shares.cancelled.add(tenant)
                shares.waiting[tenant].discard(task.id)
            case "store.claim":
                shares.follow()
                _count_start(shares, task, event)
                if (found := shares.unfair()) is not None:
                    ahead, behind, by = found
                    yield Violation("I31", task.id, f"{ahead} is {by:.2f} turns ahead of {behind}")
                    return
                shares.waiting[tenant].discard(task.id)
                shares.follow()


def _before(task: TaskTimeline, at: float) -> Iterator[int]:
    return (token for token, seen in task.stored.items() if seen[0].at <= at)


def _count_start(shares: _Shares, task: TaskTimeline, claim: Event) -> None:
    assert task.plan is not None
    tenant = task.plan.tenant
    earlier = [token for token in task.stored if token < claim.token]
    ends = {event.what for event in task.outcomes.get(max(earlier), ())} if earlier else _PAYS
    counted = shares.started if ends & _PAYS else shares.unsure
    counted[tenant] += 1 / WEIGHTS[tenant]


def sequences_are_strict(timeline: Timeline, _: Promises, __: Verdict) -> Iterator[Violation]:
    """I32. No two tasks of a sequence run at the same time, and none begins while an earlier one is left."""
    strict = runs_by(timeline, lambda task: task.plan.strict if task.plan else "")
    for key, runs in strict.items():
        for first, second in pairwise(sorted(runs)):
            if first[1] > second[0] and first[2] != second[2]:
                text = f"ran at the same time as {first[2]}, of the same sequence {key}"
                yield Violation("I32", second[2], text)
    sequences: dict[str, list[TaskTimeline]] = defaultdict(list)
    for task in timeline:
        if task.plan is not None and task.plan.strict and task.starts and not task.dead_retries:
            sequences[task.plan.strict].append(task)
    for tasks in sequences.values():
        yield from _out_of_order(timeline, tasks)


def _out_of_order(timeline: Timeline, tasks: list[TaskTimeline]) -> Iterator[Violation]:
    """The tasks that began before the last run of one that was acknowledged before they were enqueued."""
    earlier = sorted(tasks, key=attrgetter("acknowledged_at"))
    position, last = 0, Event(0.0, "", "")
    for task in sorted(tasks, key=attrgetter("tried_at")):
        while position < len(earlier) and earlier[position].acknowledged_at < task.tried_at:
            last = max(last, *earlier[position].starts.values(), key=attrgetter("at"))
            position += 1
        first = min(event.at for event in task.starts.values())
        # A process that was stopped before it noted that a run begins has noted it late.
        if first < last.at - _TICK and not timeline.was_stopped(last.by, first, last.at):
            yield Violation("I32", task.id, f"began before the last run of {last.id}")


def units_are_kept(timeline: Timeline, _: Promises, __: Verdict) -> Iterator[Violation]:
    """I33. Runs of a group take no more units than it has at any instant; one that needs more runs alone."""
    groups: dict[str, list[tuple[float, int, str, int]]] = defaultdict(list)
    widths: dict[str, int] = {}
    for task in timeline:
        plan = task.plan
        if plan is None or not plan.units or plan.span:
            continue
        widths[plan.group] = plan.width
        for token, run in task.starts.items():
            end = run_end(timeline, task, token)
            groups[plan.group] += [(run.at, 1, task.id, plan.units), (end, -1, task.id, plan.units)]
    for group, changes in groups.items():
        used = count = 0
        for at, change, task_id, units in sorted(changes):
            used, count = used + change * units, count + change
            if used > widths[group] and count > 1:
                yield Violation("I33", task_id, f"{used} units of {group} at {at:.3f}")
                break
    yield from _started_units(timeline)


def _started_units(timeline: Timeline) -> Iterator[Violation]:
    """I33. Where the store was observed: the units that were started within any span of a rate."""
    claims: dict[str, list[tuple[float, str, int]]] = defaultdict(list)
    rules: dict[str, tuple[int, float]] = {}
    for task in timeline:
        plan = task.plan
        if plan is not None and plan.units and plan.span:
            rules[plan.group] = plan.width, plan.span
            claims[plan.group] += [
                (seen[0].at, task.id, plan.units) for seen in task.stored.values()
            ]
    for group, made in claims.items():
        width, span = rules[group]
        made.sort()
        first = used = 0
        for position, (at, task_id, units) in enumerate(made):
            used += units
            while made[first][0] <= at - span + _TICK:
                used -= made[first][2]
                first += 1
            if used > width and position > first:
                yield Violation("I33", task_id, f"{used} units of {group} within {span} s")
                break


def newest_arguments_are_run(timeline: Timeline, _: Promises, __: Verdict) -> Iterator[Violation]:
    """I34. A run has no arguments that an acknowledged call had replaced, and the newest are run."""
    keys: dict[str, list[TaskTimeline]] = defaultdict(list)
    for task in timeline:
        if task.plan is not None and task.plan.replaces:
            keys[task.plan.replaces].append(task)
    for key, calls in keys.items():
        by_id = {call.id: call for call in calls}
        for call in calls:
            if call.replied_at == NEVER:
                continue
            # The call, and those that may have come after it.
            newer = {each.id for each in calls if each.replied_at > call.tried_at} | {call.id}
            holder = by_id.get(call.stands_for)
            for token, run in () if holder is None else holder.starts.items():
                if holder and _begun_at(holder, token) > call.replied_at and run.value not in newer:
                    text = f"ran with the arguments of {run.value}, which {call.id} had replaced"
                    yield Violation("I34", holder.id, text)
            all_succeeded = all(
                each.final is None or each.final.status is TaskStatus.SUCCESS for each in calls
            )
            if all_succeeded and not any(each.cancel_tried for each in calls):
                runs = (run for each in calls for run in each.starts.values())
                if not any(run.value in newer and run.at >= call.tried_at for run in runs):
                    text = (
                        f"the last call of {key} was acknowledged, and its arguments were not run"
                    )
                    yield Violation("I34", call.id, text)


def _begun_at(task: TaskTimeline, token: int) -> float:
    """When the store gave the claim, or else when its run began."""
    return task.stored[token][0].at if task.stored.get(token) else task.starts[token].at


def items_have_one_outcome(timeline: Timeline, _: Promises, __: Verdict) -> Iterator[Violation]:
    """I35. A run of an item belongs to one call, which is not too large, and has the one outcome it was given."""
    calls: dict[str, list[str]] = defaultdict(list)
    for task in timeline:
        if task.plan is None or not task.plan.batch:
            continue
        for token, run in task.starts.items():
            calls[str(run.value)].append(task.id)
            recorded = {each.what for each in task.outcomes.get(token, ()) if each.what in OUTCOMES}
            if len(recorded) > 1:
                yield Violation("I35", task.id, f"claim {token} ended as {sorted(recorded)}")
            end = task.ends.get(token)
            if end is None or not recorded or task.cancel_tried:
                continue
            expected = {"returned": {"done"}, "raised": {"retried", "dead"}}.get(str(end.value))
            if end.value == "raised" and timeline.may_interrupt(run.by, run.at, end.at):
                # What a run raises that its worker interrupts may come from that.
                expected = {"retried", "dead", "released"}
            if expected is not None and not recorded <= expected:
                yield Violation("I35", task.id, f"{end.value}, and is recorded as {recorded}")
    for call, ids in calls.items():
        if len(ids) > BATCH_SIZE or len(set(ids)) < len(ids):
            yield Violation("I35", ids[0], f"call {call} had {len(ids)} items")


def changed_limits_hold(timeline: Timeline, _: Promises, __: Verdict) -> Iterator[Violation]:
    """I36. Where the store was observed: no claim takes more of a limit than it allowed at that moment."""
    runs: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    widths: dict[str, int] = {}
    for task in timeline:
        if task.plan is not None and task.plan.changes:
            widths[task.plan.group] = task.plan.width
            for token in task.starts:
                if token in task.stored:
                    begun = task.stored[token][0].at
                    runs[task.plan.group].append((begun, run_end(timeline, task, token), task.id))
    for group, made in runs.items():
        made.sort()
        for position, (at, _end, task_id) in enumerate(made):
            width = timeline.widest(group, at, widths[group])
            others = sum(end > at for _, end, _ in made[:position])
            if others + 1 > width:
                yield Violation("I36", task_id, f"{others + 1} of {group}, which allowed {width}")
                break
