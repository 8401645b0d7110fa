"""Enqueue: inserts tasks in order, and checks ids, unique keys and `max_pending`."""

from __future__ import annotations

from collections.abc import Sequence

from omniq.errors import DuplicateTask, QueueFull
from omniq.storage import row_rules
from omniq.storage.row_rules import Row
from omniq.storage.sqlite import tables
from omniq.storage.sqlite.connection import Connection, StatementRunner
from omniq.storage.sqlite.queries import read_dead_row
from omniq.storage.sqlite.tables import StoredRow


def enqueue(db: StatementRunner, rows: list[Row], now: int, max_pending: int | None) -> list[str]:
    """Insert the rows, or raise `DuplicateTask` or `QueueFull`.

    Returns an id for each row: its own, or that of the task that holds its unique key.
    """
    if max_pending is None and not any(row.unique for row in rows) and _insert(db, rows, now):
        return [row.id for row in rows]
    return _enqueue_with_checks(db, rows, now, max_pending)


def _insert(db: StatementRunner, rows: Sequence[Row], now: int) -> bool:
    """Insert the rows in order; False, and nothing is inserted, when an id is taken."""
    newest = _newest_seq(db)
    for seq, row in enumerate(rows, start=newest + 1):
        row.seq = seq
    if tables.insert_tasks(db, rows) < len(rows):
        db.execute("DELETE FROM omniq_tasks WHERE seq > ?", (newest,))
        return False
    tables.insert_new(db, rows, now)
    return True


def _newest_seq(db: StatementRunner) -> int:
    newest: int = db.execute("SELECT coalesce(max(seq), 0) FROM omniq_tasks").fetchone()[0]
    return newest


def _enqueue_with_checks(
    db: StatementRunner, rows: list[Row], now: int, max_pending: int | None
) -> list[str]:
    known = _nonces(db, [row.id for row in rows], now)
    holders = _holders(db, [row.unique for row in rows if row.unique])
    ids: list[str] = []
    new_rows: list[Row] = []
    for row in rows:
        if row.id in known and known[row.id] != row.nonce:
            raise DuplicateTask(row.id)
        if row.id in known:
            ids.append(row.id)
        elif row.unique in holders:
            ids.append(holders[row.unique])
        else:
            ids.append(row.id)
            new_rows.append(row)
            if row.unique:
                holders[row.unique] = row.id
    check_room(db, len(new_rows), max_pending)
    _delete_expired(db, [row.id for row in new_rows])
    _insert(db, new_rows, now)
    return ids


def _nonces(db: StatementRunner, ids: list[str], now: int) -> dict[str, str]:
    """The nonces of the records that occupy these ids."""
    found = db.execute(
        "SELECT json_group_array(json_array(tasks.id, tasks.nonce)) FROM json_each(:ids) AS wanted "
        "CROSS JOIN omniq_tasks AS tasks ON tasks.id = wanted.value "
        "WHERE tasks.seq NOT IN (SELECT seq FROM omniq_finished WHERE seq = tasks.seq "
        "AND expires_at <= :now) OR EXISTS (SELECT 1 FROM omniq_dead WHERE seq = tasks.seq)",
        {"ids": tables.json_text(ids), "now": now},
    ).fetchone()
    return dict(tables.decode_json(found[0]))


def _holders(db: StatementRunner, keys: list[str]) -> dict[str | None, str]:
    """The ids of the tasks that hold these unique keys."""
    if not keys:
        return {}
    found = db.execute(
        "SELECT json_group_array(json_array(live.unique_key, tasks.id)) FROM json_each(?) AS wanted "
        "CROSS JOIN omniq_live AS live ON live.unique_key = wanted.value "
        "CROSS JOIN omniq_tasks AS tasks ON tasks.seq = live.seq",
        (tables.json_text(keys),),
    ).fetchone()
    return dict(tables.decode_json(found[0]))


def _delete_expired(db: StatementRunner, ids: list[str]) -> None:
    """Delete the expired records of these ids: they do not occupy their ids any more."""
    seqs = tables.read_array(
        db,
        "SELECT json_group_array(tasks.seq) FROM json_each(:ids) AS wanted "
        "CROSS JOIN omniq_tasks AS tasks ON tasks.id = wanted.value",
        {"ids": tables.json_text(ids)},
    )
    if seqs:
        tables.delete(db, "omniq_finished", seqs)
        tables.delete(db, "omniq_tasks", seqs)


def check_room(db: StatementRunner, more: int, max_pending: int | None) -> None:
    """Raise `QueueFull` when that many more tasks would exceed `max_pending`."""
    if max_pending is None or not more:
        return
    (waiting,) = db.execute(
        "SELECT (SELECT count(*) FROM omniq_live) - (SELECT count(*) FROM omniq_live WHERE place = 4)"
    ).fetchone()
    if waiting + more > max_pending:
        raise QueueFull(max_pending)


def enqueue_unless_duplicate(db: Connection, row: Row, now: int, max_pending: int | None) -> None:
    """Insert the row, unless its id is stored or its unique key is held."""
    if _nonces(db, [row.id], now) or (row.unique and _holders(db, [row.unique])):
        return
    check_room(db, 1, max_pending)
    _delete_expired(db, [row.id])
    _insert(db, [row], now)


def retry_dead(
    db: Connection,
    task_id: str,
    now: int,
    *,
    body: bytes | None,
    from_start: bool,
    max_pending: int | None,
) -> bool:
    """Put a dead letter's task back into its queue; False when there is no such dead letter."""
    row = read_dead_row(db, task_id, now)
    if row is None:
        return False
    check_room(db, 1, max_pending)
    if row.unique and (holders := _holders(db, [row.unique])):
        raise DuplicateTask(holders[row.unique])
    row_rules.retry_dead(row, now)
    tables.delete(db, "omniq_dead", [row.seq])
    tables.delete(db, "omniq_finished", [row.seq])
    if from_start:
        db.execute("DELETE FROM omniq_checkpoints WHERE id = ?", (task_id,))
    # A new `seq`, behind those of all other tasks in the queue.
    old, row.seq = row.seq, _newest_seq(db) + 1
    db.execute("UPDATE omniq_tasks SET seq = ? WHERE seq = ?", (row.seq, old))
    if body is not None:
        db.execute("UPDATE omniq_tasks SET body = ? WHERE seq = ?", (body, row.seq))
    # Marked as attached, because the dead letter may have a checkpoint.
    tables.save_live(db, [StoredRow(row, True)], now)
    return True
