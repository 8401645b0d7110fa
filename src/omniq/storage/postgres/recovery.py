"""Recovery: gives back the tasks of an owner that retires or whose lease has expired."""

from __future__ import annotations

from omniq.clock import from_micros
from omniq.models import TaskStatus
from omniq.outcomes import Released, Rescheduled
from omniq.storage import row_rules
from omniq.storage.postgres.record import Recorder
from omniq.storage.types import GivenBack

_FENCE_RETENTION = 86_400_000_000
"""Microseconds for which a fence is stored at least: longer than any request can be delayed."""


async def _fence(
    recorder: Recorder, owner: str, lease_now: int | None, *, is_retiring: bool
) -> bool:
    sql = recorder.names("SELECT {schema}.fence($1, $2, $3, $4)")
    is_fenced: bool = await recorder.db.fetchval(sql, owner, recorder.now, lease_now, is_retiring)
    return is_fenced


async def release_all(recorder: Recorder, owner: str) -> None:
    """Give back the owner's tasks uncharged, and fence it so that it cannot claim again."""
    await _fence(recorder, owner, None, is_retiring=True)
    for row in await recorder.held_by(owner):
        token = row.token
        outcome = (
            Rescheduled(row.id, token, from_micros(recorder.now))
            if row.status is TaskStatus.RETRYING
            else Released(row.id, token)
        )
        recorder.apply(row, token, row_rules.settle(row, outcome, recorder.now), None)
    await recorder.flush()
    await recorder.notify_work()


async def take_back(
    recorder: Recorder, owner: str, lease_now: int | None, max_crashes: int
) -> list[GivenBack]:
    """Fence the owner and give back its tasks; nothing if it has renewed its lease meanwhile."""
    if not await _fence(recorder, owner, lease_now, is_retiring=False):
        return []
    given_back: list[GivenBack] = []
    rows = await recorder.held_by(owner)
    tokens = {row.id: row.token for row in rows}
    for row, settled in row_rules.give_back(rows, recorder.now, max_crashes):
        recorder.apply(row, tokens[row.id], settled, None)
        given_back.append(GivenBack(row.id, row.func_path, owner, row.status))
    await recorder.flush()
    await recorder.db.execute(
        recorder.names(
            "DELETE FROM {schema}.leases WHERE fenced AND at < $1 AND NOT EXISTS "
            "(SELECT FROM {schema}.live WHERE place = 4 AND live.owner = leases.owner)"
        ),
        recorder.now - _FENCE_RETENTION,
    )
    if given_back:
        await recorder.notify_work()
    return given_back
