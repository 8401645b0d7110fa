"""Task transaction: transactions of running tasks, whose commit also records their success.

SQLite has one writer at a time, so one thread is enough: it begins a transaction, hands its
connection to the task, and waits for the command to commit or to roll back, for a limited time. The
transactions run one after the other, each on a new connection.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from omniq._futures import set_result
from omniq.errors import InvalidTask, OmniqError, StorageClosed, StorageError
from omniq.failpoints import hit
from omniq.storage.sqlite.connection import (
    BUSY_SECONDS,
    NO_COMMIT_INSIDE,
    Connection,
    Database,
    TaskConnection,
    is_denied,
)

MAX_SECONDS = BUSY_SECONDS / 2
"""The longest that a transaction may take, in seconds, also with a longer lease.

Other writers wait for it for at most `BUSY_SECONDS` seconds.
"""

_T = TypeVar("_T")
_Work = Callable[[Connection], None]


class _Transaction:
    """One transaction: what the task's event loop and the thread that ends it share."""

    def __init__(self, limit: float) -> None:
        loop = asyncio.get_running_loop()
        self.limit = limit
        self.begun: asyncio.Future[TaskConnection | Exception] = loop.create_future()
        self.ended: asyncio.Future[Exception | None] = loop.create_future()
        self.commands: queue.SimpleQueue[_Work | Exception | None] = queue.SimpleQueue()
        """The work to do before the commit; None or an error: roll back."""
        self.was_aborted = False
        """Whether it ended while the task could still use the connection."""

    async def end(self, work: _Work | None) -> None:
        """Run `work` and commit, or roll back if it is None. A failed commit raises its error.

        A cancellation of the caller does not stop this; it is raised afterwards.
        """
        self.commands.put(work)
        was_cancelled = False
        while not self.ended.done():
            try:
                await asyncio.shield(self.ended)
            except asyncio.CancelledError:
                was_cancelled = True
        task = asyncio.current_task()
        if was_cancelled and task is not None:
            # Raised at the next `await`, so that the caller learns of the commit first.
            task.uncancel()
            task.cancel()
        error = self.ended.result()
        if error is not None and work is not None:
            raise error


class TaskTransactions:
    """Transactions of running tasks on one database. The first one starts the thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: queue.SimpleQueue[_Transaction | asyncio.Future[None]] = queue.SimpleQueue()
        self._current: _Transaction | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @asynccontextmanager
    async def transaction(
        self, limit: float, finish: Callable[[], _Work]
    ) -> AsyncIterator[Connection]:
        """A connection in a transaction that ends with the work of `finish()`, and a commit.

        `finish` is called when the block is left. After `limit` seconds the transaction is rolled
        back, statements are refused, and leaving the block raises `StorageError`.
        """
        transaction = _Transaction(min(limit, MAX_SECONDS))
        self._submit(transaction)
        try:
            connection = await transaction.begun
        except BaseException:
            transaction.commands.put(None)
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
                    _raise_cause(transaction, error)
                raise
            await transaction.end(work)
        finally:
            if transaction.was_aborted:
                connection.close()

    async def close(self) -> None:
        """Roll back the open transaction, and end the thread."""
        self._is_closed = True
        thread, self._thread = self._thread, None
        if thread is None:
            return
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put(ended)
        current = self._current
        if current is not None:
            current.commands.put(StorageClosed("the storage was closed in a transaction"))
        await ended
        thread.join()

    def _submit(self, transaction: _Transaction) -> None:
        if self._is_closed:
            raise StorageClosed("the sqlite storage was closed")
        self._waiting.put(transaction)
        if self._thread is None:
            # A daemon, so that a storage that was not closed does not keep the process alive.
            self._thread = threading.Thread(
                target=self._run, name="omniq-sqlite-transactions", daemon=True
            )
            self._thread.start()

    # In the thread

    def _run(self) -> None:
        while isinstance(transaction := self._waiting.get(), _Transaction):
            self._current = transaction
            if self._is_closed:
                _set_result(transaction.begun, StorageClosed("the sqlite storage was closed"))
            elif not transaction.begun.cancelled():
                self._run_transaction(transaction)
            self._current = None
            # So that the transaction is freed before the next one arrives.
            del transaction
        _set_result(transaction, None)

    def _run_transaction(self, transaction: _Transaction) -> None:
        try:
            connection = self._begin()
        except Exception as error:
            _set_result(transaction.begun, self._wrap_error(error))
            return
        _set_result(transaction.begun, connection)
        try:
            command = transaction.commands.get(timeout=transaction.limit)
        except queue.Empty:
            command = self._expired(transaction.limit)
        if isinstance(command, Exception):
            transaction.was_aborted = True
        connection.interrupt_and_lock()
        commit_error = self._commit(connection, command) if callable(command) else command
        rollback_error = self._roll_back(connection)
        if not transaction.was_aborted:
            connection.close()
        connection.lock.release()
        _set_result(transaction.ended, commit_error or rollback_error)

    def _expired(self, limit: float) -> StorageError:
        return StorageError(
            f"SQLite database {self._database.path}: a transaction was held for more than "
            f"{limit:.3g} s, and rolled back, because no other connection can write meanwhile; "
            "do slow work before ctx.transaction(), or give the worker a longer lease"
        )

    def _begin(self) -> TaskConnection:
        self._database.check_unmoved()
        connection = self._database.connect_for_task()
        try:
            self._database.retry_while_busy(lambda: connection.execute("BEGIN IMMEDIATE"))
        except BaseException:
            connection.close()
            raise
        return connection

    def _commit(self, connection: Connection, work: _Work) -> Exception | None:
        """Run the work and commit; returns the error that prevented it, or None."""
        try:
            if not connection.in_transaction:
                # SQLite itself has rolled back, as it does when the disk is full.
                return StorageError(
                    f"SQLite database {self._database.path}: SQLite has rolled the transaction back"
                )
            connection.row_factory, connection.text_factory = None, str
            work(connection)
            hit("sqlite.before_commit")
            connection.execute("COMMIT")
            hit("sqlite.after_commit")
        except Exception as error:
            return self._wrap_error(error)
        return None

    def _roll_back(self, connection: Connection) -> Exception | None:
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except Exception as error:
            return self._wrap_error(error)
        return None

    def _wrap_error(self, error: Exception) -> Exception:
        if isinstance(error, OmniqError):
            return error
        wrap_error = self._database.wrap_error(error)
        wrap_error.__cause__ = error
        return wrap_error


def _raise_cause(transaction: _Transaction, error: Exception) -> None:
    """Raise the storage's error where that of the driver would not help the caller."""
    commit_error = transaction.ended.result()
    if commit_error is not None:
        raise commit_error from error
    if is_denied(error):
        raise InvalidTask(NO_COMMIT_INSIDE) from error


def _set_result(future: asyncio.Future[_T], value: _T) -> None:
    # A closed loop has no waiters.
    with suppress(RuntimeError):
        future.get_loop().call_soon_threadsafe(set_result, future, value)
