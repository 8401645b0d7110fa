"""Enqueues on a connection that somebody else opened, as a part of the transaction they are in.

Nothing is known of such a connection but that it reaches the same file: how it forms rows, when it
begins transactions and how long it waits are its owner's choice, and stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from omniq.errors import InvalidTask, StorageError
from omniq.storage.sqlite.connection import (
    Connection,
    Database,
    DriverError,
    MisuseError,
    Statements,
    is_busy,
)

_Enqueue = Callable[[Statements], list[str]]


class _Answer(msgspec.Struct, frozen=True):
    row: Any
    rowcount: int

    def fetchone(self) -> Any:
        return self.row


class _Driver(Protocol):
    """What a connection of the driver says of itself; `autocommit` since Python 3.12."""

    @property
    def in_transaction(self) -> bool: ...

    @property
    def isolation_level(self) -> str | None: ...


class _Plain:
    """A connection of the driver itself."""

    def __init__(self, connection: Connection) -> None:
        self.driver: _Driver = connection
        self._connection = connection

    def execute(self, sql: str, parameters: Any = (), /) -> _Answer:
        connection = self._connection
        texts, connection.text_factory = connection.text_factory, str
        try:
            # Not `connection.cursor()`: it may be a class of the caller's own.
            cursor = Connection.cursor(connection)
            cursor.row_factory = None
            cursor.execute(sql, parameters)
            row = None if cursor.description is None else cursor.fetchone()
            return _Answer(row, cursor.rowcount)
        finally:
            connection.text_factory = texts


class _Alchemy:
    """A connection of SQLAlchemy, which begins its transactions in its own way."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        if connection.dialect.name != "sqlite":
            raise InvalidTask(
                f"connection: it leads to {connection.dialect.name}, and the tasks are in SQLite"
            )
        self.driver: _Driver = connection.connection.driver_connection

    def execute(self, sql: str, parameters: Any = (), /) -> _Answer:
        if isinstance(parameters, list):
            # For SQLAlchemy a list is many sets of parameters.
            parameters = tuple(parameters)
        result = self._connection.exec_driver_sql(sql, parameters)
        return _Answer(result.fetchone() if result.returns_rows else None, result.rowcount)


async def enqueue_within(database: Database, connection: object, enqueue: _Enqueue) -> list[str]:
    """Enqueue on that connection. Suspends only if the connection is one for async code."""
    given: Any = connection
    if isinstance(connection, Connection):
        return _within(database, _Plain(connection), enqueue)
    if any(kind.__module__.startswith("sqlalchemy.") for kind in type(connection).__mro__):
        if hasattr(connection, "run_sync"):
            ids: list[str] = await given.run_sync(lambda inner: _with(database, inner, enqueue))
            return ids
        if hasattr(connection, "exec_driver_sql") or callable(getattr(given, "connection", None)):
            return _with(database, given, enqueue)
    raise InvalidTask(
        f"connection: expected one of sqlite3, or a Connection or Session of SQLAlchemy, not "
        f"{type(connection).__module__}.{type(connection).__qualname__}"
    )


def _with(database: Database, given: Any, enqueue: _Enqueue) -> list[str]:
    connection = given if hasattr(given, "exec_driver_sql") else given.connection()
    return _within(database, _Alchemy(connection), enqueue)


def _within(database: Database, db: _Plain | _Alchemy, enqueue: _Enqueue) -> list[str]:
    try:
        _check_file(database, db)
        is_ours = not db.driver.in_transaction
        if is_ours:
            _check_commits(db.driver)
            # The driver would begin one with the first write, but not with a savepoint.
            db.execute("BEGIN IMMEDIATE")
        return _apart(db, enqueue, is_ours=is_ours)
    except Exception as error:
        _explain(database, error)
        raise


def _apart(db: _Plain | _Alchemy, enqueue: _Enqueue, *, is_ours: bool) -> list[str]:
    """Enqueue such that a failure leaves the transaction as it was."""
    db.execute("SAVEPOINT omniq_enqueue")
    try:
        ids = enqueue(db)
        db.execute("RELEASE omniq_enqueue")
    except BaseException:
        # Unless SQLite itself has undone everything, as it does when the disk is full.
        if db.driver.in_transaction:
            db.execute("ROLLBACK TO omniq_enqueue")
            db.execute("RELEASE omniq_enqueue")
            if is_ours:
                db.execute("ROLLBACK")
        raise
    return ids


def _check_file(database: Database, db: _Plain | _Alchemy) -> None:
    database.check_unmoved()
    _, _, path = db.execute("PRAGMA database_list").fetchone()
    if not database.is_at(path):
        raise InvalidTask(
            f"connection: its main database is {os.fspath(path) or 'in memory'}, and the tasks are "
            f"in {database.path}; only one and the same file can commit both together"
        )


def _check_commits(driver: _Driver) -> None:
    if driver.isolation_level is None or getattr(driver, "autocommit", False) is True:
        raise InvalidTask(
            "connection: it commits every statement by itself (autocommit), and no transaction is "
            "open; begin one first"
        )


def _explain(database: Database, error: Exception) -> None:
    """Raise what the driver's error means; SQLAlchemy has it as `orig`."""
    cause = getattr(error, "orig", error)
    if isinstance(cause, MisuseError):
        raise InvalidTask(f"connection: {cause}") from error
    if is_busy(cause):
        raise StorageError(
            f"SQLite database {database.path}: another connection was writing, or has written since "
            "this transaction first read; begin it with BEGIN IMMEDIATE, and connect with a "
            "longer timeout"
        ) from error
    if isinstance(cause, DriverError):
        raise database.explained(cause) from error
