"""Recovery: gives back the tasks of an owner that retires or whose lease has expired."""

from __future__ import annotations

from omniq.clock import Clock, from_micros
from omniq.models import TaskStatus
from omniq.outcomes import Released, Rescheduled
from omniq.storage import row_rules
from omniq.storage.sqlite import leases, queries, tables
from omniq.storage.sqlite.connection import Connection
from omniq.storage.sqlite.record import Recorder
from omniq.storage.types import GivenBack


def is_fenced(db: Connection, owner: str) -> bool:
    """Whether the owner is fenced, so that it may not claim."""
    sql = "SELECT 1 FROM omniq_fences WHERE owner = ?"
    return db.execute(sql, (owner,)).fetchone() is not None


def _fence(recorder: Recorder, owners: list[str]) -> None:
    recorder.db.execute(
        "INSERT INTO omniq_fences SELECT value, :now FROM json_each(:owners) WHERE true "
        "ON CONFLICT (owner) DO UPDATE SET at = :now",
        {"owners": tables.json_text(owners), "now": recorder.now},
    )
    old = recorder.now - leases.FENCE_RETENTION
    recorder.db.execute("DELETE FROM omniq_fences WHERE at < ?", (old,))


def release_all(recorder: Recorder, owner: str) -> None:
    """Give back the owner's tasks uncharged, and fence it so that it cannot claim again."""
    for row in recorder.held_by(owner):
        token = row.token
        outcome = (
            Rescheduled(row.id, token, from_micros(recorder.now))
            if row.status is TaskStatus.RETRYING
            else Released(row.id, token)
        )
        recorder.apply(row, token, row_rules.settle(row, outcome, recorder.now), None)
    recorder.flush()
    _fence(recorder, [owner])


def check_leases(db: Connection, clock: Clock) -> tuple[list[str], bool]:
    """The owners that hold tasks, and whether any must be fenced. `db` has the leases attached."""
    holders = queries.read_holders(db)
    return holders, leases.needs_fencing(db, holders, clock)


def take_back(recorder: Recorder, owners: list[str], max_crashes: int) -> list[GivenBack]:
    """Fence these owners in the store, and give back their tasks."""
    _fence(recorder, owners)
    given_back: list[GivenBack] = []
    for owner in owners:
        rows = recorder.held_by(owner)
        tokens = {row.id: row.token for row in rows}
        for row, settled in row_rules.give_back(rows, recorder.now, max_crashes):
            recorder.apply(row, tokens[row.id], settled, None)
            given_back.append(GivenBack(row.id, row.func_path, owner, row.status))
    recorder.flush()
    return given_back
