"""One SQLite file: creating it, connecting to it, and what its errors mean. Alone knows the driver."""

from __future__ import annotations

import os
import sqlite3
import stat
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeVar
from weakref import WeakSet

from omniq.errors import InvalidTask, StorageCorrupt, StorageError
from omniq.storage.permissions import refuse_shared

Connection = sqlite3.Connection
DriverError = sqlite3.Error
MisuseError = sqlite3.ProgrammingError

PATIENCE = 30.0
"""Seconds to wait for another process's transaction before giving up."""

SCHEMA_VERSION = 2

NOT_YOURS = (
    "ctx.transaction(): the transaction is committed when the block is left, and rolled back when "
    "an exception leaves it; do neither inside"
)

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.004
_OLDEST = (3, 35, 0)
_INTERRUPT_PAUSE = 0.005
_T = TypeVar("_T")
_C = TypeVar("_C", bound=sqlite3.Connection)


class Answer(Protocol):
    """What a statement gave: its first row, and how many rows it wrote."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...


class Statements(Protocol):
    """Whatever runs a statement: a connection of ours, or somebody else's."""

    def execute(self, sql: str, parameters: Any = ..., /) -> Answer: ...


@cache
def statement(name: str) -> str:
    """The SQL of `sql/sqlite/<name>.sql`, without its comments."""
    source = resources.files("omniq.storage.sqlite").joinpath(f"sql/{name}.sql")
    lines = source.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("--")).strip()


class LentConnection(sqlite3.Connection):
    """Used by somebody else, within transactions that only the lender, who made it, can end.

    One of them is inside SQLite at a time, and not just for order: it calls back into Python, so
    that two threads could each hold the lock that the other one waits for.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._lender = lender = threading.get_ident()
        self._cursors: WeakSet[sqlite3.Cursor] = WeakSet()
        self.lock = threading.RLock()
        self.is_over = False
        """Whether nobody but the lender may use it any more."""

        def authorize(action: int, *_: str | None) -> int:
            is_denied = action == sqlite3.SQLITE_TRANSACTION and threading.get_ident() != lender
            return sqlite3.SQLITE_DENY if is_denied else sqlite3.SQLITE_OK

        self.set_authorizer(authorize)

    def cursor(self, *_: Any) -> Any:
        with self.lock:
            self.check()
            cursor = super().cursor(_LentCursor)
            self._cursors.add(cursor)
        return cursor

    def execute(self, *args: Any) -> Any:
        return self.cursor().execute(*args)

    def executemany(self, *args: Any) -> Any:
        return self.cursor().executemany(*args)

    def executescript(self, *args: Any) -> Any:
        return self.cursor().executescript(*args)

    def commit(self) -> None:
        raise InvalidTask(NOT_YOURS)

    def rollback(self) -> None:
        raise InvalidTask(NOT_YOURS)

    def __exit__(self, kind: object, error: object, trace: object, /) -> Literal[False]:
        if kind is None:
            self.commit()
        return False

    def blobopen(self, *args: Any, **options: Any) -> Any:
        raise InvalidTask(
            "ctx.transaction(): this connection opens no blobs; read and write them whole"
        )

    def check(self) -> None:
        """Raise `StorageError` for those who may not use it any more."""
        if self.is_over and threading.get_ident() != self._lender:
            raise StorageError("ctx.transaction(): the transaction has ended")

    def take_back(self) -> None:
        """Wait until nobody uses it, and see to that. The caller holds `lock` afterwards."""
        self.is_over = True
        while not self.lock.acquire(timeout=_INTERRUPT_PAUSE):
            # Again and again: one that comes between two statements is without effect.
            self.interrupt()
        for cursor in list(self._cursors):
            # While a statement is left in the middle, all others count as interrupted too.
            cursor.close()


class _LentCursor(sqlite3.Cursor):
    """Asks for each call whether the connection may be used."""

    def execute(self, *args: Any) -> Any:
        return self._alone(super().execute, *args)

    def executemany(self, *args: Any) -> Any:
        return self._alone(super().executemany, *args)

    def executescript(self, *args: Any) -> Any:
        return self._alone(super().executescript, *args)

    def fetchone(self) -> Any:
        return self._alone(super().fetchone)

    def fetchmany(self, *args: Any, **options: Any) -> Any:
        return self._alone(partial(super().fetchmany, *args, **options))

    def fetchall(self) -> Any:
        return self._alone(super().fetchall)

    def __next__(self) -> Any:
        return self._alone(super().__next__)

    def _alone(self, call: Callable[..., _T], *args: Any) -> _T:
        connection = self.connection
        assert isinstance(connection, LentConnection)
        with connection.lock:
            connection.check()
            return call(*args)


class Database:
    """A file, how to connect to it, and whether it is still the file that was opened.

    `wal_limit`: bytes the write-ahead log may reach before it is copied back into the file.
    """

    def __init__(
        self,
        path: Path,
        *,
        schema: str,
        synchronous: str,
        wal_limit: int,
        random: Callable[[], float],
    ) -> None:
        self.path = path
        self.wal_limit: Final = wal_limit
        self._schema = schema
        self._synchronous = synchronous
        self._random = random
        self._wal_path = f"{path}-wal"
        self._file: tuple[int, int] | None = None
        self._wal: tuple[int, int] | None = None

    def create(self) -> None:
        """Make the file, and its folder, unless they are there: readable by this user alone."""
        if sqlite3.sqlite_version_info < _OLDEST:
            raise StorageError(
                f"SQLite {sqlite3.sqlite_version} is too old: omniq needs 3.35 or newer"
            )
        try:
            _create(self.path)
            found = os.stat(self.path)
        except OSError as error:
            raise StorageError(
                f"SQLite database {self.path}: cannot be created ({error.strerror}); "
                "check that the folder can be written to"
            ) from error
        if not stat.S_ISREG(found.st_mode):
            raise StorageError(f"SQLite database {self.path}: exists and is not a file")
        refuse_shared(self.path)
        self._file, self._wal = (found.st_dev, found.st_ino), None

    def connect(self, *, writes: bool, any_thread: bool = False) -> Connection:
        """A connection in autocommit mode that never checkpoints by itself."""
        return self._connect(Connection, writes=writes, any_thread=any_thread)

    def lend(self) -> LentConnection:
        """A connection for somebody else, within transactions that the calling thread ends."""
        return self._connect(LentConnection, writes=True, any_thread=True)

    def _connect(self, kind: type[_C], *, writes: bool, any_thread: bool) -> _C:
        connection = sqlite3.connect(
            self.path,
            # A writer waits by its own rules (`patiently`), which are quicker and fairer.
            timeout=0.0 if writes else PATIENCE,
            isolation_level=None,
            check_same_thread=not any_thread,
            cached_statements=256,
            factory=kind,
        )
        settings = ["wal_autocheckpoint = 0", f"synchronous = {self._synchronous}"]
        settings.append(f"journal_size_limit = {self.wal_limit}" if writes else "query_only = 1")
        for setting in settings:
            # Even these have to wait while another process creates the database.
            self.patiently(partial(connection.execute, f"PRAGMA {setting}"))
        return connection

    def prepare(self, connection: Connection) -> None:
        """Create the tables, or bring them up to date. Safe when many processes do it at once."""
        mode = self.patiently(lambda: connection.execute("PRAGMA journal_mode = WAL").fetchone()[0])
        if mode != "wal":
            raise StorageError(
                f"SQLite database {self.path}: this file system cannot hold a write-ahead log; "
                "use a local disk"
            )
        if self._version(connection) == SCHEMA_VERSION:
            return
        self.patiently(lambda: connection.execute("BEGIN IMMEDIATE"))
        try:
            for name in self._missing(self._version(connection)):
                for command in statement(name).split(";"):
                    connection.execute(command)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    def _missing(self, version: int) -> list[str]:
        """The files that lead from a version to the newest one."""
        if version == 0:
            return [self._schema]
        return [f"{self._schema}_{number}" for number in range(version + 1, SCHEMA_VERSION + 1)]

    def _version(self, connection: Connection) -> int:
        version: int = self.patiently(
            lambda: connection.execute("PRAGMA user_version").fetchone()[0]
        )
        if version > SCHEMA_VERSION:
            raise StorageError(
                f"SQLite database {self.path}: its schema has version {version}, and this omniq "
                f"knows versions up to {SCHEMA_VERSION}; upgrade omniq"
            )
        return version

    def patiently(self, operation: Callable[[], _T]) -> _T:
        """Do it, again and again while another connection is in the way, up to `PATIENCE` seconds."""
        waited, longest = 0.0, _SHORTEST_PAUSE
        while True:
            try:
                return operation()
            except sqlite3.OperationalError as error:
                if not is_busy(error) or waited >= PATIENCE:
                    raise
            # By chance, so that processes that collided once do not collide again.
            pause = longest * (0.5 + 0.5 * self._random())
            _pause(pause)
            waited += pause
            longest = min(longest * 1.5, _LONGEST_PAUSE)

    def check_unmoved(self) -> None:
        """Raise `StorageError` when the file, or its log, is no longer the one that was opened.

        Whoever goes on writing to a file that was deleted or replaced writes into the void.
        """
        self._check(os.fspath(self.path), self._file)
        if self._wal is not None:
            self._check(self._wal_path, self._wal)

    def is_at(self, path: str) -> bool:
        """Whether that path leads to this very file, whatever it is called."""
        try:
            found = os.stat(path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._file

    def wal_size(self) -> int:
        """How long the write-ahead log is, in bytes. Raises `StorageError` when it was taken away."""
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

    def explained(self, error: Exception) -> StorageError:
        """What a driver's or the system's error means for this file, and what to do about it."""
        where = f"SQLite database {self.path}"
        if not isinstance(error, sqlite3.Error):
            return StorageError(f"{where}: {error}")
        code = getattr(error, "sqlite_errorcode", None)
        kind, advice = _MEANINGS.get((code or 0) & 0xFF, (StorageError, ""))
        return kind(f"{where}: {error}" + (f"; {advice}" if advice else ""))


_MEANINGS: dict[int, tuple[type[StorageError], str]] = {
    sqlite3.SQLITE_BUSY: (
        StorageError,
        f"another process has held the write lock for {PATIENCE:g} s: it is stopped, or in a very "
        "long transaction; find it (fuser, lsof) and let it go on or end it",
    ),
    sqlite3.SQLITE_FULL: (
        StorageError,
        "nothing of this was written; free some space on the disk and try again",
    ),
    sqlite3.SQLITE_IOERR: (
        StorageError,
        "the disk could not be read or written; see the system's log",
    ),
    sqlite3.SQLITE_CORRUPT: (
        StorageCorrupt,
        "stop all workers, check it with 'PRAGMA integrity_check', and restore it from a backup",
    ),
    sqlite3.SQLITE_NOTADB: (
        StorageCorrupt,
        "the file is something else; check the path, or move the file away",
    ),
    sqlite3.SQLITE_READONLY: (
        StorageError,
        "check who owns the file and its folder, and that both can be written to",
    ),
    sqlite3.SQLITE_CANTOPEN: (
        StorageError,
        "check that the folder exists and can be written to",
    ),
    sqlite3.SQLITE_TOOBIG: (
        StorageError,
        "a value is too large for SQLite; store it elsewhere and pass a reference",
    ),
}


def is_busy(error: BaseException) -> bool:
    """Whether another connection was in the way."""
    code = getattr(error, "sqlite_errorcode", 0)
    return (code & 0xFF) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def is_denied(error: BaseException) -> bool:
    """Whether a lent connection would not do what only its lender may."""
    return getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_AUTH


def _pause(seconds: float) -> None:
    # Real time even on a clock that a test moves: the one who holds the lock lives in real time.
    threading.Event().wait(seconds)


def _create(path: Path) -> None:
    if path.exists():
        return
    folder = path.parent
    if not folder.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Made under another name and then linked: opening and closing the database itself would drop
    # the locks that this process may hold on it through SQLite.
    handle, draft = tempfile.mkstemp(prefix=f".{path.name}-", dir=folder)
    try:
        os.close(handle)
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    """Make a new name in the folder survive a power cut; SQLite does so for its logs only."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
