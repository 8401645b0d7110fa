"""Task transaction: transactions of running tasks, whose commit also records their success."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol

from omniq.errors import StaleClaim
from omniq.storage import row_rules
from omniq.storage.postgres.connection import (
    Connection,
    ConnectionPool,
    Target,
    is_connection_lost,
    is_driver_error,
)
from omniq.storage.postgres.record import Recorder
from omniq.storage.types import Entry


class BeginChanges(Protocol):
    """Returns the recorder for a transaction that has been started."""

    async def __call__(
        self, db: Connection, claims_as: str | None, *, has_gates: bool
    ) -> Recorder: ...


class RunChange(Protocol):
    """Runs `work` in a separate transaction."""

    async def __call__(
        self,
        work: Callable[[Recorder], Awaitable[bool]],
        *,
        has_gates: bool = False,
        is_repeatable: bool = False,
    ) -> bool: ...


class TaskTransactions:
    """Transactions of running tasks, each on its own connection of a pool."""

    def __init__(
        self, target: Target, size: int, begin: BeginChanges, run_change: RunChange
    ) -> None:
        self._target = target
        self._pool = ConnectionPool(target, size)
        self._begin = begin
        self._run_change = run_change

    @asynccontextmanager
    async def transaction(
        self, owner: str, success: Callable[[], Entry], *, blocking: bool
    ) -> AsyncIterator[Any]:
        """A transaction that ends by recording the entry of `success()`, or raises `StaleClaim`."""
        async with self._pool.acquire() as db:
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
            recorder = await self._begin(db, None, has_gates=True)
            if not await _is_current(recorder, owner, entry):
                return False
            (recorded,) = await recorder.record(owner, [entry])
        except Exception as error:
            if is_driver_error(error) or is_connection_lost(error):
                raise self._target.wrap_error(error) from error
            raise
        return recorded

    async def commit(self, transaction: Any, owner: str, entry: Entry) -> None:
        """Commit; when the reply is lost, the stored outcome shows whether it was committed."""
        try:
            await transaction.commit()
        except Exception as error:
            if not (is_driver_error(error) or is_connection_lost(error)):
                raise
            if not await self._is_recorded(owner, entry):
                raise self._target.wrap_error(error) from error

    async def _is_recorded(self, owner: str, entry: Entry) -> bool:
        async def check(recorder: Recorder) -> bool:
            if await _is_current(recorder, owner, entry):
                return False
            (recorded,) = await recorder.record(owner, [entry], is_resent=True)
            return recorded

        return await self._run_change(check, has_gates=True, is_repeatable=True)

    async def close(self) -> None:
        """Close the idle connections; the others are closed when their transactions end."""
        await self._pool.close()


async def _roll_back(db: Connection, transaction: Any) -> None:
    try:
        await transaction.rollback()
    except Exception as error:
        if not (is_driver_error(error) or is_connection_lost(error)):
            raise
        # The server rolls a transaction back when its connection ends.
        db.terminate()


async def _is_current(recorder: Recorder, owner: str, entry: Entry) -> bool:
    """Whether the claim is the current one. A repeated outcome must not end a transaction."""
    await recorder.load([entry.outcome.task_id])
    row = recorder.live(entry.outcome.task_id)
    return row is not None and row_rules.is_current(row, entry.outcome, owner)


class BlockingConnection:
    """The transaction's connection for a function that runs in a thread: asyncpg's methods, blocking."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()

    def execute(self, query: str, *args: Any) -> Any:
        """Run a statement; returns PostgreSQL's command tag."""
        return self._wait(self._connection.execute(query, *args))

    def executemany(self, query: str, args: Any) -> None:
        """Run a statement once for each sequence of parameters."""
        self._wait(self._connection.executemany(query, args))

    def fetch(self, query: str, *args: Any) -> Any:
        """Return all rows."""
        return self._wait(self._connection.fetch(query, *args))

    def fetchrow(self, query: str, *args: Any) -> Any:
        """Return the first row, or None."""
        return self._wait(self._connection.fetchrow(query, *args))

    def fetchval(self, query: str, *args: Any) -> Any:
        """Return the first value of the first row, or None."""
        return self._wait(self._connection.fetchval(query, *args))

    def _wait(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()
