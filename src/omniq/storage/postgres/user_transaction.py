"""User transaction: enqueues inside a caller's transaction, on the caller's connection.

Supported are asyncpg, psycopg 3 (blocking and async), and SQLAlchemy's connections and sessions over
either of them. None of them is imported: the type of the connection shows which one it is.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from omniq.clock import Clock
from omniq.errors import InvalidTask, QueueFull, StorageError
from omniq.storage.backend import Changes, Document, Moved, Record
from omniq.storage.postgres import encoding
from omniq.storage.postgres.enqueue import enqueue_parameters
from omniq.storage.postgres.section import PostgresSection
from omniq.storage.postgres.statements import Statements, filled
from omniq.storage.row_rules import FinishedRow

Run = Callable[..., Awaitable[Any]]
"""Runs a statement. With a parameter, which is written as {}, it returns the first value of the reply."""

_SAVEPOINT = "omniq_enqueue"
_NO_TRANSACTION = "the connection has no transaction open, and would commit by itself; begin one"
_NOT_IN_A_TRANSACTION = "25P01"
_TRANSACTION_HAS_FAILED = "25P02"
_MISSING_OR_FORBIDDEN = {"3F000", "42883", "42P01", "42501"}


class UserSection(PostgresSection):
    """A section of the caller's transaction: for an enqueue. With a blocking connection it never suspends."""

    def __init__(self, run: Run, schema: str, store: str, clock: Clock) -> None:
        super().__init__(Statements(schema, _refuse, _refuse), clock)
        self._run = run
        self._schema = schema
        self._store = store

    async def load(self, ids: Sequence[str], *, bodies: bool = False) -> dict[str, Record]:
        """Return what is stored under these ids, without results, and with bodies of live tasks only."""
        records: dict[str, Record] = {}
        for found in (await self._read(ids=list(ids), bodies=bodies))["tasks"]:
            row = encoding.row_from_names(found)
            finished = FinishedRow(row=row, finished_at=0, expires_at=0, result=b"")
            records[row.id] = Record(row) if "is_live" in found else Record(row, finished)
        return records

    async def documents(self, kind: str, keys: Iterable[str]) -> dict[str, Document]:
        found = (await self._read(kind=kind, keys=list(keys)))["documents"]
        return {
            each["key"]: Document(kind, each["key"], encoding.unhex(each["data"])) for each in found
        }

    async def _read(self, **request: Any) -> Any:
        return msgspec.json.decode(await self._call("read_text", request))

    async def write(self, changes: Changes) -> frozenset[str]:
        _, tasks, visible, bound, documents, _ = enqueue_parameters(self.now, changes)
        refusal = await self._call(
            "enqueue_text",
            {
                "tasks": dict(zip(encoding.NEW_TASKS_FIELDS, tasks, strict=True)),
                "visible": visible,
                "bound": bound,
                "documents": [
                    dict(zip(encoding.DOCUMENT_FIELDS, each, strict=True)) for each in documents
                ],
            },
        )
        match refusal:
            case "moved":
                raise Moved
            case "full":
                raise QueueFull(bound or 0)
        return frozenset()

    async def _call(self, function: str, request: dict[str, Any]) -> str:
        """Call the SQL function with the request as JSON, and return its reply."""
        request |= {"store": self._store, "now": self.now}
        # Bytes are written in PostgreSQL's hexadecimal form.
        text = json.dumps(request, default=lambda data: "\\x" + data.hex())
        run = self._run
        await _begin(run)
        try:
            sql = filled(self._schema, f"SELECT {{schema}}.{function}({{}})")
            reply: str = await run(sql, text)
        except Exception as error:
            await run(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
            await run(f"RELEASE SAVEPOINT {_SAVEPOINT}")
            if _sqlstate(error) in _MISSING_OR_FORBIDDEN:
                raise InvalidTask(
                    "the connection leads to another database, or may not use this store: "
                    f"{str(error).splitlines()[0]}"
                ) from error
            raise StorageError(f"enqueue on the given connection: {error}") from error
        await run(f"RELEASE SAVEPOINT {_SAVEPOINT}")
        if reply == "store":
            raise InvalidTask("the connection leads to another database than this storage's")
        return reply


async def _refuse(sql: str, *parameters: Any) -> list[Any]:
    raise StorageError(f"a caller's transaction cannot run {sql.split()[0]}: it only enqueues")


async def _begin(run: Run) -> None:
    try:
        # A savepoint needs a transaction, so this also checks that there is one.
        await run(f"SAVEPOINT {_SAVEPOINT}")
    except Exception as error:
        if _sqlstate(error) == _NOT_IN_A_TRANSACTION:
            raise InvalidTask(_NO_TRANSACTION) from error
        if _sqlstate(error) == _TRANSACTION_HAS_FAILED:
            raise InvalidTask("the connection's transaction has failed; roll it back") from error
        raise StorageError(f"enqueue on the given connection: {error}") from error


async def runner(connection: Any) -> Run:
    """How to run statements on a connection of a known driver; `InvalidTask` for any other."""
    packages = {kind.__module__.partition(".")[0] for kind in type(connection).__mro__}
    if "asyncpg" in packages and hasattr(connection, "fetchval"):
        return _asyncpg_runner(connection)
    if "psycopg" in packages and hasattr(connection, "cursor"):
        return _cursor_runner(connection.execute)
    if "sqlalchemy" in packages:
        kinds = {kind.__name__ for kind in type(connection).__mro__}
        if kinds & {"Session", "AsyncSession"}:
            # `connection()` begins the session's transaction.
            connection = await _resolve(connection.connection())
        if hasattr(connection, "exec_driver_sql"):
            return _sqlalchemy_runner(connection)
    raise InvalidTask(
        f"connection of type {type(connection).__module__}.{type(connection).__qualname__}: expected "
        "one of asyncpg, psycopg or SQLAlchemy to the PostgreSQL database that holds the tasks"
    )


def _asyncpg_runner(connection: Any) -> Run:
    if not connection.is_in_transaction():
        raise InvalidTask(_NO_TRANSACTION)

    async def run(sql: str, *parameters: str) -> Any:
        if not parameters:
            return await connection.execute(sql)
        return await connection.fetchval(sql.format("$1"), *parameters)

    return run


def _sqlalchemy_runner(connection: Any) -> Run:
    dialect = connection.dialect
    if dialect.name != "postgresql":
        raise InvalidTask(f"the connection is one to {dialect.name}, not to PostgreSQL")
    placeholder = "$1" if dialect.paramstyle == "numeric_dollar" else "%s"
    return _cursor_runner(connection.exec_driver_sql, placeholder)


def _cursor_runner(execute: Callable[..., Any], placeholder: str = "%s") -> Run:
    """Of a driver whose `execute` returns a cursor, or an awaitable of one."""

    async def run(sql: str, *parameters: str) -> Any:
        if not parameters:
            return await _resolve(execute(sql))
        cursor = await _resolve(execute(sql.format(f"{placeholder}::text"), parameters))
        row = await _resolve(cursor.fetchone())
        # The caller's connection may have a row factory.
        if isinstance(row, str):
            return row
        return next(iter(row.values())) if isinstance(row, Mapping) else row[0]

    return run


async def _resolve(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _sqlstate(error: BaseException) -> str | None:
    """The SQLSTATE of an error, also when SQLAlchemy has wrapped it."""
    for each in (error, getattr(error, "orig", None), error.__cause__):
        for name in ("sqlstate", "pgcode"):
            state = getattr(each, name, None)
            if isinstance(state, str):
                return state
    return None
