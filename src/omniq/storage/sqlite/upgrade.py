"""Upgrade: the SQL functions with which `schema_3.sql` upgrades a store from version 2 to version 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from omniq.clock import to_micros
from omniq.gate_rules import GateState
from omniq.models import Attempt, Schedule
from omniq.serialization import encode_internal, lenient_decoder

_decode_history = lenient_decoder(tuple[Attempt, ...], ())
_decode_gate = lenient_decoder(GateState, None)
_decode_schedule = lenient_decoder(Schedule, None)


def _rest(history: bytes | None, releases: int) -> bytes | None:
    """The fields of a row that had columns of their own: see `row_codec`."""
    rest: dict[str, Any] = {}
    if history and _decode_history(history):
        rest["history"] = msgspec.Raw(history)
    if releases:
        rest["releases"] = releases
    return encode_internal(rest) if rest else None


def _checkpoint(saved_at: int, checkpoint: bytes) -> bytes:
    return encode_internal((saved_at, checkpoint))


def _schedule(version: int, schedule: object, task: bytes) -> bytes:
    if not isinstance(schedule, bytes):
        # Not written by omniq: it is no schedule, and must not keep the others from being upgraded.
        return b""
    return encode_internal((version, msgspec.Raw(schedule), task))


def _next_at(schedule: bytes) -> int | None:
    decoded = _decode_schedule(schedule)
    return None if decoded is None or decoded.next_at is None else to_micros(decoded.next_at)


def _is_idle(gate: bytes) -> bool:
    """Whether the gate's state says nothing."""
    state = _decode_gate(gate)
    return state is None or not (
        state.holders or state.starts or state.failures or state.breaker != "closed"
    )


FUNCTIONS: dict[str, tuple[int, Callable[..., Any]]] = {
    "omniq_rest": (2, _rest),
    "omniq_checkpoint": (2, _checkpoint),
    "omniq_schedule": (3, _schedule),
    "omniq_next_at": (1, _next_at),
    "omniq_is_idle": (1, _is_idle),
}
"""Each by its name in SQL, with the number of its parameters."""
