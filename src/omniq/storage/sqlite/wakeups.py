"""Notices, without a thread or a lock, that another process has changed the store."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from omniq.storage.sqlite import tables
from omniq.storage.sqlite.claim import ready_queues
from omniq.storage.sqlite.connection import Connection, DriverError


class Watch:
    """Reads of a few microseconds on a connection of its own, from whichever thread asks.

    All of it is a hint: when the database cannot be asked just now, the answer is "maybe".
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def version(self) -> int:
        """A number that changes with every commit of anybody else."""
        try:
            with self._lock:
                (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        except DriverError:
            return -1
        return int(version)

    def has_work(self, queues: Sequence[str] | None) -> bool:
        """Whether there is something to claim in these queues."""
        try:
            with self._lock:
                return bool(ready_queues(self._connection, tables.READY, queues))
        except DriverError:
            return True

    def next_due(self) -> int | None:
        """When the next task that waits for its time comes due."""
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
