"""Connections of a user to the database of a PostgreSQL store, one class for each driver."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import asyncpg
import psycopg
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from tests.storage.postgres_stores import Schema


class PostgresUser:
    """A user with a table of notes and a connection to write them with."""

    connection: Any

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.table = f"{schema.name}_notes"
        self.opened: list[asyncpg.Connection] = []
        schema.execute(f"DROP TABLE IF EXISTS {self.table}; CREATE TABLE {self.table} (note text)")

    async def open(self) -> PostgresUser:
        self.reader = await self.connect()
        await self.open_own()
        return self

    async def open_own(self) -> None:
        self.connection = await self.connect()

    async def connect(self, url: str | None = None) -> asyncpg.Connection:
        self.opened.append(await asyncpg.connect(url or self.schema.url))
        return self.opened[-1]

    async def begin(self) -> None:
        self.transaction = self.connection.transaction()
        await self.transaction.start()

    async def commit(self) -> None:
        await self.transaction.commit()

    async def roll_back(self) -> None:
        await self.transaction.rollback()

    async def write(self, note: str, connection: Any = None) -> None:
        connection = connection or self.connection
        await connection.execute(f"INSERT INTO {self.table} VALUES ($1)", note)

    def write_blocking(self, note: str, connection: Any) -> None:
        connection.execute(f"INSERT INTO {self.table} VALUES ($1)", note)

    async def notes(self) -> list[str]:
        found = await self.reader.fetch(f"SELECT note FROM {self.table} ORDER BY note")
        return [note for (note,) in found]

    async def autocommit_connection(self) -> object:
        return await self.connect()

    async def other_database_connection(self) -> object:
        connection = await self.connect(
            urlsplit(self.schema.url)._replace(path="/template1").geturl()
        )
        await connection.execute("BEGIN")
        return connection

    async def close_own(self) -> None:
        """Close what is not among the connections of `connect`."""

    async def close(self) -> None:
        await self.close_own()
        for connection in self.opened:
            await connection.close()
        self.schema.execute(f"DROP TABLE {self.table}")


class Psycopg(PostgresUser):
    """A blocking psycopg connection."""

    async def open_own(self) -> None:
        self.connection = psycopg.connect(self.schema.url)

    async def begin(self) -> None:
        """The first statement begins the transaction."""

    async def commit(self) -> None:
        self.connection.commit()

    async def roll_back(self) -> None:
        self.connection.rollback()

    async def write(self, note: str, connection: Any = None) -> None:
        self.connection.execute(f"INSERT INTO {self.table} VALUES (%s)", (note,))

    async def autocommit_connection(self) -> object:
        self.connection.autocommit = True
        return self.connection

    async def close_own(self) -> None:
        self.connection.close()


class PsycopgOfDictionaries(Psycopg):
    """A blocking psycopg connection whose rows are dictionaries."""

    async def open_own(self) -> None:
        self.connection = psycopg.connect(self.schema.url, row_factory=psycopg.rows.dict_row)


class AsyncPsycopg(PostgresUser):
    """A psycopg connection on the event loop."""

    async def open_own(self) -> None:
        self.connection = await psycopg.AsyncConnection.connect(self.schema.url)

    async def begin(self) -> None:
        """The first statement begins the transaction."""

    async def commit(self) -> None:
        await self.connection.commit()

    async def roll_back(self) -> None:
        await self.connection.rollback()

    async def write(self, note: str, connection: Any = None) -> None:
        await self.connection.execute(f"INSERT INTO {self.table} VALUES (%s)", (note,))

    async def autocommit_connection(self) -> object:
        await self.connection.set_autocommit(True)
        return self.connection

    async def close_own(self) -> None:
        await self.connection.close()


class SQLAlchemy(PostgresUser):
    """SQLAlchemy over psycopg, blocking."""

    async def open_own(self) -> None:
        self.engine = create_engine(_with_driver(self.schema.url, "psycopg"))
        self.connection = self.engine.connect()

    async def begin(self) -> None:
        """The first statement begins the transaction."""

    async def commit(self) -> None:
        self.connection.commit()

    async def roll_back(self) -> None:
        self.connection.rollback()

    async def write(self, note: str, connection: Any = None) -> None:
        self.connection.execute(text(f"INSERT INTO {self.table} VALUES (:note)"), {"note": note})

    async def autocommit_connection(self) -> object:
        self.connection.close()
        self.connection = self.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        return self.connection

    async def close_own(self) -> None:
        self.connection.close()
        self.engine.dispose()


class SQLAlchemySession(SQLAlchemy):
    """An ORM session."""

    async def open_own(self) -> None:
        self.engine = create_engine(_with_driver(self.schema.url, "psycopg"))
        self.connection = Session(self.engine)

    async def autocommit_connection(self) -> object:
        self.connection.close()
        self.connection = Session(self.engine.execution_options(isolation_level="AUTOCOMMIT"))
        return self.connection


class AsyncSQLAlchemy(PostgresUser):
    """SQLAlchemy over asyncpg."""

    async def open_own(self) -> None:
        self.engine = create_async_engine(_with_driver(self.schema.url, "asyncpg"))
        self.connection = await self.engine.connect()

    async def begin(self) -> None:
        """The first statement begins the transaction."""

    async def commit(self) -> None:
        await self.connection.commit()

    async def roll_back(self) -> None:
        await self.connection.rollback()

    async def write(self, note: str, connection: Any = None) -> None:
        await self.connection.execute(
            text(f"INSERT INTO {self.table} VALUES (:note)"), {"note": note}
        )

    async def autocommit_connection(self) -> object:
        await self.connection.close()
        self.connection = await self.engine.connect()
        return await self.connection.execution_options(isolation_level="AUTOCOMMIT")

    async def close_own(self) -> None:
        await self.connection.close()
        await self.engine.dispose()


class AsyncSQLAlchemySession(AsyncSQLAlchemy):
    """An ORM session on the event loop."""

    async def open_own(self) -> None:
        self.engine = create_async_engine(_with_driver(self.schema.url, "asyncpg"))
        self.connection = AsyncSession(self.engine)

    async def autocommit_connection(self) -> object:
        await self.connection.close()
        self.connection = AsyncSession(self.engine.execution_options(isolation_level="AUTOCOMMIT"))
        return self.connection


def _with_driver(url: str, driver: str) -> str:
    return url.replace("postgresql://", f"postgresql+{driver}://", 1)
