"""Task transaction: transactions of running tasks, whose commit also records their success.

SQLite has one writer at a time, so one thread is enough: it begins a transaction, hands its
connection to the task, and waits for the command to commit or to roll back, for a limited time. The
transactions run one after the other, each on a new connection.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from omniq.errors import InvalidTask, StorageClosed, StorageError
from omniq.failpoints import hit
from omniq.storage.sqlite.connection import (
    BUSY_SECONDS,
    NO_COMMIT_INSIDE,
    Connection,
    Database,
    TaskConnection,
    is_denied,
)
from omniq.storage.sqlite.writer_thread import ConnectionThread, Job, deliver

MAX_SECONDS = BUSY_SECONDS / 2
"""The longest that a transaction may take, in seconds, also with a longer lease.

Other writers wait for it for at most `BUSY_SECONDS` seconds.
"""

_Work = Callable[[Connection], None]


class _Transaction:
    """One transaction: what the task's event loop and the thread that ends it share."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.begun: asyncio.Future[TaskConnection | Exception] = (
            asyncio.get_running_loop().create_future()
        )
        self.ended: asyncio.Future[Exception | None]
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


class TaskTransactions(ConnectionThread):
    """Transactions of running tasks on one database, each on a new connection."""

    _max_jobs = 1

    def __init__(self, database: Database) -> None:
        connect = partial(database.connect, TaskConnection, writes=True, any_thread=True)
        super().__init__("transactions", database, connect)
        self._current: _Transaction | None = None

    @asynccontextmanager
    async def transaction(
        self, limit: float, finish: Callable[[], _Work]
    ) -> AsyncIterator[Connection]:
        """A connection in a transaction that ends with the work of `finish()`, and a commit.

        `finish` is called when the block is left. After `limit` seconds the transaction is rolled
        back, statements are refused, and leaving the block raises `StorageError`.
        """
        transaction = _Transaction(min(limit, MAX_SECONDS))
        transaction.ended = self.submit(lambda _: self._run_transaction(transaction))
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
        if self._current is not None:
            error = StorageClosed("the storage was closed in a transaction")
            self._current.commands.put(error)
        await super().close()

    # In the thread

    def _run_batch(self, connection: Connection | None, jobs: list[Job]) -> None:
        for job in jobs:
            job.result = job.work(connection)

    def _run_transaction(self, transaction: _Transaction) -> Exception | None:
        """Run the transaction to its end; returns the error that ended it, or None."""
        self._current = transaction
        try:
            if self._is_closed:
                deliver(transaction.begun, StorageClosed("the sqlite storage was closed"))
            elif not transaction.begun.cancelled():
                return self._begin_and_end(transaction)
            return None
        finally:
            self._current = None

    def _begin_and_end(self, transaction: _Transaction) -> Exception | None:
        try:
            connection = self._begin()
        except Exception as refusal:
            deliver(transaction.begun, self._database.wrap_error(refusal))
            return None
        deliver(transaction.begun, connection)
        try:
            command = transaction.commands.get(timeout=transaction.limit)
        except queue.Empty:
            command = self._expired(transaction.limit)
        if isinstance(command, Exception):
            transaction.was_aborted = True
        connection.interrupt_and_lock()
        error = self._end(connection, command)
        if not transaction.was_aborted:
            connection.close()
        connection.lock.release()
        return error

    def _expired(self, limit: float) -> StorageError:
        return StorageError(
            f"SQLite database {self._database.path}: a transaction was held for more than "
            f"{limit:.3g} s, and rolled back, because no other connection can write meanwhile; "
            "do slow work before ctx.transaction(), or give the worker a longer lease"
        )

    def _begin(self) -> TaskConnection:
        connection = self._connect()
        assert isinstance(connection, TaskConnection)
        try:
            self._database.retry_while_busy(lambda: connection.execute("BEGIN IMMEDIATE"))
        except BaseException:
            connection.close()
            raise
        return connection

    def _end(self, connection: Connection, command: _Work | Exception | None) -> Exception | None:
        """Run the work and commit, or roll back; returns the first error, or None."""
        error = None if callable(command) else command
        try:
            if callable(command):
                self._commit(connection, command)
        except Exception as commit_error:
            error = self._database.wrap_error(commit_error)
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except Exception as rollback_error:
            error = error or self._database.wrap_error(rollback_error)
        return error

    def _commit(self, connection: Connection, work: _Work) -> None:
        self._database.check_in_transaction(connection)
        connection.row_factory, connection.text_factory = None, str
        work(connection)
        hit("sqlite.before_commit")
        connection.execute("COMMIT")
        hit("sqlite.after_commit")


def _raise_cause(transaction: _Transaction, error: Exception) -> None:
    """Raise the storage's error where that of the driver would not help the caller."""
    commit_error = transaction.ended.result()
    if commit_error is not None:
        raise commit_error from error
    if is_denied(error):
        raise InvalidTask(NO_COMMIT_INSIDE) from error
