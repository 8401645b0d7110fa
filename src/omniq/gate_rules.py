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
from omniq.serialization import encode_internal, lenient_decoder

FOREVER = 2**62
"""A `wake_at` that is never reached: the gate opens by an event, not by time."""

_LONGEST_LOG = 1000

SAVED_FOR = 10_000_000
"""Microseconds for which a limit saves its room for a task that needs more than is free.

They count from the last claim that would have taken it, so that a task that no worker can take keeps the
others waiting no longer.
"""

Effect = Literal["success", "failure", "neither"]


class BreakerState(StrEnum):
    """Closed admits tasks, open holds them, half-open has admitted one probe."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Gate(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One condition of a task. The meaning of `size` and `span` (microseconds) depends on `kind`.

    `cost`: the units of a limit that the task takes.
    """

    key: str
    kind: Literal["running", "rate", "breaker"]
    size: int
    span: int = 0
    cost: int = 1


class Special(msgspec.Struct, omit_defaults=True, gc=False):
    """Fields that only some limits use: changes and holds by operators, costs above 1, and saved room.

    `size` and `span` replace those of the tasks; 0: as the tasks say. Nothing enters before `held_until`,
    for the `reason`. `extra` is the number of units that holders have, beyond one for each; `units` are
    those of each of the `starts`, empty if each has one. Until `saved_until`, `saved_need` units are saved
    for the task whose place in line is `saved_for`.
    """

    size: int = 0
    span: int = 0
    held_until: int = 0
    reason: str = ""
    extra: int = 0
    units: list[int] = []
    saved_for: tuple[int, int, int] = (0, 0, 0)
    saved_need: int = 0
    saved_until: int = 0

    @property
    def is_changed(self) -> bool:
        """Whether an operator has changed or holds the limit."""
        return bool(self.size or self.held_until)


class GateState(msgspec.Struct, omit_defaults=True, gc=False):
    """The state of one gate, shared by all workers.

    `starts` are in order. `has_parked`: whether tasks may be parked under it. `wake_at`: when they are checked again.
    `parks` counts the steps that have parked tasks: a step that has not seen those tasks fails by it.
    `more` is what is stored of `special`: bytes, over which a function of PostgreSQL can skip.
    """

    breaker: BreakerState = BreakerState.CLOSED
    failures: int = 0
    opened_at: int = 0
    reason: str = ""
    wake_at: int = 0
    has_parked: bool = False
    parks: int = 0
    more: bytes = b""
    special: Special | None = None
    # Last, so that a function of PostgreSQL finds its end.
    starts: list[int] = []
    holders: list[tuple[str, int]] = []


_decode_state = lenient_decoder(GateState, None)
_decode_special = lenient_decoder(Special, None)


def encode_state(state: GateState) -> bytes:
    """Encode a state for a store."""
    special = state.special
    if special is None:
        return encode_internal(state)
    packed = encode_internal(special)
    return encode_internal(msgspec.structs.replace(state, more=packed, special=None))


def decode_state(data: bytes) -> GateState | None:
    """Decode a stored state; None if it is damaged."""
    state = _decode_state(data)
    if state is not None and state.more:
        state.special, state.more = _decode_special(state.more), b""
    return state


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
            gates.append(
                Gate(f"running:{limit.key}", "running", limit.max_running, cost=limit.cost or 1)
            )
        if limit.rate is not None:
            span = seconds_to_micros(limit.per)
            if limit.cost is None:
                gates.append(_rate_gate(limit.key, limit.rate, span))
            else:
                gates.append(Gate(f"rate:{limit.key}", "rate", limit.rate, span, limit.cost))
    return tuple(gates)


def _rate_gate(key: str, rate: int, span: int) -> Gate:
    # A log of every start in the span is exact, but long for high rates. 1,000 starts in a
    # proportionally shorter span are slightly stricter, and never admit more than `rate`.
    if rate > _LONGEST_LOG:
        span = -(-span * _LONGEST_LOG // rate)
        rate = _LONGEST_LOG
    return Gate(f"rate:{key}", "rate", rate, span)


def in_force(gate: Gate, state: GateState) -> Gate:
    """The gate with the numbers that hold now: an operator may have changed those of the tasks."""
    special = state.special
    if special is None or not special.size:
        return gate
    return Gate(gate.key, gate.kind, special.size, special.span or gate.span, gate.cost)


def room(gate: Gate, state: GateState, now: int) -> int:
    """The number of units that are free now: of tasks that the gate would admit, if each takes one."""
    special = state.special
    if special is not None:
        if special.held_until > now:
            return 0
        gate = in_force(gate, state)
    match gate.kind:
        case "running":
            left = gate.size - len(state.holders)
            if special is not None:
                left -= special.extra
            return left if left > 0 else 0
        case "rate":
            starts, span = state.starts, gate.span
            first, last = bisect(starts, now - span), bisect_left(starts, now + span)
            units = None if special is None else special.units
            used = sum(units[first:last]) if units else last - first
            return max(0, gate.size - used)
        case "breaker":
            if state.breaker is BreakerState.CLOSED:
                return FOREVER
            is_probe_due = state.breaker is BreakerState.OPEN and state.opened_at + gate.span <= now
            return 1 if is_probe_due else 0


def needed(gate: Gate, state: GateState) -> int:
    """The units that must be free. A task that costs more than the whole limit runs alone."""
    return min(gate.cost, in_force(gate, state).size)


def admits(gate: Gate, state: GateState, now: int, order: tuple[int, int, int]) -> bool:
    """Whether the gate admits a task with that place in line."""
    free = room(gate, state, now)
    special = state.special
    if special is None and gate.cost == 1:
        return free > 0
    left = free - needed(gate, state)
    if left < 0 or free == 0:
        return False
    if special is None or special.saved_until <= now or order <= special.saved_for:
        return True
    return left >= special.saved_need


def save_room(gate: Gate, state: GateState, now: int, order: tuple[int, int, int]) -> None:
    """Save the room that is free, or becomes free, for a task that needs more than there is."""
    special = state.special = state.special or Special()
    if special.saved_until <= now or order <= special.saved_for:
        special.saved_for, special.saved_need = order, needed(gate, state)
        special.saved_until = now + SAVED_FOR


def is_saved_for(state: GateState, order: tuple[int, int, int]) -> bool:
    """Whether room is saved for the task with that place in line."""
    return state.special is not None and state.special.saved_for == order


def ask_again_at(gate: Gate, state: GateState, now: int) -> int:
    """When a full gate may have room: an instant, or FOREVER if only an event can make room."""
    if gate.kind == "breaker":
        return state.opened_at + gate.span if state.breaker is BreakerState.OPEN else FOREVER
    special = state.special
    if special is None and gate.cost == 1:
        return _frees_at(gate, state, 1) if gate.kind == "rate" else FOREVER
    if special is not None and special.held_until > now:
        return special.held_until
    need = needed(gate, state)
    at = _frees_at(in_force(gate, state), state, need) if gate.kind == "rate" else FOREVER
    if special is not None and special.saved_until > now:
        # Twice: workers that can take the task have time to ask before others may pass it.
        middle = special.saved_until - SAVED_FOR // 2
        at = min(at, middle if middle > now else special.saved_until)
    return at


def _frees_at(gate: Gate, state: GateState, need: int) -> int:
    """When so many units of a rate are free that `need` of them can be taken."""
    starts = state.starts
    units = None if state.special is None else state.special.units
    if not units:
        position = len(starts) - gate.size + need - 1
        return starts[position] + gate.span if position >= 0 else FOREVER
    left = sum(units)
    for start, count in zip(starts, units, strict=False):
        if left + need <= gate.size:
            break
        left -= count
        if left + need <= gate.size:
            return start + gate.span
    return FOREVER


def enter(gate: Gate, state: GateState, task_id: str, token: int, now: int) -> None:
    """Count the task as admitted."""
    match gate.kind:
        case "running":
            state.holders.append((task_id, token))
            if gate.cost > 1:
                special = state.special = state.special or Special()
                special.extra += gate.cost - 1
        case "rate":
            # A start may lie slightly in the future: a concurrent claim read the clock later and
            # got here first. It stays as it is. A start that lies ahead by a span or more was
            # written before the clock was set back.
            if state.starts and state.starts[-1] > now:
                span = in_force(gate, state).span
                state.starts = [now if start >= now + span else start for start in state.starts]
                if state.special is None:
                    state.starts.sort()
            if state.special is None and gate.cost == 1 and gate.size <= _LONGEST_LOG:
                state.starts.insert(bisect(state.starts, now), now)
                del state.starts[: -gate.size]
            else:
                _log_units(gate, state, now)
        case "breaker":
            if state.breaker is BreakerState.OPEN:
                state.breaker = BreakerState.HALF_OPEN
                state.holders = [(task_id, token)]


def _log_units(gate: Gate, state: GateState, now: int) -> None:
    """Add a start to the log of a rate that counts units, or whose numbers an operator has changed."""
    special = state.special = state.special or Special()
    known = special.units or [1] * len(state.starts)
    span = max(gate.span, special.span)
    log = sorted(
        (start, units)
        for start, units in zip(state.starts, known, strict=False)
        if start > now - span
    )
    log.insert(bisect(log, (now, FOREVER)), (now, gate.cost))
    if len(log) > _LONGEST_LOG:
        log = _joined(log, max(gate.size, special.size) // (_LONGEST_LOG // 4) + 1)
    state.starts = [start for start, _ in log]
    special.units = [units for _, units in log]


def _joined(log: list[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """Join neighbours to at most that many units, at the later instant: stricter, and never looser."""
    joined = log[:1]
    for start, units in log[1:]:
        if joined[-1][1] + units <= most:
            joined[-1] = (start, joined[-1][1] + units)
        else:
            joined.append((start, units))
    return joined


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
            if _drop_holder(state, task_id, token) and state.special is not None:
                left = state.special.extra - (gate.cost - 1)
                state.special.extra = left if state.holders and left > 0 else 0
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


def clear_expired(state: GateState, now: int) -> None:
    """Clear the recorded starts, and a hold that has ended."""
    state.starts = []
    special = state.special
    if special is not None:
        special.units = []
        if special.held_until <= now:
            special.held_until, special.reason = 0, ""


def tidy(state: GateState, now: int) -> None:
    """Reset fields of `special` that have expired, and drop it when all have their defaults."""
    special = state.special
    if special is None:
        return
    if special.saved_until <= now:
        special.saved_for, special.saved_need, special.saved_until = (0, 0, 0), 0, 0
    if special.held_until <= now:
        special.held_until, special.reason = 0, ""
    if not special.size and special.units.count(1) == len(special.units):
        special.units = []
    if special == Special():
        state.special = None


def _open(state: GateState, opened_at: int, wake_at: int, reason: str) -> None:
    state.breaker, state.opened_at, state.wake_at = BreakerState.OPEN, opened_at, wake_at
    state.reason = reason


def _drop_holder(state: GateState, task_id: str, token: int) -> bool:
    try:
        state.holders.remove((task_id, token))
    except ValueError:
        return False
    return True
