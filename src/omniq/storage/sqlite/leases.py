"""Leases: the leases of a store's owners, in a separate database. See `leases.sql`.

An owner loses its tasks in three steps, each a transaction:

    step                                        after a crash here
    1 in this database: the owner's lease has   the owner is fenced here and still holds tasks in
      expired, or it has none: fence it, so     the store. The next recovery finds it by the tasks
      that it cannot renew                      it holds, not by its new fence, and does step 2
    2 in the store: insert its fence, so that   as after step 1
      it cannot claim
    3 in the store: give back its tasks         the recovery is complete

A claim checks the fence in the store, in its own transaction. A claim before step 2 is given back
by step 3; a claim after step 2 is refused.
"""

from __future__ import annotations

from typing import Any

import msgspec

from omniq.clock import Clock
from omniq.models import WorkerInfo
from omniq.serialization import encode_internal, internal_decoder
from omniq.storage.backend import Lease
from omniq.storage.sqlite.connection import Connection, statement
from omniq.storage.sqlite.store_record import read_epoch
from omniq.storage.sqlite.tables import read_array
from omniq.storage.types import Holder, Renewal

FENCE_RETENTION = 86_400_000_000
"""Microseconds for which a fence is stored at least: longer than any request can be delayed.

An owner whose fence was deleted holds no tasks, and cannot renew: only a first lease inserts a row.
"""

_IS_LIVE = "fenced = 0 AND boot_id = :boot AND until > :now AND epoch = :epoch"
"""`:epoch` is the store's."""

_decode_info = internal_decoder(WorkerInfo)


def _times(clock: Clock) -> dict[str, Any]:
    return {"boot": clock.boot_id(), "now": clock.boot_micros(), "at": clock.micros()}


# On the database of the leases


def renew(
    db: Connection, info: WorkerInfo, length: int, clock: Clock, holder: Holder, epoch: int
) -> bool:
    """Extend the lease to `length` microseconds from now, if the owner may have one in the `epoch`."""
    parameters = {
        "owner": info.id,
        "length": length,
        "info": encode_internal(info),
        "epoch": epoch,
        "beat": holder.beat,
    }
    sql = statement("renew" if holder.beat else "first_lease")
    return db.execute(sql, {**parameters, **_times(clock)}).rowcount == 1


def fence(db: Connection, owner: str, clock: Clock, epoch: int, *, retires: bool) -> bool:
    """Fence the owner; False when its lease is valid in the store's epoch, unless it retires."""
    parameters = {
        "owner": owner,
        "old": clock.micros() - FENCE_RETENTION,
        "epoch": epoch,
        **_times(clock),
    }
    sql = f"SELECT 1 FROM omniq_leases WHERE owner = :owner AND {_IS_LIVE}"
    if not retires and db.execute(sql, parameters).fetchone() is not None:
        return False
    db.execute(statement("fence"), parameters)
    # An owner that still holds tasks is found by them, and fenced again.
    db.execute("DELETE FROM omniq_leases WHERE fenced = 1 AND at < :old", parameters)
    return True


def pause(db: Connection, owner: str, clock: Clock, epoch: int, *, paused: bool) -> bool:
    """Store whether the owner is paused; False when it has no valid lease."""
    sql = f"UPDATE omniq_leases SET paused = :paused WHERE owner = :owner AND {_IS_LIVE}"
    parameters = {"owner": owner, "paused": paused, "epoch": epoch, **_times(clock)}
    return db.execute(sql, parameters).rowcount == 1


# On the store


def fence_in_store(db: Connection, owner: str, now: int) -> None:
    """Fence the owner, so that it cannot claim."""
    db.execute("INSERT OR REPLACE INTO omniq_fences VALUES (?, ?)", (owner, now))
    db.execute("DELETE FROM omniq_fences WHERE at < ?", (now - FENCE_RETENTION,))


# On a reader, which has the leases attached


def read_leases(db: Connection, clock: Clock) -> list[Lease]:
    """The leases in owner order, and the owners that hold tasks without one."""
    found = {
        owner: Lease(
            owner,
            msgspec.structs.replace(_decode_info(info), paused=paused == 1),
            is_live == 1,
        )
        for owner, info, paused, is_live in db.execute(
            f"SELECT owner, info, paused, {_IS_LIVE} FROM leases.omniq_leases WHERE fenced = 0",
            {"epoch": read_epoch(db), **_times(clock)},
        )
    }
    for owner in read_array(db, statement("holders")):
        found.setdefault(owner, Lease(owner, None, is_live=False))
    return [found[owner] for owner in sorted(found)]


def read_renewal(db: Connection, owner: str) -> tuple[Renewal, int]:
    """The tasks that the owner holds, which of them were cancelled, whether it is paused; and its beat."""
    held = read_array(db, statement("held_ids"), {"owner": owner})
    sql = "SELECT paused, beat FROM leases.omniq_leases WHERE owner = ?"
    paused, beat = db.execute(sql, (owner,)).fetchone() or (0, 0)
    renewal = Renewal(
        {task_id: token for task_id, token, _ in held},
        frozenset(task_id for task_id, _, is_cancelled in held if is_cancelled),
        paused == 1,
    )
    return renewal, beat
