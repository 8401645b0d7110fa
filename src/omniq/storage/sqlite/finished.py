"""How records go: results past their time, dead letters that nobody wants any more."""

from __future__ import annotations

from omniq.storage.sqlite import tables
from omniq.storage.sqlite.connection import Connection


def find(db: Connection, table: str, condition: str, parameter: int | str) -> list[int]:
    """The `seq` of the lines of a table for which the condition holds."""
    sql = f"SELECT json_group_array(seq) FROM {table} WHERE {condition}"
    (text,) = db.execute(sql, (parameter,)).fetchone()
    seqs: list[int] = tables.decode_json(text)
    return seqs


def purge(db: Connection, seqs: list[int], condition: str, instant: int) -> int:
    """Forget finished tasks for which the condition still holds; how many."""
    purged = db.execute(
        f"DELETE FROM omniq_finished WHERE seq IN (SELECT value FROM json_each(?)) AND {condition}",
        (tables.json_text(seqs), instant),
    ).rowcount
    _forget(db, seqs)
    return purged


def bury(db: Connection, seqs: list[int], before: int | None = None) -> int:
    """Forget dead letters, and their checkpoints; how many. `before`: only those that failed by then."""
    parameters = {"seqs": tables.json_text(seqs), "before": before}
    condition = "seq IN (SELECT value FROM json_each(:seqs)) AND (:before IS NULL OR last_failure < :before)"
    db.execute(
        f"DELETE FROM omniq_checkpoints WHERE id IN (SELECT id FROM omniq_dead WHERE {condition})",
        parameters,
    )
    buried = db.execute(f"DELETE FROM omniq_dead WHERE {condition}", parameters).rowcount
    _forget(db, seqs)
    return buried


def _forget(db: Connection, seqs: list[int]) -> None:
    """Delete what is left of tasks that are neither live nor finished nor dead letters."""
    kept = " ".join(
        f"AND NOT EXISTS (SELECT 1 FROM {table} AS kept WHERE kept.seq = omniq_tasks.seq)"
        for table in ("omniq_live", "omniq_finished", "omniq_dead")
    )
    db.execute(
        f"DELETE FROM omniq_tasks WHERE seq IN (SELECT value FROM json_each(?)) {kept}",
        (tables.json_text(seqs),),
    )
