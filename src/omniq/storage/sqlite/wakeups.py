"""Wake-ups: notices that another process has changed the store, without a thread or a file lock."""

from __future__ import annotations

import threading

import msgspec

from omniq.storage.backend import Wanted
from omniq.storage.sqlite.connection import Connection, DriverError
from omniq.storage.sqlite.lanes import ready_lanes
from omniq.storage.sqlite.tables import read_array

_PAUSED = "SELECT json_group_array(key) FROM omniq_documents WHERE kind = 'paused_queue'"


class Wakeups:
    """Reads of a few microseconds on a separate connection, for callers in any thread.

    A wake-up is not needed for correctness: when the database cannot be read, the caller polls.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def version(self) -> int:
        """A number that changes with every commit on another connection; -1 when it is unknown."""
        try:
            with self._lock:
                (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        except DriverError:
            return -1
        return int(version)

    def has_work(self, wanted: Wanted | None) -> bool:
        """Whether there may be ready tasks that `wanted`, that of the last claim, accepts."""
        if wanted is None:
            return True
        try:
            with self._lock:
                paused = read_array(self._connection, _PAUSED)
                wanted = msgspec.structs.replace(wanted, paused=frozenset(paused))
                return bool(ready_lanes(self._connection, wanted))
        except DriverError:
            return True

    def next_due(self) -> int | None:
        """When the next delayed task is due; None when there is none or it is unknown."""
        try:
            with self._lock:
                (due,) = self._connection.execute(
                    "SELECT min(visible) FROM omniq_live WHERE place = 2"
                ).fetchone()
        except DriverError:
            return None
        return None if due is None else int(due)

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._connection.close()
