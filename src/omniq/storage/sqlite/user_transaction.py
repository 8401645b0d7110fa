"""User transaction: sections inside a caller's transaction, on the caller's connection.

The connection must lead to the same file. Its row factory, the way it begins transactions and its
timeout are the caller's choice, and are not changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from omniq.errors import InvalidTask, StorageError
from omniq.storage.sqlite.connection import (
    LARGEST,
    Connection,
    Database,
    DriverError,
    MisuseError,
    StatementResult,
    StatementRunner,
    is_busy,
)

_T = TypeVar("_T")
_Work = Callable[[StatementRunner], _T]


class _DriverConnection:
    """A connection of sqlite3."""

    def __init__(self, database: Database, connection: Connection) -> None:
        self._largest = str(database.largest)
        self.driver = connection

    def execute(self, sql: str, parameters: Any = (), /) -> StatementResult:
        # Not `connection.cursor()`, which the caller may have overridden.
        cursor = Connection.cursor(self.driver)
        cursor.row_factory = None
        return cursor.execute(sql.replace(LARGEST, self._largest), parameters)


class _SQLAlchemyConnection:
    """A connection of SQLAlchemy."""

    def __init__(self, database: Database, connection: Any) -> None:
        self._largest = str(database.largest)
        self._connection = connection
        if connection.dialect.name != "sqlite":
            raise InvalidTask(
                f"connection: it leads to {connection.dialect.name}, but the tasks are in SQLite"
            )
        self.driver: Connection = connection.connection.driver_connection

    def execute(self, sql: str, parameters: Any = (), /) -> StatementResult:
        if isinstance(parameters, list):
            # SQLAlchemy takes a list as many sets of parameters.
            parameters = tuple(parameters)
        sql = sql.replace(LARGEST, self._largest)
        result: StatementResult = self._connection.exec_driver_sql(sql, parameters)
        return result


async def run_within(database: Database, connection: object, work: _Work[_T]) -> _T:
    """Run `work` on that connection. With a blocking connection this never suspends."""
    given: Any = connection
    if isinstance(connection, Connection):
        return _run_in_transaction(database, _DriverConnection(database, connection), work)
    if any(kind.__module__.startswith("sqlalchemy.") for kind in type(connection).__mro__):
        run = partial(_run_with_sqlalchemy, database, work)
        if hasattr(connection, "run_sync"):
            result: _T = await given.run_sync(run)
            return result
        if hasattr(connection, "exec_driver_sql") or callable(getattr(given, "connection", None)):
            return run(given)
    raise InvalidTask(
        f"connection: expected one of sqlite3, or a Connection or Session of SQLAlchemy, not "
        f"{type(connection).__module__}.{type(connection).__qualname__}"
    )


def _run_with_sqlalchemy(database: Database, work: _Work[_T], given: Any) -> _T:
    connection = given if hasattr(given, "exec_driver_sql") else given.connection()
    return _run_in_transaction(database, _SQLAlchemyConnection(database, connection), work)


def _run_in_transaction(
    database: Database, db: _DriverConnection | _SQLAlchemyConnection, work: _Work[_T]
) -> _T:
    driver = db.driver
    texts, driver.text_factory = driver.text_factory, str
    try:
        _check_file(database, db)
        is_begun_here = not driver.in_transaction
        if is_begun_here:
            _check_no_autocommit(driver)
            # The driver begins a transaction at the first write, but not at a savepoint.
            db.execute("BEGIN IMMEDIATE")
        return _run_in_savepoint(db, work, is_begun_here=is_begun_here)
    except Exception as error:
        _raise_cause(database, error)
        raise
    finally:
        driver.text_factory = texts


def _run_in_savepoint(
    db: _DriverConnection | _SQLAlchemyConnection, work: _Work[_T], *, is_begun_here: bool
) -> _T:
    """Run `work` inside a savepoint, so that a failure leaves the transaction as it was."""
    db.execute("SAVEPOINT omniq_enqueue")
    try:
        result = work(db)
        db.execute("RELEASE omniq_enqueue")
    except BaseException:
        # Unless SQLite itself has rolled back, as it does when the disk is full.
        if db.driver.in_transaction:
            db.execute("ROLLBACK TO omniq_enqueue")
            db.execute("RELEASE omniq_enqueue")
            if is_begun_here:
                db.execute("ROLLBACK")
        raise
    return result


def _check_file(database: Database, db: _DriverConnection | _SQLAlchemyConnection) -> None:
    database.check_unmoved()
    _, _, path = db.execute("PRAGMA database_list").fetchone()
    if not database.is_same_file(path):
        raise InvalidTask(
            f"connection: its main database is {os.fspath(path) or 'in memory'}, but the tasks are "
            f"in {database.path}; only a connection to the same file can commit both together"
        )


def _check_no_autocommit(driver: Connection) -> None:
    if driver.isolation_level is None or getattr(driver, "autocommit", False) is True:
        raise InvalidTask(
            "connection: it commits every statement by itself (autocommit), and no transaction is "
            "open; begin one first"
        )


def _raise_cause(database: Database, error: Exception) -> None:
    """Raise an error that says what to do; SQLAlchemy wraps that of the driver as `orig`."""
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
        raise database.wrap_error(cause) from error
