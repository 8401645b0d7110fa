"""Damaged rows: sets aside the rows that the CHECKs of `schema.sql` refuse, after one made a call fail.

A program that writes to the file can turn CHECKs off, and the tasks of a store that was upgraded have
none. To search for such rows before they do harm would cost more than the calls themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from omniq.errors import OmniqError
from omniq.storage.sqlite.connection import Connection, DriverError, is_busy, statement

_LONGEST = 1_000
"""Characters of a value that are set aside, at most."""

_CREATE = 'CREATE TABLE IF NOT EXISTS omniq_damaged ("table" TEXT NOT NULL, columns TEXT NOT NULL)'
_PARTS = ("omniq_live", "omniq_finished", "omniq_dead")


def may_be_damage(error: Exception) -> bool:
    """Whether a row with a value that omniq never writes may be the cause of the error."""
    if isinstance(error, OmniqError):
        cause = error.__cause__
        return isinstance(cause, DriverError | OverflowError) and not is_busy(cause)
    return isinstance(error, ValueError | TypeError | LookupError | OverflowError | AttributeError)


def set_aside(db: Connection) -> int:
    """Move the damaged rows to the table `omniq_damaged`; returns how many there were."""
    moved = 0
    for table, checks in _checks().items():
        refused = " OR ".join(f"NOT ({check})" for check in checks)
        if table == "omniq_documents":
            # Without the record of the store, its workers would think that it has lost everything.
            refused = f"kind IS NOT 'store' AND ({refused})"
        if db.execute(f"SELECT 1 FROM {table} WHERE {refused} LIMIT 1").fetchone() is None:
            continue
        db.execute(_CREATE)
        names = [name for _, name, *_ in db.execute(f"PRAGMA table_info({table})").fetchall()]
        row = " || ', ' || ".join(f'substr(quote("{name}"), 1, {_LONGEST})' for name in names)
        db.execute(
            f"INSERT INTO omniq_damaged SELECT '{table}', {row} FROM {table} WHERE {refused}"
        )
        moved += db.execute(f"DELETE FROM {table} WHERE {refused}").rowcount
    for part in _PARTS if moved else ():
        db.execute(f"DELETE FROM {part} WHERE seq NOT IN (SELECT seq FROM omniq_tasks)")
    return moved


@cache
def _checks() -> dict[str, list[str]]:
    """The conditions of each table."""
    found: dict[str, list[str]] = {}
    for command in statement("schema").split(";"):
        words = command.replace("IF NOT EXISTS", "").split()
        if words[:2] == ["CREATE", "TABLE"]:
            checks = list(_conditions(command))
            if checks:
                found[words[2]] = checks
    return found


def _conditions(command: str) -> Iterator[str]:
    """What is in the parentheses behind each CHECK.

    >>> list(_conditions("a TEXT CHECK (a IN (0, 1)), b TEXT CHECK (b > 1)"))
    ['a IN (0, 1)', 'b > 1']
    """
    _, *parts = command.split("CHECK (")
    for part in parts:
        depth = 1
        for position, character in enumerate(part):
            depth += (character == "(") - (character == ")")
            if depth == 0:
                yield part[:position]
                break
