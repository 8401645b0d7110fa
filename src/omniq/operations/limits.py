"""The limits that tasks share: what each one admits, which tasks hold it, and which wait for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime

import msgspec

from omniq.clock import from_micros, to_micros
from omniq.gate_rules import FOREVER, GateState, Special, ask_again_at, gates_of, room
from omniq.models import Limit, Task, TaskStatus
from omniq.operations.newest import newest_tasks
from omniq.storage.base import BaseStorage
from omniq.text.to_json import JsonRecord

_RUNNING, _RATE = "running:", "rate:"
_MAX_READ, _MAX_SCANS = 1_000, 10


class LimitInfo(JsonRecord, msgspec.Struct, frozen=True, kw_only=True):
    """A running limit or a rate limit that all workers share.

    `running`: the ids of the tasks that hold it. `started`: the starts that its rate counts. `waiting`:
    how many waiting tasks have this limit, of the newest 1,000 of each status. `full`: it admits no task now; `opens_at`:
    when it does again, if that is a matter of time. The numbers that it allows, `max_running` and
    `rate` starts in `per` seconds, are in the tasks: they are None if no task that runs or waits has
    this limit.

    `is_changed`: an operator has given it these numbers; the tasks say others, perhaps. `is_held`: it admits no task
    until an operator releases it, or until `held_until`, for the `reason`.
    """

    key: str
    running: tuple[str, ...] = ()
    started: int = 0
    waiting: int = 0
    full: bool = False
    opens_at: datetime | None = None
    max_running: int | None = None
    rate: int | None = None
    per: float | None = None
    is_changed: bool = False
    is_held: bool = False
    held_until: datetime | None = None
    reason: str = ""

    @property
    def is_named(self) -> bool:
        """Whether a task has it: one that runs, that its rate counts, or of the newest 1,000 that wait."""
        return bool(self.running or self.started or self.waiting)


async def limits_of(storage: BaseStorage) -> list[LimitInfo]:
    """Every limit that a claimed or a waiting task has named, sorted by key."""
    states = await storage.gates()
    now = storage.clock.now()
    live = await _newest(storage, TaskStatus.RUNNING)
    waiting = [
        *await _newest(storage, TaskStatus.PENDING),
        *await _newest(storage, TaskStatus.RETRYING),
    ]
    rules = _rules([*live, *waiting])
    counts = Counter(key for task in waiting for key in {limit.key for limit in task.limits})
    names = {key.partition(":")[2] for key in states if key.startswith((_RUNNING, _RATE))}
    return [
        _limit(name, rules.get(name, ()), states, counts[name], now)
        for name in sorted(names | rules.keys())
    ]


async def _newest(storage: BaseStorage, status: TaskStatus) -> list[Task]:
    return await newest_tasks(storage, _MAX_READ, status=status, max_scans=_MAX_SCANS)


def _rules(tasks: Iterable[Task]) -> dict[str, tuple[Limit, ...]]:
    """The limits of each key as a task states them. A deployment may have changed them in between."""
    return {
        key: tuple(limit for limit in task.limits if limit.key == key)
        for task in tasks
        for key in {limit.key for limit in task.limits}
    }


def _limit(
    key: str,
    rules: tuple[Limit, ...],
    states: dict[str, GateState],
    waiting: int,
    now: datetime,
) -> LimitInfo:
    micros = to_micros(now)
    running = states.get(f"{_RUNNING}{key}", GateState())
    starts = states.get(f"{_RATE}{key}", GateState())
    held_until = max(_held_until(running), _held_until(starts))
    gates = gates_of(Task(func_path="omniq.limit", limits=rules))
    closed = [
        ask_again_at(gate, state, micros)
        for gate in gates
        if room(gate, state := states.get(gate.key, GateState()), micros) == 0
    ]
    is_held = held_until > micros
    opens_at = max([*closed, held_until] if is_held else closed, default=FOREVER)
    rated = next((limit for limit in rules if limit.rate is not None), None)
    span = next((gate.span for gate in gates if gate.kind == "rate"), 0)
    resized, rerated = _changed(running), _changed(starts)
    most = next((each.max_running for each in rules if each.max_running), None)
    return LimitInfo(
        key=key,
        running=tuple(task_id for task_id, _ in running.holders),
        started=sum(start > micros - span for start in starts.starts)
        if span
        else len(starts.starts),
        waiting=waiting,
        full=bool(closed) or is_held,
        opens_at=None if opens_at >= FOREVER else from_micros(opens_at),
        max_running=most if resized is None else resized.size,
        rate=(None if rated is None else rated.rate) if rerated is None else rerated.size,
        per=(None if rated is None else rated.per) if rerated is None else rerated.span / 1_000_000,
        is_changed=resized is not None or rerated is not None,
        is_held=is_held,
        held_until=None if held_until >= FOREVER or not is_held else from_micros(held_until),
        reason=_reason(running) or _reason(starts) if is_held else "",
    )


def _changed(state: GateState) -> Special | None:
    """The numbers that an operator has given to the limit."""
    return state.special if state.special is not None and state.special.size else None


def _held_until(state: GateState) -> int:
    return 0 if state.special is None else state.special.held_until


def _reason(state: GateState) -> str:
    return "" if state.special is None else state.special.reason
