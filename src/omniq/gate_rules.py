"""Gates: what a due task must pass at the moment it is claimed. Pure rules over small records.

A running limit, a rate limit and a circuit breaker are the same thing to a claim: a named gate with
a little shared state that lets the task in, or says when to ask again. A blocked task is parked
under the gate that blocked it, where it costs nothing, until the gate has room. Backends keep a
`GateState` for each key and change it in the same atomic step as the claim or the outcome.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from omniq.clock import seconds_to_micros
from omniq.models import Task

FOREVER = 2**62
"""A `wake_at` that no clock reaches: the gate opens by an event, not by time."""

_LONGEST_LOG = 1000

Effect = Literal["success", "failure", "neither"]


class BreakerState(StrEnum):
    """Closed lets tasks through, open holds them, half-open has let one probe through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Gate(msgspec.Struct, frozen=True):
    """One condition of a task. `size` and `span` (microseconds) mean what `kind` needs."""

    key: str
    kind: Literal["running", "rate", "breaker"]
    size: int
    span: int = 0


class GateState(msgspec.Struct, omit_defaults=True):
    """What the fleet shares about one gate. `wake_at`: when parked tasks may ask again."""

    holders: list[tuple[str, int]] = []
    starts: list[int] = []
    breaker: BreakerState = BreakerState.CLOSED
    failures: int = 0
    opened_at: int = 0
    reason: str = ""
    wake_at: int = 0


def gates_of(task: Task) -> tuple[Gate, ...]:
    """The gates a task must pass, in the order they are asked."""
    if not task.limits and not task.breakers:
        return ()
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
    # A log of every start in the span is exact, and long for high rates. 1,000 starts in a
    # proportionally shorter span is a little stricter, and never lets more than `rate` through.
    if rate > _LONGEST_LOG:
        span = -(-span * _LONGEST_LOG // rate)
        rate = _LONGEST_LOG
    return Gate(f"rate:{key}", "rate", rate, span)


def room(gate: Gate, state: GateState, now: int) -> int:
    """How many tasks the gate would let in at this moment."""
    match gate.kind:
        case "running":
            return max(0, gate.size - len(state.holders))
        case "rate":
            return max(0, gate.size - sum(abs(start - now) < gate.span for start in state.starts))
        case "breaker":
            if state.breaker is BreakerState.CLOSED:
                return FOREVER
            is_probe_due = state.breaker is BreakerState.OPEN and state.opened_at + gate.span <= now
            return 1 if is_probe_due else 0


def ask_again_at(gate: Gate, state: GateState, now: int) -> int:
    """When a gate without room may have some: an instant, or FOREVER when only an event can tell."""
    if gate.kind == "rate" and len(state.starts) >= gate.size:
        return state.starts[-gate.size] + gate.span
    if gate.kind == "breaker" and state.breaker is BreakerState.OPEN:
        return state.opened_at + gate.span
    return FOREVER


def enter(gate: Gate, state: GateState, task_id: str, token: int, now: int) -> None:
    """Count the task as let in."""
    match gate.kind:
        case "running":
            state.holders.append((task_id, token))
        case "rate":
            # Starts may lie a little ahead: of a claim that took its time between reading the
            # clock and coming here, they are those that overtook it. They stay as they are. What
            # lies ahead by a span or more was written before the clock was set back.
            known = [now if start >= now + gate.span else start for start in state.starts]
            state.starts = sorted([*known, now])[-gate.size :]
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
    """Count the task as gone, by an outcome or because its owner died."""
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
        # The probe came back without an answer: the next task may probe at once.
        _open(state, now - gate.span, now, state.reason)


def _open(state: GateState, opened_at: int, wake_at: int, reason: str) -> None:
    state.breaker, state.opened_at, state.wake_at = BreakerState.OPEN, opened_at, wake_at
    state.reason = reason


def _drop_holder(state: GateState, task_id: str, token: int) -> bool:
    holder = (task_id, token)
    if holder not in state.holders:
        return False
    state.holders.remove(holder)
    return True


def blocking(gates: tuple[Gate, ...], states: dict[str, GateState], now: int) -> Gate | None:
    """The first gate that has no room, with its `wake_at` set; None when the task may enter all."""
    for gate in gates:
        state = states[gate.key]
        if room(gate, state, now) == 0:
            state.wake_at = ask_again_at(gate, state, now)
            return gate
    return None
