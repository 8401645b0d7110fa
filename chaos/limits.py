"""I12, I14 to I17 and I19: keys, groups, counts, steps, faults and resources."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from chaos.tasks import Plan
from chaos.timeline import NEVER, TaskTimeline, Timeline
from chaos.verdict import Verdict, Violation

if TYPE_CHECKING:
    from chaos.checker import Promises

_TICK = 0.001
MORE_FILES, MORE_THREADS, MORE_MEGABYTES = 10, 5, 50


def unique_keys_are_unique(timeline: Timeline, _: Promises, __: Verdict) -> Iterator[Violation]:
    """I12. Two tasks of one key never run at the same time."""
    for key, runs in runs_by(timeline, lambda task: task.plan.unique if task.plan else "").items():
        for first, second in pairwise(sorted(runs)):
            if first[1] > second[0] and first[2] != second[2]:
                yield Violation(
                    "I12", second[2], f"ran at the same time as {first[2]}, with the same key {key}"
                )


def rates_are_kept(timeline: Timeline, _: Promises, __: Verdict) -> Iterator[Violation]:
    """I14. Where the store was observed: no more claims of a group within its span than its width."""
    claims: dict[Plan, list[tuple[float, str]]] = defaultdict(list)
    for task in timeline:
        if task.plan is not None and task.plan.span and not task.plan.units:
            rule = Plan(group=task.plan.group, width=task.plan.width, span=task.plan.span)
            claims[rule] += [(seen[0].at, task.id) for seen in task.stored.values()]
    for rule, made in claims.items():
        made.sort()
        for first, (at, task_id) in zip(made, made[rule.width :], strict=False):
            if at - first[0] < rule.span - _TICK:
                yield Violation("I14", task_id, f"more than {rule.width} in {at - first[0]:.3f} s")


def groups_keep_their_width(timeline: Timeline, _: Promises, __: Verdict) -> Iterator[Violation]:
    """I14. No more runs of a group at any instant than its width, except runs past their lease."""
    plans = [task.plan for task in timeline if task.plan and task.plan.is_plain_group]
    widths = {plan.group: plan.width for plan in plans}
    for group, runs in runs_by(
        timeline, lambda task: task.plan.group if task.plan and task.plan.is_plain_group else ""
    ).items():
        changes = sorted([(b, 1, i) for b, _, i in runs] + [(e, -1, i) for _, e, i in runs])
        width = 0
        for at, change, task_id in changes:
            width += change
            if width > widths.get(group, NEVER):
                yield Violation("I14", task_id, f"{width} of {group} at {at:.3f}")
                break


def runs_by(
    timeline: Timeline, key_of: Callable[[TaskTimeline], str]
) -> dict[str, list[tuple[float, float, str]]]:
    """Return, by key, when runs began, and when they or their leases ended (the earlier)."""
    found: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for task in timeline:
        key = key_of(task)
        if key:
            for token, run in task.starts.items():
                found[key].append((run.at, run_end(timeline, task, token), task.id))
    return found


def run_end(timeline: Timeline, task: TaskTimeline, token: int) -> float:
    """When a run ended, or its process was killed, or the lease of its owner ended: the earliest."""
    run, end = task.starts[token], task.end_of(token)
    owner = next((event.owner for event in task.claims.get(token, ())), "")
    if owner:
        leases = [until for _, until in timeline.leases.get(owner, [])]
        end = min(end, max(leases, default=NEVER))
    killed = timeline.killed_between(run.by, run.at, NEVER)
    return min(end, NEVER if killed is None else killed)


def counts_add_up(timeline: Timeline, promises: Promises, _: Verdict) -> Iterator[Violation]:
    """I15. The store counts as many tasks as it lists."""
    if not timeline.counted or promises.purges_finished:
        return
    found = Counter(task.final.status.value for task in timeline if task.final is not None)
    for status, count in timeline.counted.items():
        if count != found[status]:
            yield Violation("I15", "counts", f"{count} {status} by count, {found[status]} by name")


def steps_are_done_once(timeline: Timeline, _: Promises, __: Verdict) -> Iterator[Violation]:
    """I16. A run resumes where the last one ended, and repeats at most its last step."""
    for task in timeline:
        furthest = -1
        for token in sorted(task.steps):
            done = task.steps[token]
            if done and done[0] < furthest:
                yield Violation("I16", task.id, f"step {done[0]} again, after step {furthest}")
            if len(set(done)) != len(done):
                yield Violation("I16", task.id, f"claim {token} did a step twice: {done}")
            furthest = max([furthest, *done])


def the_run_was_not_vacuous(
    timeline: Timeline, promises: Promises, _: Verdict
) -> Iterator[Violation]:
    """I17. A run proves something only if enough faults happened."""
    for fault, times in promises.at_least.items():
        if timeline.faults[fault] < times:
            yield Violation("I17", fault, f"happened {timeline.faults[fault]} times, not {times}")
    for name in promises.failpoints:
        if timeline.passed[name] < promises.passes:
            yield Violation(
                "I17", name, f"was passed {timeline.passed[name]} times, not {promises.passes}"
            )


def resources_come_back(timeline: Timeline, _: Promises, __: Verdict) -> Iterator[Violation]:
    """I19. A process that lived through the run has the files, threads and memory it began with."""
    for process, noted in timeline.resources.items():
        first, last = noted[0].value, noted[-1].value
        for what, slack in (
            ("files", MORE_FILES),
            ("threads", MORE_THREADS),
            ("megabytes", MORE_MEGABYTES),
        ):
            if last[what] > first[what] + slack:
                yield Violation("I19", process, f"{what}: {first[what]}, then {last[what]}")
