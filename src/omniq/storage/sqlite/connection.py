"""Connection: creates a database file, connects to it, and translates the driver's errors.

The only module that imports the driver.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeVar
from weakref import WeakSet

from omniq.errors import InvalidTask, OmniqError, StorageCorrupt, StorageError
from omniq.settings.places import PlaceRules
from omniq.storage.permissions import check_database, make_store_folder
from omniq.storage.sqlite.forks import FORKS
from omniq.storage.sqlite.upgrade import FUNCTIONS

Connection = sqlite3.Connection
DriverError = sqlite3.Error
MisuseError = sqlite3.ProgrammingError

BUSY_SECONDS = 30.0
"""Seconds for which a call waits for a lock that another connection holds, before it fails."""

LARGEST = "omniq_largest()"
"""SQL for the bytes of a blob that is read, at most. A function, because that depends on the settings."""

SCHEMA_VERSION = 3

NO_COMMIT_INSIDE = (
    "ctx.transaction(): the transaction is committed when the block is left, and rolled back when "
    "an exception leaves it; do neither inside"
)

_CACHE_KIB = 8_192
"""Memory of a writer, so that a claim of tasks with many keys does not read all of their pages again."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.004
_MINIMUM_VERSION = (3, 35, 0)
_INTERRUPT_PAUSE = 0.005
_T = TypeVar("_T")
_C = TypeVar("_C", bound=sqlite3.Connection)


class StatementResult(Protocol):
    """The result of a statement: its first row, and the number of rows it wrote."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...


class StatementRunner(Protocol):
    """Runs statements: a connection of the storage, or of a caller."""

    def execute(self, sql: str, parameters: Any = ..., /) -> StatementResult: ...


@cache
def statement(name: str) -> str:
    """The SQL of `sql/<name>.sql`, without its comments."""
    source = resources.files("omniq.storage.sqlite").joinpath(f"sql/{name}.sql")
    lines = source.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("--")).strip()


class SharedConnection(sqlite3.Connection):
    """A connection that several threads use in turns. Other than one of the driver, it can be weakly referenced."""


class TaskConnection(SharedConnection):
    """A connection for a task's transaction, which only the thread that created it can end.

    The lock allows one thread at a time inside SQLite. This also prevents a deadlock: SQLite calls
    back into Python, so two threads could each hold the lock that the other one waits for.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._owner_thread = owner_thread = threading.get_ident()
        self._cursors: WeakSet[sqlite3.Cursor] = WeakSet()
        self.lock = threading.RLock()
        self.has_ended = False
        """Whether only the thread that created the connection may still use it."""

        def authorize(action: int, *_: str | None) -> int:
            is_denied = (
                action == sqlite3.SQLITE_TRANSACTION and threading.get_ident() != owner_thread
            )
            return sqlite3.SQLITE_DENY if is_denied else sqlite3.SQLITE_OK

        self.set_authorizer(authorize)

    def cursor(self, *_: Any) -> Any:
        with self.lock:
            self.check()
            cursor = super().cursor(_TaskCursor)
            self._cursors.add(cursor)
        return cursor

    def execute(self, *args: Any) -> Any:
        return self.cursor().execute(*args)

    def executemany(self, *args: Any) -> Any:
        return self.cursor().executemany(*args)

    def executescript(self, *args: Any) -> Any:
        return self.cursor().executescript(*args)

    def commit(self) -> None:
        raise InvalidTask(NO_COMMIT_INSIDE)

    def rollback(self) -> None:
        raise InvalidTask(NO_COMMIT_INSIDE)

    def __exit__(self, kind: object, error: object, trace: object, /) -> Literal[False]:
        if kind is None:
            self.commit()
        return False

    def blobopen(self, *args: Any, **options: Any) -> Any:
        raise InvalidTask(
            "ctx.transaction(): this connection opens no blobs; read and write them whole"
        )

    def check(self) -> None:
        """Raise `StorageError` when the calling thread may not use the connection any more."""
        if self.has_ended and threading.get_ident() != self._owner_thread:
            raise StorageError("ctx.transaction(): the transaction has ended")

    def interrupt_and_lock(self) -> None:
        """Interrupt other threads' statements until none runs. The caller then holds `lock`."""
        self.has_ended = True
        while not self.lock.acquire(timeout=_INTERRUPT_PAUSE):
            # Repeated, because an interrupt between two statements has no effect.
            self.interrupt()
        for cursor in list(self._cursors):
            # As long as a statement is unfinished, SQLite treats later ones as interrupted too.
            cursor.close()


class _TaskCursor(sqlite3.Cursor):
    """Checks before each call whether the connection may be used."""

    def execute(self, *args: Any) -> Any:
        return self._locked(super().execute, *args)

    def executemany(self, *args: Any) -> Any:
        return self._locked(super().executemany, *args)

    def executescript(self, *args: Any) -> Any:
        return self._locked(super().executescript, *args)

    def fetchone(self) -> Any:
        return self._locked(super().fetchone)

    def fetchmany(self, *args: Any, **options: Any) -> Any:
        return self._locked(partial(super().fetchmany, *args, **options))

    def fetchall(self) -> Any:
        return self._locked(super().fetchall)

    def __next__(self) -> Any:
        return self._locked(super().__next__)

    def _locked(self, call: Callable[..., _T], *args: Any) -> _T:
        connection = self.connection
        assert isinstance(connection, TaskConnection)
        with connection.lock:
            connection.check()
            return call(*args)


class Database:
    """A database file: creates it, connects to it, and checks that it is still the same file.

    `wal_limit`: bytes that the write-ahead log may reach before a checkpoint copies it to the file.
    `rules`: which owners and modes the file, its folder and its logs may have. `largest`: bytes of a blob
    that is read, at most.
    """

    def __init__(
        self,
        path: Path,
        schema: str,
        synchronous: str,
        wal_limit: int,
        random: Callable[[], float],
        rules: PlaceRules,
        largest: int = 0,
    ) -> None:
        self.path = path
        self.largest: Final = largest
        self.wal_limit: Final = wal_limit
        self._schema = schema
        self._synchronous = synchronous
        self._random = random
        self._rules = rules
        self._wal_path = f"{path}-wal"
        self.file_id: tuple[int, int] | None = None
        self._wal: tuple[int, int] | None = None

    def create(self) -> None:
        """Create the file, its folder and its tables unless they exist, readable only by this user.

        Takes no lock if they exist.
        """
        if sqlite3.sqlite_version_info < _MINIMUM_VERSION:
            raise StorageError(
                f"SQLite {sqlite3.sqlite_version} is too old: omniq needs 3.35 or newer"
            )
        try:
            make_store_folder(self.path.parent, self._rules)
            # Checked before anything is read: SQLite obeys a log that lies beside the file.
            check_database(self.path, self._rules)
            _create(self.path)
            found = os.stat(self.path)
        except OSError as error:
            raise StorageError(
                f"SQLite database {self.path}: cannot be created ({error.strerror}); "
                "check that the folder can be written to"
            ) from error
        if not stat.S_ISREG(found.st_mode):
            raise StorageError(f"SQLite database {self.path}: exists and is not a file")
        self.file_id, self._wal = (found.st_dev, found.st_ino), None
        FORKS.check(self)
        with closing(self.connect(Connection, writes=True)) as connection:
            self._prepare(connection)

    def connect(self, kind: type[_C], *, writes: bool, any_thread: bool = False) -> _C:
        """Open a connection in autocommit mode that never runs a checkpoint automatically."""
        # SQLite would create a file that has gone, and other users could read it.
        self.check_unmoved()
        connection = sqlite3.connect(
            self.path,
            # A writer waits in `retry_while_busy` instead, which is quicker and fairer.
            timeout=0.0 if writes else BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=not any_thread,
            cached_statements=256,
            factory=kind,
        )
        # Not through `kind`, which a task may use.
        # And no Python function, in which Ctrl-C would become an error of the statement.
        Connection.create_function(connection, LARGEST[:-2], 0, partial(int, self.largest))
        settings = ["wal_autocheckpoint = 0", f"synchronous = {self._synchronous}"]
        if writes:
            settings += [f"journal_size_limit = {self.wal_limit}", f"cache_size = -{_CACHE_KIB}"]
            # A statement that changes many pages first copies them: by default into a file.
            settings.append("temp_store = MEMORY")
        else:
            settings.append("query_only = 1")
        for setting in settings:
            # These too fail as busy while another process creates the database.
            self.retry_while_busy(partial(connection.execute, f"PRAGMA {setting}"))
        return connection

    def _prepare(self, connection: Connection) -> None:
        """Create or upgrade the tables. Safe when several processes do it at the same time."""
        mode = self.retry_while_busy(
            lambda: connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        )
        if mode != "wal":
            raise StorageError(
                f"SQLite database {self.path}: this file system cannot hold a write-ahead log; "
                "use a local disk"
            )
        if self._version(connection) == SCHEMA_VERSION:
            return
        self.retry_while_busy(lambda: connection.execute("BEGIN IMMEDIATE"))
        try:
            for name, (size, function) in FUNCTIONS.items():
                connection.create_function(name, size, function)
            for name in self._missing(self._version(connection)):
                script = statement(name).replace("{schema}", statement(self._schema))
                for command in script.split(";"):
                    connection.execute(command)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    def _missing(self, version: int) -> list[str]:
        """The SQL files that upgrade from a version to the newest one."""
        if version == 0:
            return [self._schema]
        return [f"{self._schema}_{number}" for number in range(version + 1, SCHEMA_VERSION + 1)]

    def _version(self, connection: Connection) -> int:
        version: int = self.retry_while_busy(
            lambda: connection.execute("PRAGMA user_version").fetchone()[0]
        )
        if version > SCHEMA_VERSION:
            raise StorageError(
                f"SQLite database {self.path}: its schema has version {version}, and this omniq "
                f"knows versions up to {SCHEMA_VERSION}; upgrade omniq"
            )
        return version

    def retry_while_busy(
        self, operation: Callable[[], _T], has_ended: Callable[[], bool] = lambda: False
    ) -> _T:
        """Run the operation; repeat it while the database is busy, for up to `BUSY_SECONDS`.

        Raises the last error sooner if nothing waits for the operation any more (`has_ended`).
        """
        waited, longest = 0.0, _SHORTEST_PAUSE
        while True:
            try:
                return operation()
            except sqlite3.OperationalError as error:
                if not is_busy(error) or waited >= BUSY_SECONDS or has_ended():
                    raise
            # With jitter, so that processes that collided once do not collide again.
            pause = longest * (0.5 + 0.5 * self._random())
            _pause(pause)
            waited += pause
            longest = min(longest * 1.5, _LONGEST_PAUSE)

    def check_unmoved(self) -> None:
        """Raise `StorageError` when the file, or its log, is no longer the one that was opened.

        Writes to a file that was deleted or replaced would be lost.
        """
        self._check(os.fspath(self.path), self.file_id)
        if self._wal is not None:
            self._check(self._wal_path, self._wal)

    def is_same_file(self, path: str) -> bool:
        """Whether the path leads to this file, also under another name."""
        try:
            found = os.stat(path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self.file_id

    def wal_size(self) -> int:
        """The size of the write-ahead log in bytes; raises `StorageError` when it was removed."""
        found = self._check(self._wal_path, self._wal)
        self._wal = (found.st_dev, found.st_ino)
        return found.st_size

    def _check(self, path: str, expected: tuple[int, int] | None) -> os.stat_result:
        try:
            found = os.stat(path)
        except OSError as error:
            raise StorageError(
                f"SQLite database: {path} has gone while it was open ({error.strerror}); "
                "put it back and restart, or restart to begin with an empty store"
            ) from error
        if expected is not None and (found.st_dev, found.st_ino) != expected:
            raise StorageError(
                f"SQLite database: {path} was replaced while it was open; "
                "restart every process that uses it"
            )
        return found

    def check_in_transaction(
        self, connection: Connection, cause: BaseException | None = None
    ) -> None:
        """Raise an error if SQLite itself has rolled back, as it does when the disk is full."""
        if not connection.in_transaction:
            if isinstance(cause, StorageError):
                raise cause
            raise StorageError(
                f"SQLite database {self.path}: SQLite has rolled the transaction back"
            )

    def wrap_error(self, error: Exception) -> OmniqError:
        """Return an error of the driver or the system as a `StorageError` that says what to do."""
        if isinstance(error, OmniqError):
            return error
        code = getattr(error, "sqlite_errorcode", None) or 0
        kind = StorageCorrupt if code & 0xFF in _CORRUPT else StorageError
        advice = _ADVICE.get(code & 0xFF, "")
        wrapped = kind(f"SQLite database {self.path}: {error}{advice}")
        wrapped.__cause__ = error
        return wrapped


_CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

_ADVICE = {
    sqlite3.SQLITE_BUSY: f"; another process has held the write lock for {BUSY_SECONDS:g} s: it is "
    "stopped, or in a very long transaction; find it (fuser, lsof) and continue or end it",
    sqlite3.SQLITE_FULL: "; nothing was written; free some space on the disk and try again",
    sqlite3.SQLITE_IOERR: "; the disk is full, or cannot be read or written; see df and the system's log",
    sqlite3.SQLITE_CORRUPT: "; stop all workers, check it with 'PRAGMA integrity_check', and restore "
    "it from a backup",
    sqlite3.SQLITE_NOTADB: "; the file is something else; check the path, or move the file away",
    sqlite3.SQLITE_READONLY: "; check who owns the file and its folder, and that both can be written "
    "to",
    sqlite3.SQLITE_CANTOPEN: "; check that the folder exists and can be written to",
    sqlite3.SQLITE_TOOBIG: "; a value is too large for SQLite; store it elsewhere and pass a "
    "reference",
}
"""What to do about an error, by the code of SQLite."""


def is_busy(error: BaseException) -> bool:
    """Whether another connection held a lock."""
    code = getattr(error, "sqlite_errorcode", 0)
    return (code & 0xFF) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def is_denied(error: BaseException) -> bool:
    """Whether a task's connection has refused a statement that begins or ends a transaction."""
    return getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_AUTH


def _pause(seconds: float) -> None:
    # Real time, also with a test's clock: the process that holds the lock runs in real time.
    threading.Event().wait(seconds)


def _create(path: Path) -> None:
    if path.exists():
        return
    folder = path.parent
    # Created under another name and then linked: opening and closing the database itself would
    # drop the locks that this process may hold on it through SQLite.
    handle, draft = tempfile.mkstemp(prefix=f".{path.name}-", dir=folder)
    try:
        os.close(handle)
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    """Make a new name in the folder survive a power cut; SQLite does this only for its logs."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
