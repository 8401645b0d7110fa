"""A history sorted by task, owner and process: what happened to each task, lease and process."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from chaos.history import Event
from chaos.tasks import Plan
from omniq.models import TaskStatus

NEVER = float("inf")
TERMINAL = ("done", "dead", "cancelled")
OUTCOMES = (*TERMINAL, "retried", "released", "snoozed")
FAULT_EVENTS = ("kill", "stop", "cont", "term", "restart", "cut", "jump", "stall")


class Final(msgspec.Struct, frozen=True):
    """A task as the store has it after the run."""

    status: TaskStatus
    attempts: int
    crashes: int
    result: object = None
    reason: str | None = None


@dataclass
class TaskTimeline:
    """What happened to one task; claims, runs and outcomes by token."""

    id: str
    plan: Plan | None = None
    tried_at: float = NEVER
    acknowledged_at: float = NEVER
    refused: bool = False
    scheduled: bool = False
    replied_at: float = NEVER
    stands_for: str = ""
    """The task that has the arguments of this call, by the reply: itself, or the holder of its unique key."""
    cancel_tried: bool = False
    dead_retries: int = 0
    cancelled_at: float = NEVER
    claims: dict[int, list[Event]] = field(default_factory=lambda: defaultdict(list))
    stored: dict[int, list[Event]] = field(default_factory=lambda: defaultdict(list))
    starts: dict[int, Event] = field(default_factory=dict)
    ends: dict[int, Event] = field(default_factory=dict)
    outcomes: dict[int, list[Event]] = field(default_factory=lambda: defaultdict(list))
    steps: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    rows: int = 0
    stale: int = 0
    final: Final | None = None
    final_token: int = 0

    @property
    def is_known(self) -> bool:
        """Whether a producer or a schedule requested it."""
        return self.tried_at < NEVER or self.scheduled

    @property
    def has_ended(self) -> bool:
        """Whether the store accepted a final outcome from a worker."""
        return any(e.what in TERMINAL for events in self.outcomes.values() for e in events)

    def end_of(self, token: int) -> float:
        """Return when the run of that claim ended; NEVER if its process died or it still runs."""
        return self.ends[token].at if token in self.ends else NEVER

    def tokens(self) -> list[int]:
        """Return the tokens of all observed claims, in order."""
        return sorted({*self.claims, *self.stored, *self.starts})

    def claimed_at(self, token: int) -> float:
        """Return when the claim was first observed; it may have been made slightly earlier."""
        for seen in (self.stored, self.claims):
            if seen.get(token):
                return min(event.at for event in seen[token])
        return self.starts[token].at


class Timeline:
    """The whole history, by task, by owner and by process."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = sorted(events, key=lambda event: event.at)
        self.tasks: dict[str, TaskTimeline] = {}
        self.leases: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.faults_by_process: dict[str, list[Event]] = defaultdict(list)
        self.faults: dict[str, int] = defaultdict(int)
        self.passed: dict[str, int] = defaultdict(int)
        self.counted: dict[str, int] = {}
        self.resources: dict[str, list[Event]] = defaultdict(list)
        self.fired: dict[str, dict[float, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.schedules: dict[str, dict[float, str]] = {}
        self._placed: dict[str, float] = {}
        self._nominal: set[str] = set()
        self._widths: dict[str, list[tuple[float, str, int]]] = defaultdict(list)
        self.calm_at = NEVER
        for event in self.events:
            self._add(event)

    def __iter__(self) -> Iterator[TaskTimeline]:
        return iter(self.tasks.values())

    def lease_end(self, owner: str, at: float) -> float:
        """Return the end of the owner's lease, as far as it was known at that instant."""
        leases = self.leases.get(owner, [])
        known = bisect_right(leases, (at, NEVER))
        return max((until for _, until in leases[:known]), default=0.0)

    def killed_between(self, process: str, begin: float, end: float) -> float | None:
        """Return when the process was killed in that time, or None."""
        kills = (
            event.at for event in self.faults_by_process.get(process, ()) if event.what == "kill"
        )
        return next((at for at in kills if begin <= at <= end), None)

    def was_stopped(self, process: str, begin: float, end: float) -> bool:
        """Whether the process was stopped for a part of that time, or its clock was changed."""
        return any(
            event.what in ("stop", "jump") and event.at <= end and event.at + event.until >= begin
            for event in self.faults_by_process.get(process, ())
        )

    def may_interrupt(self, process: str, begin: float, end: float) -> bool:
        """Whether the process had a reason to interrupt its runs: it lost its lease, or was to end."""
        return self.was_stopped(process, begin, end) or any(
            event.what == "term" and event.at <= end
            for event in self.faults_by_process.get(process, ())
        )

    def widest(self, group: str, at: float, width: int) -> int:
        """The largest width that the group may have had at that instant; `width` before the first change."""
        possible = {width}
        for changed_at, what, new in self._widths[group]:
            if changed_at > at:
                break
            # Between the request and the reply, both hold; without a reply, until the next one.
            possible = {new} if what == "limit.ok" else possible | {new}
        return max(possible)

    def _add(self, event: Event) -> None:
        match event.what:
            case "lease":
                self.leases[event.owner].append((event.at, event.until))
            case "fired":
                self.fired[str(event.value)][event.until].add(event.id)
                self._task(event.id).scheduled = True
            case "placed":
                self._placed[event.id] = event.until
            case "schedule":
                self._add_schedule(event)
            case "limit.try" | "limit.ok":
                self._widths[event.id].append((event.at, event.what, event.value))
            case "calm":
                self.calm_at = event.at
            case "counted":
                self.counted = dict(event.value)
            case "passed":
                for name, count in dict(event.value).items():
                    self.passed[name] += count
            case "resources":
                self.resources[event.by].append(event)
            case what if what in FAULT_EVENTS:
                self.faults[what] += 1
                self.faults_by_process[str(event.value)].append(event)
            case _ if event.id:
                self._add_to_task(self._task(event.id), event)

    def _add_schedule(self, event: Event) -> None:
        """Times before the schedule was added may have a task; all later ones must."""
        times = {float(nominal): str(task_id) for nominal, task_id in event.value}
        self._nominal.update(times.values())
        placed = self._placed.get(event.id, 0.0)
        self.schedules[event.id] = {at: each for at, each in times.items() if at > placed}
        for at, task_id in times.items():
            if at > placed or task_id in self.tasks:
                self._task(task_id).scheduled = True

    def _task(self, task_id: str) -> TaskTimeline:
        return self.tasks.setdefault(task_id, TaskTimeline(task_id))

    def _add_to_task(self, task: TaskTimeline, event: Event) -> None:
        match event.what:
            case "enqueue.try":
                task.plan = msgspec.convert(event.value, Plan)
                task.tried_at = min(task.tried_at, event.at)
            case "enqueue.ok":
                task.acknowledged_at = min(task.acknowledged_at, event.at)
                task.replied_at, task.stands_for = event.at, task.id
            case "enqueue.refused":
                task.refused = True
            case "enqueue.replaced":
                task.replied_at, task.stands_for = event.at, str(event.value)
            case "retry_dead.try":
                task.dead_retries += 1
            case "cancel.try":
                task.cancel_tried = True
            case "cancel.ok" if event.value:
                task.cancelled_at = min(task.cancelled_at, event.at)
            case "claim":
                task.claims[event.token].append(event)
            case "store.claim":
                task.stored[event.token].append(event)
            case "start":
                task.starts.setdefault(event.token, event)
            case "end":
                task.ends.setdefault(event.token, event)
            case "step":
                task.steps[event.token].append(event.value)
            case "written":
                task.rows = event.value
            case "stale":
                task.stale += 1
            case "final":
                task.final = msgspec.convert(event.value, Final, strict=False)
                task.final_token = event.token
                task.scheduled = task.scheduled or event.id in self._nominal
            case what if what in OUTCOMES:
                task.outcomes[event.token].append(event)
