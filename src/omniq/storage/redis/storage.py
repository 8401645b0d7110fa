"""Tasks in a Redis or Valkey server that a fleet shares."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Unpack

from omniq.errors import SettingsError
from omniq.storage.backend import largest_value
from omniq.storage.base import BaseStorage, StorageOptions
from omniq.storage.redis import server_check
from omniq.storage.redis.backend import RedisBackend
from omniq.storage.redis.error_replies import OutOfMemory
from omniq.storage.redis.section import SHORT_TTL
from omniq.storage.row_rules import Row

_PREFIX = re.compile(r"[^{}\s]{1,100}")


class RedisStorage(BaseStorage):
    """A store in the server at `url`; all its keys begin with `{prefix}`, by default that of the settings."""

    _backend: RedisBackend
    _enqueue_writes = 2
    _joined_ttl = SHORT_TTL

    def __init__(
        self,
        url: str,
        *,
        prefix: str | None = None,
        **options: Unpack[StorageOptions],
    ) -> None:
        super().__init__(**options)
        prefix = self._settings.prefix if prefix is None else prefix
        if not _PREFIX.fullmatch(prefix):
            raise SettingsError(
                f"prefix {prefix!r}: expected 1 to 100 characters, no space or brace"
            )
        largest = largest_value(self._settings.max_payload)
        patience = self._settings.reconnect_timeout
        self._use(RedisBackend(url, prefix, self._clock, self._local_wakeups, largest, patience))

    async def server_report(self) -> list[tuple[str, str, str]]:
        """The server's settings for `omniq doctor`, each as `(name, value, verdict)`."""
        self._check_open()
        return server_check.report(await self._backend.server_facts())

    async def _insert(self, rows: list[Row]) -> list[str]:
        row = rows[0]
        if (
            len(rows) == 1
            and self._max_pending is None
            and row.visible <= 0
            and not (row.unique or row.fair)
        ):
            # When memory is full or the id is taken, the engine says what to do.
            with suppress(OutOfMemory):
                if await self._backend.enqueue_one(row):
                    return [row.id]
        return await super()._insert(rows)
