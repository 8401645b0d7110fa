"""Forks: a process that was forked while its parent had a database open may open it too.

A fork copies what SQLite remembers of its locks, and not the locks: POSIX locks belong to one process. So SQLite in
the child counts on locks that nobody holds. If a transaction ran in the parent, the child would wait for
its end for ever. Otherwise the parent, when it closes, would remove the log to which the child writes.

- A fork waits until no connection of a storage is in use.
- The child takes the locks that SQLite counts on, and keeps them as long as it lives.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path
from typing import Protocol
from weakref import WeakKeyDictionary

from omniq.errors import StorageError

_PATIENCE = 2.0
"""Seconds for which a fork waits for connections that are in use: a task may hold a transaction for long."""

_SHARED_LOCK = 0x4000_0002, 510
"""First byte and length of the lock that each connection holds on the file, from SQLite's `os.h`."""

_LOG_IN_USE = 128, 1
"""The lock on `<path>-shm` of each process that uses the log, from SQLite's `os_unix.c`."""

_FileId = tuple[int, int]


class _Database(Protocol):
    path: Path
    file_id: _FileId | None


class _Forks:
    """Knows the turns of the connections of this process, and what its parents had open."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._turns: WeakKeyDictionary[threading.Lock, _Database] = WeakKeyDictionary()
        self._held: list[threading.Lock] = []
        self._in_use: set[_FileId] = set()
        self._inherited: dict[_FileId, Path] = {}
        self._kept: list[int] = []
        self._unusable: set[_FileId] = set()
        self._is_registered = False

    def guard(self, turn: threading.Lock, database: _Database) -> None:
        """Have forks wait for the turn, which every user of a connection to the database holds meanwhile."""
        with self._lock:
            if not self._is_registered:
                # Not at the import, which has no effect on a program without a store.
                self._is_registered = True
                os.register_at_fork(
                    before=self._take_turns,
                    after_in_parent=self._return_turns,
                    after_in_child=self._take_locks,
                )
            self._turns[turn] = database

    def check(self, database: _Database) -> None:
        """Raise `StorageError` if SQLite in this process counts on a lock that the process has not."""
        if database.file_id in self._unusable:
            raise StorageError(
                f"SQLite database {database.path}: this process was forked while its parent wrote to "
                "the database, and cannot use it; fork outside of transactions, or start the process "
                "with multiprocessing's 'spawn'"
            )

    def _take_turns(self) -> None:
        self._lock.acquire()
        patience = _PATIENCE
        for turn, database in list(self._turns.items()):
            if turn.acquire(timeout=patience):
                self._held.append(turn)
            elif database.file_id is not None:
                self._in_use.add(database.file_id)
                patience = 0.0

    def _return_turns(self) -> None:
        while self._held:
            self._held.pop().release()
        self._in_use.clear()
        self._lock.release()

    def _take_locks(self) -> None:
        for database in list(self._turns.values()):
            if database.file_id is not None:
                self._inherited[database.file_id] = database.path
        self._unusable |= self._in_use
        for file_id, path in self._inherited.items():
            # Without a log, no connection has read anything yet.
            if not (
                self._keep(os.fspath(path), file_id, _SHARED_LOCK)
                and self._keep(f"{path}-shm", None, _LOG_IN_USE)
            ):
                self._unusable.add(file_id)
        self._return_turns()

    def _keep(self, path: str, file_id: _FileId | None, lock: tuple[int, int]) -> bool:
        """Take the lock; False if another process has begun to remove the log."""
        try:
            # Never closed: that would drop all locks of this process on the file.
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            # Removed or moved: what is there later is another file.
            return True
        self._kept.append(file)
        found = os.fstat(file)
        if file_id is not None and (found.st_dev, found.st_ino) != file_id:
            return True
        start, length = lock
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB, length, start)
        except OSError:
            return False
        return True


FORKS = _Forks()
