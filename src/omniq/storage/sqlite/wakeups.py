"""Wake-ups: notices that another process has changed the store, without a thread or a file lock."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from omniq.storage.sqlite import tables
from omniq.storage.sqlite.claim import ready_queues
from omniq.storage.sqlite.connection import Connection, DriverError


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

    def has_work(self, queues: Sequence[str] | None) -> bool:
        """Whether there may be ready tasks in these queues."""
        try:
            with self._lock:
                return bool(ready_queues(self._connection, tables.READY, queues))
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
