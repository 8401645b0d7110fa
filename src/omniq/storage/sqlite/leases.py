"""Leases: the leases of a store's owners, in a separate database. See `leases.sql`.

An owner loses its tasks in two steps, each a transaction:

    step                                        after a crash here
    1 in this database: the owner's lease has   the owner is fenced here and still holds tasks in
      expired, or it has none: fence it, so     the store. The next recovery finds it by the tasks
      that it cannot renew                      it holds, not by its new fence, and does step 2
    2 in the store: insert its fence, and       the recovery is complete
      give back its tasks

A claim checks the fence in the store, in its own transaction. A claim before step 2 is given back
by step 2; a claim after step 2 is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from omniq.clock import Clock
from omniq.errors import LeaseLost
from omniq.models import WorkerInfo
from omniq.serialization import encode_internal, internal_decoder
from omniq.storage.sqlite.connection import Connection
from omniq.storage.sqlite.tables import json_text, read_array

FENCE_RETENTION = 86_400_000_000
"""Microseconds for which a fence is stored at least: longer than any request can be delayed.

An owner whose fence was deleted holds no tasks, and cannot renew: only a first lease inserts a row.
"""

_decode_info = internal_decoder(WorkerInfo)


def renew(db: Connection, info: WorkerInfo, lease: int, clock: Clock, *, is_first: bool) -> None:
    """Extend the lease to `lease` microseconds from now; `LeaseLost` when the owner was fenced."""
    parameters: dict[str, Any] = {
        "owner": info.id,
        "boot": clock.boot_id(),
        "until": clock.boot_micros() + lease,
        "at": clock.micros(),
        "info": encode_internal(info),
    }
    if is_first:
        sql = (
            "INSERT INTO omniq_leases VALUES (:owner, :boot, :until, 0, :at, :info) "
            "ON CONFLICT (owner) DO UPDATE SET boot_id = :boot, until = :until, at = :at, info = :info "
            "WHERE fenced = 0"
        )
    else:
        sql = (
            "UPDATE omniq_leases SET boot_id = :boot, until = :until, at = :at, info = :info "
            "WHERE owner = :owner AND fenced = 0"
        )
    if db.execute(sql, parameters).rowcount != 1:
        raise LeaseLost(info.id)


def set_paused(db: Connection, owner: str, clock: Clock, *, paused: bool) -> bool:
    """Store whether the owner is paused; False when it has no valid lease."""
    is_live = db.execute(
        "SELECT 1 FROM omniq_leases WHERE owner = ? AND fenced = 0 AND boot_id = ? AND until > ?",
        (owner, clock.boot_id(), clock.boot_micros()),
    ).fetchone()
    if is_live is None:
        return False
    sql = (
        "INSERT OR IGNORE INTO omniq_resting VALUES (?)"
        if paused
        else "DELETE FROM omniq_resting WHERE owner = ?"
    )
    db.execute(sql, (owner,))
    return True


def is_paused(db: Connection, owner: str) -> bool:
    """Whether the owner is paused. `db` has the leases attached."""
    sql = "SELECT 1 FROM leases.omniq_resting WHERE owner = ?"
    return db.execute(sql, (owner,)).fetchone() is not None


def _forget_pauses(db: Connection) -> None:
    """Delete the pauses of owners without a lease: a pause ends with the lease."""
    db.execute(
        "DELETE FROM omniq_resting "
        "WHERE owner NOT IN (SELECT owner FROM omniq_leases WHERE fenced = 0)"
    )


def needs_fencing(db: Connection, holders: Iterable[str], clock: Clock) -> bool:
    """Whether a lease has expired, or a holder has none. `db` has the leases attached."""
    live = {
        owner
        for owner, boot, until, fenced in db.execute(
            "SELECT owner, boot_id, until, fenced FROM leases.omniq_leases"
        )
        if not fenced and boot == clock.boot_id() and until > clock.boot_micros()
    }
    (unfenced,) = db.execute("SELECT count(*) FROM leases.omniq_leases WHERE fenced = 0").fetchone()
    return unfenced > len(live) or not live.issuperset(holders)


def fence_expired(db: Connection, holders: list[str], clock: Clock) -> tuple[list[str], list[str]]:
    """Fence every owner without a valid lease, and delete old fences.

    Returns the owners fenced now, and those of `holders` that are fenced.
    """
    parameters = {"boot": clock.boot_id(), "now": clock.boot_micros(), "at": clock.micros()}
    dead = db.execute(
        "UPDATE omniq_leases SET fenced = 1, at = :at "
        "WHERE fenced = 0 AND (boot_id <> :boot OR until <= :now) RETURNING owner",
        parameters,
    ).fetchall()
    db.execute(
        "INSERT INTO omniq_leases SELECT value, '', 0, 1, :at, NULL FROM json_each(:holders) "
        "WHERE true ON CONFLICT (owner) DO NOTHING",
        {"at": parameters["at"], "holders": json_text(holders)},
    )
    db.execute(
        "DELETE FROM omniq_leases WHERE fenced = 1 AND at < :old "
        "AND owner NOT IN (SELECT value FROM json_each(:holders))",
        {"old": clock.micros() - FENCE_RETENTION, "holders": json_text(holders)},
    )
    _forget_pauses(db)
    fenced = read_array(
        db,
        "SELECT json_group_array(owner) FROM omniq_leases "
        "WHERE fenced = 1 AND owner IN (SELECT value FROM json_each(:holders))",
        {"holders": json_text(holders)},
    )
    return [owner for (owner,) in dead], fenced


def retire(db: Connection, owner: str, clock: Clock) -> None:
    """End the lease of an owner that retires."""
    db.execute(
        "UPDATE omniq_leases SET fenced = 1, at = ? WHERE owner = ?", (clock.micros(), owner)
    )
    _forget_pauses(db)


def read_workers(db: Connection, clock: Clock) -> list[WorkerInfo]:
    """Workers with a valid lease, in id order. `db` has the leases attached."""
    found = db.execute(
        "SELECT info, owner IN (SELECT owner FROM leases.omniq_resting) FROM leases.omniq_leases "
        "WHERE fenced = 0 AND boot_id = ? AND until > ? ORDER BY owner",
        (clock.boot_id(), clock.boot_micros()),
    )
    return [
        msgspec.structs.replace(_decode_info(info), paused=paused == 1) for info, paused in found
    ]
