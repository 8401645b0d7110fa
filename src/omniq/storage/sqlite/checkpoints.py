"""What is attached to a task while it runs: its checkpoint, and its progress."""

from __future__ import annotations

from collections.abc import Sequence

from omniq.models import Progress
from omniq.serialization import encode_internal
from omniq.storage.sqlite.connection import Connection
from omniq.storage.sqlite.record import attach, is_held


def save_checkpoint(
    db: Connection, owner: str, task_id: str, token: int, checkpoint: bytes, now: int
) -> bool:
    """Keep it in place of the one before; False when that claim is not the current one."""
    seq = is_held(db, owner, task_id, token)
    if seq is None:
        return False
    attach(db, [seq])
    db.execute(
        "INSERT OR REPLACE INTO omniq_checkpoints VALUES (?, ?, ?)", (task_id, now, checkpoint)
    )
    return True


def purge_checkpoints(db: Connection, before: int) -> int:
    """Forget those saved before then whose task is neither live nor a dead letter; how many."""
    return db.execute(
        "DELETE FROM omniq_checkpoints WHERE saved_at < ? "
        "AND id NOT IN (SELECT id FROM omniq_dead) AND NOT EXISTS (SELECT 1 FROM "
        "omniq_tasks AS tasks JOIN omniq_live AS live ON live.seq = tasks.seq "
        "WHERE tasks.id = omniq_checkpoints.id)",
        (before,),
    ).rowcount


def report_progress(db: Connection, owner: str, reports: Sequence[Progress]) -> None:
    """Keep the reports whose claims are current."""
    kept = [
        (seq, encode_internal(each))
        for each in reports
        if (seq := is_held(db, owner, each.task_id, each.token)) is not None
    ]
    attach(db, [seq for seq, _ in kept])
    db.executemany("INSERT OR REPLACE INTO omniq_progress VALUES (?, ?)", kept)
