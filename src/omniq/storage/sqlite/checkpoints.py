"""Checkpoints: stores the checkpoints and the progress of running tasks."""

from __future__ import annotations

from collections.abc import Sequence

from omniq.models import Progress
from omniq.serialization import encode_internal
from omniq.storage.sqlite.connection import Connection
from omniq.storage.sqlite.record import held_seq, mark_attached


def save_checkpoint(
    db: Connection, owner: str, task_id: str, token: int, checkpoint: bytes, now: int
) -> bool:
    """Store the checkpoint, replacing the last; False when that claim is not the current one."""
    seq = held_seq(db, owner, task_id, token)
    if seq is None:
        return False
    mark_attached(db, [seq])
    db.execute(
        "INSERT OR REPLACE INTO omniq_checkpoints VALUES (?, ?, ?)", (task_id, now, checkpoint)
    )
    return True


def purge_checkpoints(db: Connection, before: int) -> int:
    """Delete checkpoints saved before `before` whose tasks are neither live nor dead letters.

    Returns how many.
    """
    return db.execute(
        "DELETE FROM omniq_checkpoints WHERE saved_at < ? "
        "AND id NOT IN (SELECT id FROM omniq_dead) AND NOT EXISTS (SELECT 1 FROM "
        "omniq_tasks AS tasks JOIN omniq_live AS live ON live.seq = tasks.seq "
        "WHERE tasks.id = omniq_checkpoints.id)",
        (before,),
    ).rowcount


def report_progress(db: Connection, owner: str, reports: Sequence[Progress]) -> None:
    """Store the reports whose claims are current."""
    current = [
        (seq, encode_internal(each))
        for each in reports
        if (seq := held_seq(db, owner, each.task_id, each.token)) is not None
    ]
    mark_attached(db, [seq for seq, _ in current])
    db.executemany("INSERT OR REPLACE INTO omniq_progress VALUES (?, ?)", current)
