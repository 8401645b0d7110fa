"""How an owner's tasks come back: given up by itself, or taken from it when its lease has ended."""

from __future__ import annotations

from omniq.clock import from_micros
from omniq.models import TaskStatus
from omniq.outcomes import Released, Rescheduled
from omniq.storage import row_rules
from omniq.storage.postgres.record import Ledger
from omniq.storage.types import GivenBack

_FENCES_KEPT = 86_400_000_000
"""Microseconds for which a fence is remembered, at least: longer than any request is under way."""


async def _fence(ledger: Ledger, owner: str, lease_now: int | None, *, is_retiring: bool) -> bool:
    sql = ledger.names("SELECT {schema}.fence($1, $2, $3, $4)")
    is_fenced: bool = await ledger.db.fetchval(sql, owner, ledger.now, lease_now, is_retiring)
    return is_fenced


async def release_all(ledger: Ledger, owner: str) -> None:
    """Give back what the owner holds, charged nothing, and let it claim nothing more."""
    await _fence(ledger, owner, None, is_retiring=True)
    for row in await ledger.held_by(owner):
        token = row.token
        outcome = (
            Rescheduled(row.id, token, from_micros(ledger.now))
            if row.status is TaskStatus.RETRYING
            else Released(row.id, token)
        )
        ledger.apply(row, token, row_rules.settle(row, outcome, ledger.now), None)
    await ledger.flush()
    await _tell(ledger)


async def take_back(
    ledger: Ledger, owner: str, lease_now: int | None, max_crashes: int
) -> list[GivenBack]:
    """Fence the owner, unless it has a lease after all, and give back all that it held."""
    if not await _fence(ledger, owner, lease_now, is_retiring=False):
        return []
    given_back: list[GivenBack] = []
    rows = await ledger.held_by(owner)
    tokens = {row.id: row.token for row in rows}
    for row, settled in row_rules.give_back(rows, ledger.now, max_crashes):
        ledger.apply(row, tokens[row.id], settled, None)
        given_back.append(GivenBack(row.id, row.func_path, owner, row.status))
    await ledger.flush()
    await ledger.db.execute(
        ledger.names(
            "DELETE FROM {schema}.leases WHERE fenced AND at < $1 AND NOT EXISTS "
            "(SELECT FROM {schema}.live WHERE place = 4 AND live.owner = leases.owner)"
        ),
        ledger.now - _FENCES_KEPT,
    )
    if given_back:
        await _tell(ledger)
    return given_back


async def _tell(ledger: Ledger) -> None:
    sql = "SELECT {schema}.tell_of_work(0) WHERE {schema}.is_awaited('work')"
    await ledger.db.execute(ledger.names(sql))
