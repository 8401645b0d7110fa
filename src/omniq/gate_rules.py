"""Gates: conditions that a due task must pass when it is claimed. Pure rules over small records.

A running limit, a rate limit and a circuit breaker are the same thing to a claim: a named gate with
shared state that admits the task, or says when to check again. A blocked task is parked under the
gate that blocked it, where it costs nothing, until the gate has room. Backends store a `GateState`
for each key and change it in the same atomic step as the claim or the outcome.
"""

from __future__ import annotations

from bisect import bisect, bisect_left
from enum import StrEnum
from typing import Literal

import msgspec

from omniq.clock import seconds_to_micros
from omniq.models import Task

FOREVER = 2**62
"""A `wake_at` that is never reached: the gate opens by an event, not by time."""

_LONGEST_LOG = 1000

Effect = Literal["success", "failure", "neither"]


class BreakerState(StrEnum):
    """Closed admits tasks, open holds them, half-open has admitted one probe."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Gate(msgspec.Struct, frozen=True, gc=False):
    """One condition of a task. The meaning of `size` and `span` (microseconds) depends on `kind`."""

    key: str
    kind: Literal["running", "rate", "breaker"]
    size: int
    span: int = 0


class GateState(msgspec.Struct, omit_defaults=True, gc=False):
    """The state of one gate, shared by all workers.

    `starts` are in order. `has_parked`: whether tasks may be parked under it. `wake_at`: when they are checked again.
    `parks` counts the steps that have parked tasks: a step that has not seen those tasks fails by it.
    """

    breaker: BreakerState = BreakerState.CLOSED
    failures: int = 0
    opened_at: int = 0
    reason: str = ""
    wake_at: int = 0
    has_parked: bool = False
    parks: int = 0
    # Last, so that a function of PostgreSQL finds its end.
    starts: list[int] = []
    holders: list[tuple[str, int]] = []


def gates_of(task: Task) -> tuple[Gate, ...]:
    """The gates that a task must pass, in the order in which they are checked."""
    gates = [
        Gate(
            f"breaker:{rule.name}",
            "breaker",
            rule.max_failures,
            seconds_to_micros(rule.reset_timeout),
        )
        for rule in task.breakers
    ]
    for limit in task.limits:
        if limit.max_running is not None:
            gates.append(Gate(f"running:{limit.key}", "running", limit.max_running))
        if limit.rate is not None:
            gates.append(_rate_gate(limit.key, limit.rate, seconds_to_micros(limit.per)))
    return tuple(gates)


def _rate_gate(key: str, rate: int, span: int) -> Gate:
    # A log of every start in the span is exact, but long for high rates. 1,000 starts in a
    # proportionally shorter span are slightly stricter, and never admit more than `rate`.
    if rate > _LONGEST_LOG:
        span = -(-span * _LONGEST_LOG // rate)
        rate = _LONGEST_LOG
    return Gate(f"rate:{key}", "rate", rate, span)


def room(gate: Gate, state: GateState, now: int) -> int:
    """The number of tasks that the gate would admit now."""
    match gate.kind:
        case "running":
            left = gate.size - len(state.holders)
            return left if left > 0 else 0
        case "rate":
            starts, span = state.starts, gate.span
            return max(0, gate.size - bisect_left(starts, now + span) + bisect(starts, now - span))
        case "breaker":
            if state.breaker is BreakerState.CLOSED:
                return FOREVER
            is_probe_due = state.breaker is BreakerState.OPEN and state.opened_at + gate.span <= now
            return 1 if is_probe_due else 0


def ask_again_at(gate: Gate, state: GateState, now: int) -> int:
    """When a full gate may have room: an instant, or FOREVER if only an event can make room."""
    if gate.kind == "rate" and len(state.starts) >= gate.size:
        return state.starts[-gate.size] + gate.span
    if gate.kind == "breaker" and state.breaker is BreakerState.OPEN:
        return state.opened_at + gate.span
    return FOREVER


def enter(gate: Gate, state: GateState, task_id: str, token: int, now: int) -> None:
    """Count the task as admitted."""
    match gate.kind:
        case "running":
            state.holders.append((task_id, token))
        case "rate":
            # A start may lie slightly in the future: a concurrent claim read the clock later and
            # got here first. It stays as it is. A start that lies ahead by a span or more was
            # written before the clock was set back.
            if state.starts and state.starts[-1] > now:
                known = [now if start >= now + gate.span else start for start in state.starts]
                state.starts = sorted([*known, now])
            else:
                state.starts.append(now)
            del state.starts[: -gate.size]
        case "breaker":
            if state.breaker is BreakerState.OPEN:
                state.breaker = BreakerState.HALF_OPEN
                state.holders = [(task_id, token)]


def leave(
    gate: Gate,
    state: GateState,
    task_id: str,
    token: int,
    effect: Effect,
    now: int,
    reason: str = "",
) -> None:
    """Count the task as ended, by an outcome or because its owner died."""
    match gate.kind:
        case "running":
            _drop_holder(state, task_id, token)
            state.wake_at = 0
        case "rate":
            pass
        case "breaker":
            _leave_breaker(gate, state, task_id, token, effect, now, reason)


def _leave_breaker(
    gate: Gate, state: GateState, task_id: str, token: int, effect: Effect, now: int, reason: str
) -> None:
    was_probe = _drop_holder(state, task_id, token)
    if state.breaker is BreakerState.CLOSED and effect == "failure":
        state.failures += 1
        if state.failures >= gate.size:
            _open(state, now, now + gate.span, reason)
    elif effect == "success" and (was_probe or state.breaker is BreakerState.CLOSED):
        state.breaker, state.failures, state.reason, state.wake_at = BreakerState.CLOSED, 0, "", 0
    elif was_probe and effect == "failure":
        state.failures += 1
        _open(state, now, now + gate.span, reason)
    elif was_probe:
        # The probe neither succeeded nor failed: the next task may probe immediately.
        _open(state, now - gate.span, now, state.reason)


def close_breaker(state: GateState) -> None:
    """Close a breaker that an operator has closed. A probe that still runs counts as any other run."""
    state.breaker, state.failures, state.opened_at, state.reason = BreakerState.CLOSED, 0, 0, ""
    state.holders, state.wake_at = [], 0


def _open(state: GateState, opened_at: int, wake_at: int, reason: str) -> None:
    state.breaker, state.opened_at, state.wake_at = BreakerState.OPEN, opened_at, wake_at
    state.reason = reason


def _drop_holder(state: GateState, task_id: str, token: int) -> bool:
    try:
        state.holders.remove((task_id, token))
    except ValueError:
        return False
    return True
