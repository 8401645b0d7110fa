"""Storage: tasks in one SQLite file that any number of processes on one machine share."""

from __future__ import annotations

import os
from pathlib import Path

from omniq.clock import SYSTEM_CLOCK, Clock
from omniq.errors import StorageError
from omniq.serialization import Serializer
from omniq.settings import Settings
from omniq.storage.base import BaseStorage
from omniq.storage.sqlite.backend import SQLiteBackend


class SQLiteStorage(BaseStorage):
    """A store in the file at `path`, with its leases in `<path>-leases`."""

    _backend: SQLiteBackend

    def __init__(
        self,
        path: Path | str,
        *,
        serializer: Serializer | None = None,
        clock: Clock = SYSTEM_CLOCK,
        settings: Settings | None = None,
        max_pending: int | None = None,
    ) -> None:
        super().__init__(
            serializer=serializer, clock=clock, settings=settings, max_pending=max_pending
        )
        self._path = Path(path)
        self._pid = 0
        self._use(SQLiteBackend(self._path, clock, self._settings, self._local_wakeups))

    async def _open(self) -> None:
        self._pid = os.getpid()
        await super()._open()

    async def close(self) -> None:
        if self._is_open and self._pid != os.getpid():
            # After a fork the connections and claims are the parent's: neither is touched.
            self._is_open = False
            self._forget_claims()
            return
        if self._is_open:
            # Before any other write, because an open transaction blocks all writers.
            await self._backend.end_transactions()
        await super().close()

    def _check_open(self) -> None:
        super()._check_open()
        if self._pid != os.getpid():
            raise StorageError(
                f"SQLite database {self._path}: opened by process {self._pid}, and used in process "
                f"{os.getpid()} after a fork; open a separate storage in each process"
            )
