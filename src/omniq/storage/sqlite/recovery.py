"""How an owner's tasks come back: given up by itself, or taken from it when its lease has ended."""

from __future__ import annotations

from omniq.clock import Clock, from_micros
from omniq.models import TaskStatus
from omniq.outcomes import Released, Rescheduled
from omniq.storage import row_rules
from omniq.storage.sqlite import leases, queries, tables
from omniq.storage.sqlite.connection import Connection
from omniq.storage.sqlite.record import Ledger
from omniq.storage.types import GivenBack


def is_fenced(db: Connection, owner: str) -> bool:
    """Whether the owner may claim nothing more."""
    sql = "SELECT 1 FROM omniq_fences WHERE owner = ?"
    return db.execute(sql, (owner,)).fetchone() is not None


def _fence(ledger: Ledger, owners: list[str]) -> None:
    ledger.db.execute(
        "INSERT INTO omniq_fences SELECT value, :now FROM json_each(:owners) WHERE true "
        "ON CONFLICT (owner) DO UPDATE SET at = :now",
        {"owners": tables.json_text(owners), "now": ledger.now},
    )
    old = ledger.now - leases.FENCES_KEPT
    ledger.db.execute("DELETE FROM omniq_fences WHERE at < ?", (old,))


def release_all(ledger: Ledger, owner: str) -> None:
    """Give back what the owner holds, charged nothing, and let it claim nothing more."""
    for row in ledger.held_by(owner):
        token = row.token
        outcome = (
            Rescheduled(row.id, token, from_micros(ledger.now))
            if row.status is TaskStatus.RETRYING
            else Released(row.id, token)
        )
        ledger.apply(row, token, row_rules.settle(row, outcome, ledger.now), None)
    ledger.flush()
    _fence(ledger, [owner])


def look_for_the_dead(db: Connection, clock: Clock) -> tuple[list[str], bool]:
    """Who holds something, and whether anybody is to be fenced. `db` has the leases attached."""
    holders = queries.read_holders(db)
    return holders, leases.needs_fencing(db, holders, clock)


def take_back(ledger: Ledger, owners: list[str], max_crashes: int) -> list[GivenBack]:
    """Note the fences of these owners and give back all that they held."""
    _fence(ledger, owners)
    given_back: list[GivenBack] = []
    for owner in owners:
        rows = ledger.held_by(owner)
        tokens = {row.id: row.token for row in rows}
        for row, settled in row_rules.give_back(rows, ledger.now, max_crashes):
            ledger.apply(row, tokens[row.id], settled, None)
            given_back.append(GivenBack(row.id, row.func_path, owner, row.status))
    ledger.flush()
    return given_back
