"""A thread that owns a connection and does everything that has gathered for it in one transaction.

While one transaction is under way, jobs gather; the next one takes all of them. Nothing waits for a
timer: an idle lane has the latency of a single write, a busy one has large batches and one wait
for the disk for all of them.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from omniq._futures import finish
from omniq.errors import OmniqError, StorageClosed, StorageError
from omniq.failpoints import hit
from omniq.storage.sqlite.connection import Connection, Database, DriverError

_T = TypeVar("_T")

_MOST_JOBS = 512
"""Jobs of one transaction: enough to share the wait for the disk, and few enough to stay short."""


class _Job:
    """Something to do with the connection, and who waits for it."""

    __slots__ = ("error", "future", "result", "work")

    def __init__(self, work: Callable[[Connection], Any], future: asyncio.Future[Any]) -> None:
        self.work = work
        self.future = future
        self.result: Any = None
        self.error: BaseException | None = None


class Lane:
    """Runs jobs on one connection, in one thread, in the order they came.

    The thread starts with the first job. A job's awaiter learns the result after the commit, never
    before. A job that raises is undone alone; the others of its transaction stand. When the awaiter
    is cancelled, the job may have been done or not.
    """

    def __init__(self, name: str, database: Database, connect: Callable[[], Connection]) -> None:
        self._name = name
        self._database = database
        self._connect = connect
        self._jobs: queue.SimpleQueue[_Job | asyncio.Future[None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False

    async def run(self, work: Callable[[Connection], _T]) -> _T:
        """What `work` returns, once its transaction is committed."""
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._closed:
                raise StorageClosed("the sqlite storage was closed")
            self._jobs.put(_Job(work, future))
            if self._thread is None:
                self._start()
        return await future

    async def connect(self) -> None:
        """Raise what is wrong with the database now. Takes no lock once it exists."""
        await self.run(_nothing)

    async def close(self) -> None:
        """Finish what was asked for, close the connection and end the thread."""
        with self._lock:
            thread, self._thread, self._closed = self._thread, None, True
        if thread is None:
            return
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._jobs.put(ended)
        await ended
        thread.join()

    def _start(self) -> None:
        # A daemon: a storage that nobody closed must not keep the process from ending.
        self._thread = threading.Thread(
            target=self._serve, name=f"omniq-sqlite-{self._name}", daemon=True
        )
        self._thread.start()

    def _serve(self) -> None:
        # The connection is this frame's own. After a fork the child has no such thread, so nothing
        # there ever closes the parent's connection.
        connection: Connection | None = None
        ended: asyncio.Future[None] | None = None
        while ended is None:
            jobs, ended = self._gather()
            if jobs:
                connection = self._serve_batch(connection, jobs)
                _tell(jobs)
                # Not kept until the next batch comes: a result may be large.
                del jobs
                if connection is not None:
                    self._after(connection)
        if connection is not None:
            self._end(connection)
        _call(ended.get_loop(), partial(finish, ended))

    def _gather(self) -> tuple[list[_Job], asyncio.Future[None] | None]:
        """Wait for a job and take all that are there; and the future of who wants it to end."""
        jobs: list[_Job] = []
        while True:
            job = self._jobs.get()
            if not isinstance(job, _Job):
                return jobs, job
            # When its awaiter has gone before anything was done, nothing is done.
            if not job.future.cancelled():
                jobs.append(job)
            if len(jobs) == _MOST_JOBS or self._jobs.empty():
                return jobs, None

    def _serve_batch(self, connection: Connection | None, jobs: list[_Job]) -> Connection | None:
        """Run the jobs in one transaction; every job has its result or its error afterwards."""
        try:
            connection = connection or self._connect()
            self._database.check_unmoved()
            self._transact(connection, jobs)
        except StorageError as error:
            self._fail(jobs, error, error.__cause__)
        except Exception as error:
            # Whoever waits must hear of it, and the thread must live for those who come next.
            self._fail(jobs, self._database.explained(error), error)
        if connection is not None and connection.in_transaction:
            connection.rollback()
        return connection

    def _fail(self, jobs: list[_Job], error: StorageError, cause: BaseException | None) -> None:
        error.__cause__ = cause
        for job in jobs:
            job.error = job.error or error

    def _transact(self, connection: Connection, jobs: list[_Job]) -> None:
        connection.execute("BEGIN")
        for job in jobs:
            self._attempt(connection, job)
        connection.execute("COMMIT")

    def _attempt(self, connection: Connection, job: _Job) -> None:
        try:
            job.result = job.work(connection)
        except (DriverError, OSError) as error:
            job.error = self._database.explained(error)
            job.error.__cause__ = error
        except Exception as error:
            # The awaiter's to handle, whatever it is.
            job.error = error

    def _after(self, connection: Connection) -> None:
        """What is to be done when nobody waits."""

    def _end(self, connection: Connection) -> None:
        connection.close()


class WriteLane(Lane):
    """A lane whose transactions write. It also copies the write-ahead log back, now and then."""

    def __init__(self, name: str, database: Database) -> None:
        super().__init__(name, database, self._open)
        self._copier: Connection | None = None
        self._copy_at = database.wal_limit

    def _open(self) -> Connection:
        connection = self._database.connect(writes=True)
        try:
            self._database.prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _transact(self, connection: Connection, jobs: list[_Job]) -> None:
        jobs = [job for job in jobs if job.work is not _nothing]
        if not jobs:
            return
        self._database.patiently(lambda: connection.execute("BEGIN IMMEDIATE"))
        if len(jobs) == 1:
            self._attempt(connection, jobs[0])
            if jobs[0].error is not None:
                connection.rollback()
                return
        else:
            for job in jobs:
                self._attempt_apart(connection, job)
        hit("sqlite.before_commit")
        connection.execute("COMMIT")
        hit("sqlite.after_commit")

    def _attempt_apart(self, connection: Connection, job: _Job) -> None:
        """Run one of many jobs such that its failure undoes nothing of the others."""
        connection.execute("SAVEPOINT job")
        self._attempt(connection, job)
        if not connection.in_transaction:
            # SQLite itself has undone everything, as it does when the disk is full.
            raise (
                job.error
                if isinstance(job.error, StorageError)
                else StorageError(
                    f"SQLite database {self._database.path}: the transaction was undone"
                )
            )
        if job.error is not None:
            connection.execute("ROLLBACK TO job")
        connection.execute("RELEASE job")

    def _after(self, connection: Connection) -> None:
        try:
            size = self._database.wal_size()
            if size <= self._database.wal_limit:
                self._copy_at = self._database.wal_limit
            elif size > self._copy_at:
                self._copy_at = size + self._database.wal_limit // 4
                self._copy_log_back(connection)
        except (DriverError, OmniqError):
            # The commit is done, and its awaiter told. Whatever is wrong here meets the next
            # transaction, which has somebody to tell.
            if connection.in_transaction:
                connection.rollback()

    def _copy_log_back(self, connection: Connection) -> None:
        """A checkpoint, while this connection keeps every other writer out.

        SQLite before 3.51.3 can corrupt a database when a checkpoint runs while another connection
        starts the log anew; only a writer does that, and the write lock is held here.
        """
        self._database.patiently(lambda: connection.execute("BEGIN IMMEDIATE"))
        if self._copier is None:
            self._copier = self._database.connect(writes=True)
        self._copier.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        connection.execute("ROLLBACK")

    def _end(self, connection: Connection) -> None:
        if self._copier is not None:
            self._copier.close()
        connection.close()


def _nothing(_: Connection) -> None:
    """A job that only makes its lane connect."""


def _tell(jobs: list[_Job]) -> None:
    """Hand out the results, with one wake-up for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Job]] = {}
    for job in jobs:
        by_loop.setdefault(job.future.get_loop(), []).append(job)
    for loop, theirs in by_loop.items():
        _call(loop, partial(_resolve, theirs))


def _call(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    # A loop that is closed has nobody who waits.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


def _resolve(jobs: list[_Job]) -> None:
    for job in jobs:
        if job.future.done():
            continue
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)
