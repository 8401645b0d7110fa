"""Transactions that tasks write in and the storage ends: one after the other, each on its own connection.

SQLite has one writer at a time, so one thread is enough: it begins a transaction, lends the
connection, and waits for the word to commit or to roll back. It does not wait for ever.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from omniq.errors import InvalidTask, OmniqError, StorageClosed, StorageError
from omniq.failpoints import hit
from omniq.storage.sqlite.connection import (
    NOT_YOURS,
    PATIENCE,
    Connection,
    Database,
    LentConnection,
    is_denied,
)

LONGEST = PATIENCE / 2
"""Seconds a transaction may be held, whatever the lease: others must not run out of patience."""

_T = TypeVar("_T")
_Work = Callable[[Connection], None]


class _Transaction:
    """One of them, and both its sides: the event loop it is used from, and the thread that ends it."""

    def __init__(self, limit: float) -> None:
        loop = asyncio.get_running_loop()
        self.limit = limit
        self.begun: asyncio.Future[LentConnection | Exception] = loop.create_future()
        self.ended: asyncio.Future[Exception | None] = loop.create_future()
        self.orders: queue.SimpleQueue[_Work | Exception | None] = queue.SimpleQueue()
        """What to do before the commit; or to roll back, and perhaps why."""
        self.is_broken_off = False
        """Whether it ended while somebody was still using the connection."""

    async def end(self, work: _Work | None) -> None:
        """Commit after that work, or roll back; raises why it could not be committed.

        To be cancelled meanwhile does not undo what is under way, and is told afterwards.
        """
        self.orders.put(work)
        was_cancelled = False
        while not self.ended.done():
            try:
                await asyncio.shield(self.ended)
            except asyncio.CancelledError:
                was_cancelled = True
        task = asyncio.current_task()
        if was_cancelled and task is not None:
            # At the next `await`: whoever noted down that it was to commit learns first that it has.
            task.uncancel()
            task.cancel()
        error = self.ended.result()
        if error is not None and work is not None:
            raise error


class Transactions:
    """Lends connections in transactions of one database. The thread starts with the first."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: queue.SimpleQueue[_Transaction | asyncio.Future[None]] = queue.SimpleQueue()
        self._current: _Transaction | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    @asynccontextmanager
    async def begin(self, limit: float, finish: Callable[[], _Work]) -> AsyncIterator[Connection]:
        """A connection in a transaction that is committed after the work `finish` names.

        It is asked for that work when the block is left. After `limit` seconds the transaction is
        rolled back, statements are refused, and leaving the block raises `StorageError`.
        """
        transaction = _Transaction(min(limit, LONGEST))
        self._submit(transaction)
        try:
            connection = await transaction.begun
        except BaseException:
            transaction.orders.put(None)
            raise
        if isinstance(connection, Exception):
            raise connection
        try:
            try:
                yield connection
                work = finish()
            except BaseException as error:
                await transaction.end(None)
                if isinstance(error, Exception):
                    _explain(transaction, error)
                raise
            await transaction.end(work)
        finally:
            if transaction.is_broken_off:
                connection.close()

    async def close(self) -> None:
        """Roll back what is open, and end the thread."""
        self._closed = True
        thread, self._thread = self._thread, None
        if thread is None:
            return
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put(ended)
        current = self._current
        if current is not None:
            current.orders.put(StorageClosed("the storage was closed in a transaction"))
        await ended
        thread.join()

    def _submit(self, transaction: _Transaction) -> None:
        if self._closed:
            raise StorageClosed("the sqlite storage was closed")
        self._waiting.put(transaction)
        if self._thread is None:
            # A daemon: a storage that nobody closed must not keep the process from ending.
            self._thread = threading.Thread(
                target=self._serve, name="omniq-sqlite-transactions", daemon=True
            )
            self._thread.start()

    # In the thread

    def _serve(self) -> None:
        while isinstance(transaction := self._waiting.get(), _Transaction):
            self._current = transaction
            if self._closed:
                _tell(transaction.begun, StorageClosed("the sqlite storage was closed"))
            elif not transaction.begun.cancelled():
                self._hold(transaction)
            self._current = None
            # Not kept until the next one comes.
            del transaction
        _tell(transaction, None)

    def _hold(self, transaction: _Transaction) -> None:
        try:
            connection = self._begin()
        except Exception as error:
            _tell(transaction.begun, self._explained(error))
            return
        _tell(transaction.begun, connection)
        try:
            order = transaction.orders.get(timeout=transaction.limit)
        except queue.Empty:
            order = self._expired(transaction.limit)
        if isinstance(order, Exception):
            transaction.is_broken_off = True
        connection.take_back()
        why = self._commit(connection, order) if callable(order) else order
        undone = self._roll_back(connection)
        if not transaction.is_broken_off:
            connection.close()
        connection.lock.release()
        _tell(transaction.ended, why or undone)

    def _expired(self, limit: float) -> StorageError:
        return StorageError(
            f"SQLite database {self._database.path}: a transaction was held for more than "
            f"{limit:.3g} s, and rolled back, since nobody else can write meanwhile; "
            "do slow work before ctx.transaction(), or give the worker a longer lease"
        )

    def _begin(self) -> LentConnection:
        self._database.check_unmoved()
        connection = self._database.lend()
        try:
            self._database.patiently(lambda: connection.execute("BEGIN IMMEDIATE"))
        except BaseException:
            connection.close()
            raise
        return connection

    def _commit(self, connection: Connection, work: _Work) -> Exception | None:
        """What kept it from being committed, if anything did."""
        try:
            if not connection.in_transaction:
                # SQLite itself has undone everything, as it does when the disk is full.
                return StorageError(
                    f"SQLite database {self._database.path}: the transaction was undone"
                )
            connection.row_factory, connection.text_factory = None, str
            work(connection)
            hit("sqlite.before_commit")
            connection.execute("COMMIT")
            hit("sqlite.after_commit")
        except Exception as error:
            return self._explained(error)
        return None

    def _roll_back(self, connection: Connection) -> Exception | None:
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except Exception as error:
            return self._explained(error)
        return None

    def _explained(self, error: Exception) -> Exception:
        if isinstance(error, OmniqError):
            return error
        explained = self._database.explained(error)
        explained.__cause__ = error
        return explained


def _explain(transaction: _Transaction, error: Exception) -> None:
    """Raise in words what happened, where the driver's own are of no help."""
    why = transaction.ended.result()
    if why is not None:
        raise why from error
    if is_denied(error):
        raise InvalidTask(NOT_YOURS) from error


def _tell(future: asyncio.Future[_T], value: _T) -> None:
    def tell() -> None:
        if not future.done():
            future.set_result(value)

    # A loop that is closed has nobody who waits.
    with suppress(RuntimeError):
        future.get_loop().call_soon_threadsafe(tell)
