"""Writer thread: a thread that owns a connection, and runs all waiting jobs in one transaction.

Jobs that arrive during a transaction wait, and the next transaction runs all of them. No timer
delays a job: an idle thread has the latency of a single write, and a busy one runs large batches
with one wait for the disk each. Readers use the base class, `ConnectionThread`.

A thread without an event loop runs its job itself, on the same connection. The threads take turns.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from typing import Any, TypeVar

from omniq.concurrency.event_loop import has_event_loop
from omniq.concurrency.futures import set_result
from omniq.errors import OmniqError, StorageClosed
from omniq.failpoints import hit
from omniq.storage.sqlite.connection import Connection, Database, DriverError, SharedConnection
from omniq.storage.sqlite.forks import FORKS

_T = TypeVar("_T")


class Job:
    """A function to run with the connection, and the future of its result if an event loop waits for it."""

    __slots__ = ("error", "future", "result", "work")

    def __init__(self, work: Callable[..., Any], future: asyncio.Future[Any] | None = None) -> None:
        self.work = work
        self.future = future
        self.result: Any = None
        self.error: BaseException | None = None

    @property
    def is_cancelled(self) -> bool:
        """Whether its awaiter does not wait any more."""
        return self.future is not None and self.future.cancelled()


_Item = Job | asyncio.Future[None] | None
"""A job, the future of `close`, or None when the object is dropped without being closed."""


class ConnectionThread:
    """Runs jobs on one connection, in one thread, in the order in which they were submitted.

    The thread starts with the first job. A job's result is delivered after the commit. A job that
    raises is rolled back alone; the other jobs of its transaction are committed. When the awaiter
    is cancelled, the job may have been run or not; a job that waits for a lock is not run.
    """

    _max_jobs = 512
    """The most jobs of one transaction: many share a wait for the disk, but it stays short."""

    def __init__(
        self, name: str, database: Database, connect: Callable[[], SharedConnection]
    ) -> None:
        self._name = name
        self._database = database
        self._connect = connect
        self._jobs: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._turn = threading.Lock()
        FORKS.guard(self._turn, database)
        self._is_serving = False
        # Weak: a forked child must never close the parent's connection. See `_run`.
        self._connection: Callable[[], SharedConnection | None] = lambda: None

    @property
    def is_idle(self) -> bool:
        """Whether the thread is connected, and has no job."""
        return not self._is_serving and self._jobs.empty() and self._connection() is not None

    async def run(self, work: Callable[[Connection], _T]) -> _T:
        """Run `work` in the thread; returns its result after the commit of its transaction.

        Called in a thread without an event loop, it is run there, and this coroutine does not suspend.
        """
        if has_event_loop():
            return await self.submit(work)
        job = Job(work)
        with self._turn:
            connection = self._connection()
            if connection is None or self._is_closed:
                raise StorageClosed("the sqlite storage was closed")
            self._run_batch(connection, [job])
            self._after_batch(connection)
        if job.error is not None:
            raise job.error
        return job.result  # type: ignore[no-any-return]

    def submit(self, work: Callable[[Connection], _T]) -> asyncio.Future[_T]:
        """Have the thread run `work`; returns the future of its result."""
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._is_closed:
                raise StorageClosed("the sqlite storage was closed")
            self._jobs.put(Job(work, future))
            if self._thread is None:
                # A daemon, so that a storage that was not closed does not keep the process alive.
                self._thread = self._start()
        return future

    def _start(self) -> threading.Thread:
        # The thread keeps no reference, so that it ends with a storage that is dropped without being closed.
        arguments = (weakref.ref(self), self._jobs, self._turn)
        name = f"omniq-sqlite-{self._name}"
        thread = threading.Thread(target=_run, args=arguments, name=name, daemon=True)
        weakref.finalize(self, self._jobs.put, None).atexit = False
        thread.start()
        return thread

    async def close(self) -> None:
        """Finish the submitted jobs, close the connection and end the thread."""
        with self._lock:
            thread, self._thread, self._is_closed = self._thread, None, True
        if thread is None:
            return
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._jobs.put(ended)
        await ended
        thread.join()

    def _serve(
        self, connection: SharedConnection | None, job: _Item
    ) -> tuple[SharedConnection | None, asyncio.Future[None] | None]:
        """Run the job, and all that are waiting; returns the connection, and the future of `close`, if called."""
        # Before the turn: from now on no other thread takes one.
        self._is_serving = True
        with self._turn:
            jobs, ended = self._collect(job)
            if jobs:
                connection = self._run_batch(connection, jobs)
                _deliver_all(jobs)
                # So that large results are freed before the next batch arrives.
                del jobs, job
                if connection is not None:
                    self._after_batch(connection)
        self._is_serving = False
        return connection, ended

    def _collect(self, job: _Item) -> tuple[list[Job], asyncio.Future[None] | None]:
        """The job, and all that are waiting; and the future of `close`, if called."""
        jobs: list[Job] = []
        while True:
            if not isinstance(job, Job):
                return jobs, job
            # A job whose awaiter was cancelled already is not run.
            if not job.is_cancelled:
                jobs.append(job)
            if len(jobs) == self._max_jobs or self._jobs.empty():
                return jobs, None
            job = self._jobs.get()

    def _run_batch(
        self, connection: SharedConnection | None, jobs: list[Job]
    ) -> SharedConnection | None:
        """Run the jobs in one transaction; every job has its result or its error afterwards."""
        try:
            if connection is None:
                connection = self._connect()
                self._connection = weakref.ref(connection)
            self._database.check_unmoved()
            self._transact(connection, jobs)
        except Exception as error:
            # Every awaiter must get the error, and the thread must stay alive for later jobs.
            wrapped = self._database.wrap_error(error)
            for job in jobs:
                job.error = job.error or wrapped
        finally:
            # Also when Ctrl-C has interrupted the thread of a caller.
            if connection is not None and connection.in_transaction:
                connection.rollback()
        return connection

    def _transact(self, connection: Connection, jobs: list[Job]) -> None:
        connection.execute("BEGIN")
        for job in jobs:
            self._run_job(connection, job)
        connection.execute("COMMIT")

    def _run_job(self, connection: Connection, job: Job) -> None:
        if job.is_cancelled:
            # Its caller stopped waiting before the lock was free: it must not be done later.
            job.error = asyncio.CancelledError()
            return
        try:
            job.result = job.work(connection)
        except (DriverError, OSError, OverflowError) as error:
            job.error = self._database.wrap_error(error)
        except Exception as error:
            # Raised to the awaiter, which handles it.
            job.error = error

    def _after_batch(self, connection: Connection) -> None:
        """Called after each batch, when its results have been delivered."""


def _run(
    served: weakref.ref[ConnectionThread], jobs: queue.SimpleQueue[_Item], turn: threading.Lock
) -> None:
    # The connection is a local variable of the thread. A forked child has no such thread, so
    # it never closes the parent's connection.
    connection: SharedConnection | None = None
    ended: asyncio.Future[None] | None = None
    while ended is None:
        job = jobs.get()
        thread = served()
        if thread is None or job is None:
            break
        connection, ended = thread._serve(connection, job)
        del thread, job
    if connection is not None:
        with turn:
            connection.close()
    if ended is not None:
        deliver(ended, None)


class WriterThread(ConnectionThread):
    """A thread whose transactions write. It also runs checkpoints of the write-ahead log."""

    def __init__(self, name: str, database: Database) -> None:
        connect = partial(database.connect, SharedConnection, writes=True, any_thread=True)
        super().__init__(name, database, connect)
        self._checkpoint_at = database.wal_limit

    def _transact(self, connection: Connection, jobs: list[Job]) -> None:
        self._database.retry_while_busy(
            lambda: connection.execute("BEGIN IMMEDIATE"),
            has_ended=lambda: all(job.is_cancelled for job in jobs),
        )
        if len(jobs) == 1:
            self._run_job(connection, jobs[0])
            if jobs[0].error is not None:
                connection.rollback()
                return
        else:
            for job in jobs:
                self._run_in_savepoint(connection, job)
        hit("sqlite.before_commit")
        connection.execute("COMMIT")
        hit("sqlite.after_commit")

    def _run_in_savepoint(self, connection: Connection, job: Job) -> None:
        """Run one of several jobs inside a savepoint, so that its failure affects no other job."""
        connection.execute("SAVEPOINT job")
        self._run_job(connection, job)
        self._database.check_in_transaction(connection, job.error)
        if job.error is not None:
            connection.execute("ROLLBACK TO job")
        connection.execute("RELEASE job")

    def _after_batch(self, connection: Connection) -> None:
        try:
            size = self._database.wal_size()
            if size <= self._database.wal_limit:
                self._checkpoint_at = self._database.wal_limit
            elif size > self._checkpoint_at:
                self._checkpoint_at = size + self._database.wal_limit // 4
                self._checkpoint(connection)
        except (DriverError, OmniqError):
            # The jobs are committed and their results delivered. If the error persists, the next
            # transaction meets it and reports it to its awaiters.
            pass
        finally:
            if connection.in_transaction:
                connection.rollback()

    def _checkpoint(self, connection: Connection) -> None:
        """Run a checkpoint while this connection holds the write lock.

        SQLite before 3.51.3 can corrupt a database when a checkpoint runs while another connection
        restarts the log; only a writer does that, and the write lock is held here.
        """
        self._database.retry_while_busy(lambda: connection.execute("BEGIN IMMEDIATE"))
        with closing(self._database.connect(Connection, writes=True)) as other:
            other.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        connection.execute("ROLLBACK")


def deliver(future: asyncio.Future[_T], result: _T) -> None:
    """Set the result of a future of another thread's event loop."""
    _call_soon(future.get_loop(), partial(set_result, future, result))


def _deliver_all(jobs: list[Job]) -> None:
    """Deliver the results, with one call into each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Job]] = {}
    for job in jobs:
        assert job.future is not None
        by_loop.setdefault(job.future.get_loop(), []).append(job)
    for loop, loop_jobs in by_loop.items():
        _call_soon(loop, partial(_resolve, loop_jobs))


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    # A closed loop has no waiters.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


def _resolve(jobs: list[Job]) -> None:
    for job in jobs:
        if job.future is None or job.future.done():
            continue
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)
