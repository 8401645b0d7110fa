"""Storage: tasks in one SQLite file that any number of processes on one machine share."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from omniq.storage.base import BaseStorage, StorageOptions
from omniq.storage.sqlite.backend import SQLiteBackend


class SQLiteStorage(BaseStorage):
    """A store in the file at `path`, with its leases in `<path>-leases`."""

    _enqueue_writes = 1

    def __init__(self, path: Path | str, **options: Unpack[StorageOptions]) -> None:
        super().__init__(**options)
        self._use(SQLiteBackend(Path(path), self._clock, self._settings, self._local_wakeups))
