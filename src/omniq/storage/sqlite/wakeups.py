"""Wake-ups: notices that another process has changed the store, without a thread or a file lock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar, cast

import msgspec

from omniq.storage.backend import Wanted
from omniq.storage.sqlite.connection import Connection, Database, DriverError
from omniq.storage.sqlite.forks import FORKS
from omniq.storage.sqlite.lanes import ready_lanes
from omniq.storage.sqlite.tables import read_array

_T = TypeVar("_T")
_NEXT_DUE = (
    "SELECT min(due) FROM (SELECT min(visible) AS due FROM omniq_live WHERE place = 2 UNION ALL "
    "SELECT min(due) FROM omniq_documents WHERE kind = 'gate' AND due IS NOT NULL)"
)
_PAUSED = "SELECT json_group_array(key) FROM omniq_documents WHERE kind = 'paused_queue'"


class Wakeups:
    """Reads of a few microseconds on a separate connection, for callers in any thread.

    A wake-up is not needed for correctness: when the database cannot be read, the caller polls.
    """

    def __init__(self, database: Database) -> None:
        self._lock = threading.Lock()
        FORKS.guard(self._lock, database)
        with self._lock:
            self._connection = database.connect(Connection, writes=False, any_thread=True)

    def version(self) -> int:
        """A number that changes with every commit on another connection; -1 when it is unknown."""
        return self._read(lambda db: int(db.execute("PRAGMA data_version").fetchone()[0]), -1)

    def has_work(self, wanted: Wanted | None) -> bool:
        """Whether there may be ready tasks that `wanted`, that of the last claim, accepts."""
        if wanted is None:
            return True

        def read(db: Connection) -> bool:
            paused = frozenset(read_array(db, _PAUSED))
            return bool(ready_lanes(db, msgspec.structs.replace(wanted, paused=paused)))

        return self._read(read, True)

    def next_due(self) -> int | None:
        """When the next delayed task is due, or a limit may have room; None if never, or unknown."""
        return self._read(lambda db: cast("int | None", db.execute(_NEXT_DUE).fetchone()[0]), None)

    def _read(self, work: Callable[[Connection], _T], unknown: _T) -> _T:
        try:
            with self._lock:
                return work(self._connection)
        except DriverError:
            return unknown

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._connection.close()
