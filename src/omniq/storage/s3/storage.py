"""Tasks in a bucket of S3, or of a server with its API, that a fleet shares."""

from __future__ import annotations

from typing import Any, Unpack

from omniq.storage.base import BaseStorage, StorageOptions
from omniq.storage.log.backend import Connection, LogBackend
from omniq.storage.log.replica import SNAPSHOT_BYTES
from omniq.storage.s3 import server_check
from omniq.storage.s3.address import parse
from omniq.storage.s3.connection import S3Connection
from omniq.storage.s3.object_log import S3Log
from omniq.storage.s3.trimming import KEPT_FOR
from omniq.storage.store_clock import StoreClock, clock_of_store
from omniq.storage.types import Capabilities

_CAPABILITIES = Capabilities(name="s3", durability="power", reach="fleet", slow_writes=True)
_COMMIT_BYTES = 16 * 1024
"""The least number of bytes that a commit counts as: a request takes as long as their transfer."""

_CLOCKS_DIFFER = 2_000_000
"""Microseconds by which the estimates of the server's time in two processes may differ."""


class S3Storage(BaseStorage):
    """A store below a prefix of a bucket: `s3://bucket/prefix?endpoint=…&region=…`.

    Credentials come from the environment or from the role of the machine; `credentials` is a credential
    provider of obstore, for other sources.
    """

    _backend: LogBackend

    def __init__(
        self,
        url: str,
        *,
        credentials: Any = None,
        snapshot_bytes: int = SNAPSHOT_BYTES,
        kept_for: int = KEPT_FOR,
        **options: Unpack[StorageOptions],
    ) -> None:
        super().__init__(**options)
        address = parse(url)
        clock = clock_of_store(self._clock)

        def reach() -> S3Connection:
            return S3Connection(address, clock, credentials)

        def connect() -> S3Log:
            return S3Log(reach(), clock, kept_for)

        self._reach = reach
        self._use(
            LogBackend(
                Connection(connect, clock, snapshot_bytes, _COMMIT_BYTES),
                _CAPABILITIES,
                clock,
                self._local_wakeups,
                margin=_CLOCKS_DIFFER if isinstance(clock, StoreClock) else 0,
            )
        )

    async def server_report(self) -> list[tuple[str, str, str]]:
        """Checks of the server for `omniq doctor`, each as `(name, value, verdict)`."""
        self._check_open()
        return await server_check.report(self._reach(), self._clock, self._settings)
