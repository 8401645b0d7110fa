"""Tasks on a shared log."""

from __future__ import annotations

from collections.abc import Callable

from omniq.clock import SYSTEM_CLOCK, Clock
from omniq.serialization import Serializer
from omniq.settings import Settings
from omniq.storage.base import BaseStorage
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
        serializer: Serializer | None = None,
        clock: Clock = SYSTEM_CLOCK,
        settings: Settings | None = None,
        max_pending: int | None = None,
        snapshot_bytes: int = SNAPSHOT_BYTES,
    ) -> None:
        super().__init__(
            serializer=serializer, clock=clock, settings=settings, max_pending=max_pending
        )
        connection = Connection(connect, clock, snapshot_bytes)
        self._use(LogBackend(connection, capabilities, clock, self._local_wakeups))
