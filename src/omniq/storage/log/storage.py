"""Tasks on a shared log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from omniq.storage.base import BaseStorage, StorageOptions
from omniq.storage.log.backend import Connection, LogBackend
from omniq.storage.log.log import Log
from omniq.storage.log.replica import SNAPSHOT_BYTES
from omniq.storage.types import Capabilities


class LogStorage(BaseStorage):
    """A store on the log that `connect` connects to; it is called each time the storage is opened."""

    def __init__(
        self,
        connect: Callable[[], Log],
        *,
        capabilities: Capabilities,
        snapshot_bytes: int = SNAPSHOT_BYTES,
        **options: Unpack[StorageOptions],
    ) -> None:
        super().__init__(**options)
        connection = Connection(connect, self._clock, snapshot_bytes)
        self._use(LogBackend(connection, capabilities, self._clock, self._local_wakeups))
