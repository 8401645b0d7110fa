"""Connections lent to running tasks, whose commit also records that the task is done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol

from omniq.errors import StaleClaim
from omniq.storage import row_rules
from omniq.storage.postgres.connection import Connection, Spares, Target, is_driver_error, is_lost
from omniq.storage.postgres.record import Ledger
from omniq.storage.types import Entry


class Begin(Protocol):
    """Gives the ledger of a transaction that has been started."""

    async def __call__(
        self, db: Connection, claims_as: str | None, *, has_gates: bool
    ) -> Ledger: ...


class Change(Protocol):
    """Does something in a transaction of its own."""

    async def __call__(
        self,
        work: Callable[[Ledger], Awaitable[bool]],
        *,
        has_gates: bool = False,
        is_repeatable: bool = False,
    ) -> bool: ...


class Lending:
    """Transactions of running tasks, each on a connection of its own."""

    def __init__(self, target: Target, size: int, begin: Begin, change: Change) -> None:
        self._target = target
        self._spares = Spares(target, size)
        self._begin = begin
        self._change = change

    @asynccontextmanager
    async def transaction(
        self, owner: str, success: Callable[[], Entry], *, blocking: bool
    ) -> AsyncIterator[Any]:
        """A transaction that ends by recording what `success()` says, or raises `StaleClaim`."""
        async with self._spares.lend() as db:
            transaction = db.transaction()
            await transaction.start()
            try:
                yield BlockingConnection(db) if blocking else db
                entry = success()
                recorded = await self._record(db, owner, entry)
                if not recorded:
                    raise StaleClaim(entry.outcome.task_id, entry.outcome.token)
            except BaseException:
                await _roll_back(db, transaction)
                raise
            await self.commit(transaction, owner, entry)

    async def _record(self, db: Connection, owner: str, entry: Entry) -> bool:
        try:
            ledger = await self._begin(db, None, has_gates=True)
            if not await _is_current(ledger, owner, entry):
                return False
            (recorded,) = await ledger.record(owner, [entry])
        except Exception as error:
            if is_driver_error(error) or is_lost(error):
                raise self._target.wrapped(error) from error
            raise
        return recorded

    async def commit(self, transaction: Any, owner: str, entry: Entry) -> None:
        """Commit; when the reply is lost, whether the outcome is on record tells if it was done."""
        try:
            await transaction.commit()
        except Exception as error:
            if not (is_driver_error(error) or is_lost(error)):
                raise
            if not await self._is_on_record(owner, entry):
                raise self._target.wrapped(error) from error

    async def _is_on_record(self, owner: str, entry: Entry) -> bool:
        async def look(ledger: Ledger) -> bool:
            if await _is_current(ledger, owner, entry):
                return False
            (recorded,) = await ledger.record(owner, [entry], is_resent=True)
            return recorded

        return await self._change(look, has_gates=True, is_repeatable=True)

    async def close(self) -> None:
        """Close the connections that nobody has."""
        await self._spares.close()


async def _roll_back(db: Connection, transaction: Any) -> None:
    try:
        await transaction.rollback()
    except Exception as error:
        if not (is_driver_error(error) or is_lost(error)):
            raise
        # Without its connection a transaction is rolled back by the server.
        db.terminate()


async def _is_current(ledger: Ledger, owner: str, entry: Entry) -> bool:
    """Whether the claim is the current one. A repeat of an outcome is not a transaction's end."""
    await ledger.load([entry.outcome.task_id])
    row = ledger.live(entry.outcome.task_id)
    return row is not None and row_rules.is_current(row, entry.outcome, owner)


class BlockingConnection:
    """The lent connection for a function that runs in a thread: asyncpg's verbs, blocking."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()

    def execute(self, query: str, *args: Any) -> Any:
        """Run a statement; what PostgreSQL says it did."""
        return self._wait(self._connection.execute(query, *args))

    def executemany(self, query: str, args: Any) -> None:
        """Run a statement for each of the parameters."""
        self._wait(self._connection.executemany(query, args))

    def fetch(self, query: str, *args: Any) -> Any:
        """All rows."""
        return self._wait(self._connection.fetch(query, *args))

    def fetchrow(self, query: str, *args: Any) -> Any:
        """The first row, or None."""
        return self._wait(self._connection.fetchrow(query, *args))

    def fetchval(self, query: str, *args: Any) -> Any:
        """The first value of the first row, or None."""
        return self._wait(self._connection.fetchval(query, *args))

    def _wait(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()
