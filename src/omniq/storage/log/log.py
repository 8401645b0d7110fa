"""The port of a log: numbered commits, of which each is stored once, and a snapshot."""

from __future__ import annotations

from typing import Protocol

from omniq.errors import StorageError
from omniq.storage.log.encoding import Commit


class Trimmed(StorageError):
    """The commit is no longer stored: a snapshot has replaced it."""


class Log(Protocol):
    """One connection to a log. Used by one thread, in the event loop that opened it.

    Retries of a driver must be off: the replica settles by the id of a commit whether it is stored.
    """

    def now(self) -> int:
        """The time of the log's server in microseconds, as far as it is known here.

        Processes should differ by less than a second: leases end by it.
        """
        ...

    async def open(self) -> None:
        """Connect; does nothing when connected. `StorageRefused` if the server cannot be used."""
        ...

    async def close(self) -> None:
        """Disconnect. Never raises."""
        ...

    async def append(self, number: int, data: bytes) -> bool:
        """Store a commit as durably as the store promises; False if that number is, or was, taken.

        `StorageError` if it is not known whether the commit was stored.
        """
        ...

    async def read(self, first: int) -> list[bytes]:
        """Return all commits from that number to the end of the log, as it was after this call began.

        Raises `Trimmed` if `first` was deleted.
        """
        ...

    async def load_snapshot(self) -> tuple[int, bytes] | None:
        """Return the newest snapshot, and the number of the last commit in it."""
        ...

    async def save_snapshot(self, number: int, data: bytes) -> None:
        """Store the state after that commit. Commits up to it may be deleted, but not immediately.

        A process whose append was not answered looks for its commit; if that was deleted, it cannot
        tell whether it was stored.
        """
        ...

    def committed(self, commit: Commit) -> None:
        """Called after a commit of this process was stored, to notify other processes. Never waits."""
        return
