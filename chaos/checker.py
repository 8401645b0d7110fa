"""Decides from a history alone whether omniq kept its promises: I1 to I22 and I31 to I36, for every backend alike.

I1  no acknowledged task is lost            I11 a schedule fires each nominal time once
I2  no task exists that was not requested   I12 at most one live task of a unique key
I3  one outcome for a task                  I13 a sequence starts in its order
I4  claims and attempts are correct         I14 limits hold at every instant
I5  leases of a task do not overlap         I15 the store's counts are correct
I6  no outcome of an old claim is accepted  I16 a finished step is not repeated
I7  two runs overlap only past a lease      I17 every fault and failpoint occurred
I8  results follow from the arguments       I18 the queue drains after the last fault
I9  recovery within lease, poll, 0.25 s     I19 files, threads and memory are released
I10 no task runs before its time            I20 rows of a task's transaction exist once
I21 none begins before what it waits for    I22 none waits for what has ended
I31 tenants get their shares                I32 a strict sequence runs in order, one at a time
I33 units are kept at every instant         I34 the newest acknowledged arguments run
I35 items of a batch have one outcome       I36 a changed limit holds from its step on
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from chaos import flow_control, flows, limits, ownership, results, times
from chaos.history import Event
from chaos.timeline import Timeline
from chaos.verdict import Verdict, Violation
from omniq.models import TaskStatus


class Promises(msgspec.Struct, frozen=True, kw_only=True):
    """What the history of a run must show. None: not checked.

    `recovery`: seconds for p99. `drain`: seconds after the last fault. `at_least`: how often each
    fault must have happened, and `passes` how often each of `failpoints` must have been passed.
    `no_zombies`: no process of the run stalls by itself, so a run that outlives its lease without
    having been stopped is a violation. `max_crashes`: the setting of the workers.
    `purges_finished`: finished tasks are purged during the run, so an accepted final outcome of a
    worker counts as the record.
    """

    max_crashes: int = 3
    recovery: float | None = None
    drain: float | None = None
    skew: float = 0.0
    no_zombies: bool = False
    purges_finished: bool = False
    at_least: dict[str, int] = {}
    failpoints: tuple[str, ...] = ()
    passes: int = 20


Check = Callable[[Timeline, Promises, Verdict], Iterator[Violation]]
CHECKS: tuple[Check, ...] = (
    results.nothing_is_lost,
    results.nothing_is_invented,
    results.one_outcome_each,
    results.attempts_add_up,
    results.values_are_right,
    results.rows_are_written_once,
    ownership.claims_are_exclusive,
    ownership.leases_are_disjoint,
    ownership.stale_outcomes_are_refused,
    ownership.dead_workers_are_replaced,
    times.nothing_is_early,
    times.schedules_fire_once,
    times.sequences_keep_their_order,
    times.the_queue_drains,
    flows.nothing_begins_before_its_source,
    flows.nothing_waits_for_what_has_ended,
    limits.unique_keys_are_unique,
    limits.groups_keep_their_width,
    limits.rates_are_kept,
    limits.counts_add_up,
    limits.steps_are_done_once,
    limits.the_run_was_not_vacuous,
    limits.resources_come_back,
    flow_control.shares_are_kept,
    flow_control.sequences_are_strict,
    flow_control.units_are_kept,
    flow_control.newest_arguments_are_run,
    flow_control.items_have_one_outcome,
    flow_control.changed_limits_hold,
)


def check(events: Iterable[Event], promises: Promises | None = None) -> Verdict:
    """Check a history; the verdict has the shortest history with the same violation."""
    known = promises or Promises()
    history = list(events)
    verdict = _judge(history, known)
    if verdict.violations:
        verdict.counter_example = minimised(history, verdict.violations[0], known)
    return verdict


def _judge(events: Sequence[Event], promises: Promises) -> Verdict:
    timeline = Timeline(events)
    verdict = Verdict(faults=dict(timeline.faults))
    for task in timeline:
        verdict.tasks += task.is_known
        verdict.runs += len(task.starts)
        verdict.stale_refused += task.stale
        if task.final is not None:
            verdict.ok += task.final.status is TaskStatus.SUCCESS
            verdict.dead += task.final.status is TaskStatus.FAILED
            verdict.cancelled += task.final.status is TaskStatus.CANCELLED
            verdict.unknown_resolved += task.acknowledged_at == float("inf") and not task.scheduled
    for one in CHECKS:
        verdict.violations.extend(one(timeline, promises, verdict))
    return verdict


def minimised(
    events: Sequence[Event], violation: Violation, promises: Promises, tries: int = 400
) -> list[Event]:
    """Return a part of the history, as short as possible, that breaks the same promise."""

    def is_broken(part: Sequence[Event]) -> bool:
        same = (violation.code, violation.subject)
        return any((v.code, v.subject) == same for v in _judge(part, promises).violations)

    part = [event for event in events if event.id in ("", violation.subject)]
    if not is_broken(part):
        part = list(events)
    size = max(1, len(part) // 2)
    while tries > 0:
        begin = 0
        while begin < len(part) and tries > 0:
            shorter = part[:begin] + part[begin + size :]
            tries -= 1
            if is_broken(shorter):
                part = shorter
            else:
                begin += size
        if size == 1:
            break
        size = max(1, size // 2)
    return part
