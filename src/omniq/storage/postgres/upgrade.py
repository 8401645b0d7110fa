"""Upgrade: what a migration cannot do in SQL, because it has to decode what is stored."""

from __future__ import annotations

from omniq.clock import to_micros
from omniq.gate_rules import BreakerState
from omniq.models import Schedule
from omniq.serialization import lenient_decoder
from omniq.storage.gate_states import decode_gate
from omniq.storage.postgres.connection import Connection
from omniq.storage.postgres.statements import filled

_LONGEST_SPAN = 31 * 86_400_000_000
"""How long the starts of a rate limit are retained when no task is left that says its span."""

_decode_schedule = lenient_decoder(tuple[int, Schedule, bytes], None)


async def convert_documents(db: Connection, schema: str) -> None:
    """After the migration to version 4: when schedules are due, and which gates can be deleted."""
    sql = "SELECT kind, key, data FROM {schema}.documents WHERE kind IN ('schedule', 'gate') AND due IS NULL"
    found = await db.fetch(filled(schema, sql))
    dues = [(kind, key, due) for kind, key, data in found if (due := _due(kind, data)) is not None]
    sql = "UPDATE {schema}.documents SET due = $3 WHERE kind = $1 AND key = $2"
    await db.executemany(filled(schema, sql), dues)
    idle = [key for kind, key, data in found if kind == "gate" and _is_idle(data)]
    sql = "DELETE FROM {schema}.documents WHERE kind = 'gate' AND key = ANY ($1)"
    await db.execute(filled(schema, sql), idle)


def _due(kind: str, data: bytes) -> int | None:
    if kind == "schedule":
        stored = _decode_schedule(data)
        next_at = None if stored is None else stored[1].next_at
        return None if next_at is None else to_micros(next_at)
    state = decode_gate(data)
    # A gate with holders gets its `due` when they leave.
    if state is None or state.holders or not state.starts:
        return None
    return state.starts[-1] + _LONGEST_SPAN


def _is_idle(data: bytes) -> bool:
    """Whether the state of a gate says nothing."""
    state = decode_gate(data)
    return state is None or not (
        state.holders
        or state.starts
        or state.failures
        or state.has_parked
        or state.breaker is not BreakerState.CLOSED
    )
