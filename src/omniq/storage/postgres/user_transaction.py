"""Enqueue inside somebody else's transaction, on whatever connection they have.

Known are asyncpg, psycopg 3 (blocking and not) and SQLAlchemy's connections and sessions over any
of them. None is imported: what is passed in says itself where it comes from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from omniq.errors import InvalidTask, StorageError

Run = Callable[[str, str | None], Any]
"""Runs a statement with at most one parameter, written as {}; the first value, maybe to be awaited."""

_SAVEPOINT = "omniq_enqueue"
_NOT_IN_A_TRANSACTION = "25P01"
_TRANSACTION_HAS_FAILED = "25P02"
_NOT_THERE = {"3F000", "42883", "42P01", "42501"}


async def call(connection: object, function: str, request: str) -> dict[str, Any]:
    """What the function answers to the request, as a part of the connection's transaction.

    Never waits for anything when the connection is a blocking one.
    """
    run = await _runner(connection)
    await _begin(run)
    try:
        text = await _done(run(f"SELECT {function}({{}})", request))
    except Exception as error:
        await _done(run(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}", None))
        await _done(run(f"RELEASE SAVEPOINT {_SAVEPOINT}", None))
        if _state(error) in _NOT_THERE:
            raise InvalidTask(
                "the connection leads to another database, or may not use this store: "
                f"{str(error).splitlines()[0]}"
            ) from error
        raise StorageError(f"enqueue on the given connection: {error}") from error
    await _done(run(f"RELEASE SAVEPOINT {_SAVEPOINT}", None))
    answer: dict[str, Any] = msgspec.json.decode(text)
    if answer["refusal"] == "store":
        raise InvalidTask("the connection leads to another database than this storage's")
    return answer


async def _begin(run: Run) -> None:
    try:
        # Only a transaction has savepoints: this finds out, too, whether there is one.
        await _done(run(f"SAVEPOINT {_SAVEPOINT}", None))
    except Exception as error:
        if _state(error) == _NOT_IN_A_TRANSACTION:
            raise InvalidTask(
                "the connection has no transaction open, and would commit by itself; begin one"
            ) from error
        if _state(error) == _TRANSACTION_HAS_FAILED:
            raise InvalidTask("the connection's transaction has failed; roll it back") from error
        raise StorageError(f"enqueue on the given connection: {error}") from error


async def _runner(connection: Any) -> Run:
    roots = {kind.__module__.partition(".")[0] for kind in type(connection).__mro__}
    if "asyncpg" in roots and hasattr(connection, "fetchval"):
        return _asyncpg_runner(connection)
    if "psycopg" in roots and hasattr(connection, "cursor"):
        return _psycopg_runner(connection)
    if "sqlalchemy" in roots:
        kinds = {kind.__name__ for kind in type(connection).__mro__}
        if kinds & {"Session", "AsyncSession"}:
            # Asked for its connection, it begins its transaction.
            connection = await _done(connection.connection())
        if hasattr(connection, "exec_driver_sql"):
            return _sqlalchemy_runner(connection)
    raise InvalidTask(
        f"connection of type {type(connection).__module__}.{type(connection).__qualname__}: expected "
        "one of asyncpg, psycopg or SQLAlchemy to the PostgreSQL database that holds the tasks"
    )


def _asyncpg_runner(connection: Any) -> Run:
    if not connection.is_in_transaction():
        raise InvalidTask(
            "the connection has no transaction open, and would commit by itself; begin one"
        )

    def run(sql: str, parameter: str | None) -> Any:
        if parameter is None:
            return connection.execute(sql)
        return connection.fetchval(sql.format("$1"), parameter)

    return run


def _psycopg_runner(connection: Any) -> Run:
    def run(sql: str, parameter: str | None) -> Any:
        if parameter is None:
            return connection.execute(sql)
        return _first(connection.execute(sql.format("%s::text"), (parameter,)))

    return run


def _sqlalchemy_runner(connection: Any) -> Run:
    dialect = connection.dialect
    if dialect.name != "postgresql":
        raise InvalidTask(f"the connection is one to {dialect.name}, not to PostgreSQL")
    place = "$1" if dialect.paramstyle == "numeric_dollar" else "%s"

    def run(sql: str, parameter: str | None) -> Any:
        if parameter is None:
            return connection.exec_driver_sql(sql)
        return _first(connection.exec_driver_sql(sql.format(f"{place}::text"), (parameter,)))

    return run


def _first(cursor: Any) -> Any:
    """The first value of the first row, now or when it is awaited."""
    if inspect.isawaitable(cursor):
        return _first_later(cursor)
    return _value(cursor.fetchone())


async def _first_later(awaited: Any) -> Any:
    cursor = await awaited
    return _value(await _done(cursor.fetchone()))


def _value(row: Any) -> Any:
    # Whoever made the connection may have chosen what rows look like.
    if isinstance(row, str):
        return row
    return next(iter(row.values())) if isinstance(row, Mapping) else row[0]


async def _done(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _state(error: BaseException) -> str | None:
    """The server's code for an error, also when it is wrapped."""
    for each in (error, getattr(error, "orig", None), error.__cause__):
        for name in ("sqlstate", "pgcode"):
            state = getattr(each, name, None)
            if isinstance(state, str):
                return state
    return None
