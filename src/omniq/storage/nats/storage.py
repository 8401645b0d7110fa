"""Tasks in the streams of a NATS server that a fleet shares."""

from __future__ import annotations

from typing import Unpack

from omniq.storage.base import BaseStorage, StorageOptions
from omniq.storage.log.replica import SNAPSHOT_BYTES
from omniq.storage.nats.address import parse
from omniq.storage.nats.backend import NatsBackend, Streams
from omniq.storage.store_clock import clock_of_store


class NatsStorage(BaseStorage):
    """A store in the server or cluster at `url`: `nats://host:4222/store`."""

    _backend: NatsBackend

    def __init__(
        self,
        url: str,
        *,
        snapshot_bytes: int = SNAPSHOT_BYTES,
        **options: Unpack[StorageOptions],
    ) -> None:
        super().__init__(**options)
        clock = clock_of_store(self._clock)
        streams = Streams(parse(url), clock, self._local_wakeups, snapshot_bytes)
        self._use(NatsBackend(streams, self._local_wakeups))

    async def server_report(self) -> list[tuple[str, str, str]]:
        """The settings of the server for `omniq doctor`, each as `(name, value, verdict)`."""
        self._check_open()
        return await self._backend.server_report()
