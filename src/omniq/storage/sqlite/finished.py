"""Finished: deletes the records of finished tasks, and dead letters."""

from __future__ import annotations

from omniq.storage.sqlite import tables
from omniq.storage.sqlite.connection import Connection


def find(db: Connection, table: str, condition: str, parameter: int | str) -> list[int]:
    """Return the `seq` of the rows of a table that match the condition."""
    sql = f"SELECT json_group_array(seq) FROM {table} WHERE {condition}"
    (text,) = db.execute(sql, (parameter,)).fetchone()
    seqs: list[int] = tables.decode_json(text)
    return seqs


def purge(db: Connection, seqs: list[int], condition: str, instant: int) -> int:
    """Delete the finished tasks that still match the condition; returns how many."""
    purged = db.execute(
        f"DELETE FROM omniq_finished WHERE seq IN (SELECT value FROM json_each(?)) AND {condition}",
        (tables.json_text(seqs), instant),
    ).rowcount
    _delete_without_records(db, seqs)
    return purged


def delete_dead(db: Connection, seqs: list[int], before: int | None = None) -> int:
    """Delete dead letters and their checkpoints; returns how many.

    With `before`, only those whose last failure is older.
    """
    parameters = {"seqs": tables.json_text(seqs), "before": before}
    condition = "seq IN (SELECT value FROM json_each(:seqs)) AND (:before IS NULL OR last_failure < :before)"
    db.execute(
        f"DELETE FROM omniq_checkpoints WHERE id IN (SELECT id FROM omniq_dead WHERE {condition})",
        parameters,
    )
    deleted = db.execute(f"DELETE FROM omniq_dead WHERE {condition}", parameters).rowcount
    _delete_without_records(db, seqs)
    return deleted


def _delete_without_records(db: Connection, seqs: list[int]) -> None:
    """Delete from `omniq_tasks` those that are neither live nor finished nor dead letters."""
    has_no_record = " ".join(
        f"AND NOT EXISTS (SELECT 1 FROM {table} AS state WHERE state.seq = omniq_tasks.seq)"
        for table in ("omniq_live", "omniq_finished", "omniq_dead")
    )
    db.execute(
        f"DELETE FROM omniq_tasks WHERE seq IN (SELECT value FROM json_each(?)) {has_no_record}",
        (tables.json_text(seqs),),
    )
