"""Task transaction: transactions of running tasks, whose commit also records their success."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from omniq.storage.backend import CommitUnknown, Moved, Section, Work
from omniq.storage.postgres.connection import (
    Connection,
    ConnectionPool,
    Target,
    is_connection_lost,
    is_driver_error,
)


class TaskTransactions:
    """Transactions of running tasks, each on its own connection of a pool."""

    def __init__(
        self, target: Target, size: int, section_on: Callable[[Connection], Section]
    ) -> None:
        self._target = target
        self._pool = ConnectionPool(target, size)
        self._section_on = section_on

    @asynccontextmanager
    async def transaction(
        self, finish: Callable[[], Work[None]], *, blocking: bool
    ) -> AsyncIterator[Any]:
        """A transaction that ends with the work of `finish()`."""
        async with self._pool.acquire() as db:
            transaction = db.transaction()
            with self._target.wrapped_errors():
                await transaction.start()
            try:
                yield BlockingConnection(db) if blocking else db
                await self._run(db, finish())
            except BaseException:
                await _roll_back(db, transaction)
                raise
            await self.commit(transaction)

    async def _run(self, db: Connection, work: Work[None]) -> None:
        while True:
            try:
                # A savepoint: a write that is refused must not end the transaction.
                with self._target.wrapped_errors():
                    async with db.transaction():
                        await work(self._section_on(db))
                return
            except Moved:
                continue

    async def commit(self, transaction: Any) -> None:
        """Commit; `CommitUnknown` when the reply is lost."""
        with self._target.wrapped_errors():
            try:
                await transaction.commit()
            except Exception as error:
                if is_connection_lost(error):
                    raise CommitUnknown(f"{self._target}: {error}") from error
                raise

    async def close(self) -> None:
        """Close the idle connections; the others are closed when their transactions end."""
        await self._pool.close()


async def _roll_back(db: Connection, transaction: Any) -> None:
    try:
        await transaction.rollback()
    except Exception as error:
        if not is_driver_error(error):
            raise
        # The server rolls a transaction back when its connection ends.
        db.terminate()


class BlockingConnection:
    """The transaction's connection for a function that runs in a thread: asyncpg's methods, blocking."""

    def __init__(self, connection: Connection) -> None:
        self.async_connection = connection
        self._loop = asyncio.get_running_loop()

    def execute(self, query: str, *args: Any) -> Any:
        """Run a statement; returns PostgreSQL's command tag."""
        return self._wait(self.async_connection.execute(query, *args))

    def executemany(self, query: str, args: Any) -> None:
        """Run a statement once for each sequence of parameters."""
        self._wait(self.async_connection.executemany(query, args))

    def fetch(self, query: str, *args: Any) -> Any:
        """Return all rows."""
        return self._wait(self.async_connection.fetch(query, *args))

    def fetchrow(self, query: str, *args: Any) -> Any:
        """Return the first row, or None."""
        return self._wait(self.async_connection.fetchrow(query, *args))

    def fetchval(self, query: str, *args: Any) -> Any:
        """Return the first value of the first row, or None."""
        return self._wait(self.async_connection.fetchval(query, *args))

    def _wait(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()
