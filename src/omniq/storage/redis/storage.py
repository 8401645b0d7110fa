"""Tasks in a Redis or Valkey server that a fleet shares."""

from __future__ import annotations

import os
import re
from contextlib import suppress

from omniq.clock import SYSTEM_CLOCK, Clock
from omniq.errors import SettingsError, StorageError
from omniq.models import TaskResult
from omniq.serialization import Serializer
from omniq.settings import Settings
from omniq.storage.base import BaseStorage
from omniq.storage.enqueue_batcher import EnqueueBatcher
from omniq.storage.redis import server_check
from omniq.storage.redis.backend import RedisBackend
from omniq.storage.redis.connection import OutOfMemory
from omniq.storage.redis.section import SHORT_TTL
from omniq.storage.row_rules import Row

_PREFIX = re.compile(r"[^{}\s]{1,100}")

_NOTIFIED_PAUSE, _POLLING_PAUSE = 1.0, 0.1
"""Seconds between two polls for a result, at most: with and without notifications."""


class RedisStorage(BaseStorage):
    """A store in the server at `url`; all its keys begin with `{prefix}`."""

    _backend: RedisBackend

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "omniq",
        serializer: Serializer | None = None,
        clock: Clock = SYSTEM_CLOCK,
        settings: Settings | None = None,
        max_pending: int | None = None,
    ) -> None:
        super().__init__(
            serializer=serializer, clock=clock, settings=settings, max_pending=max_pending
        )
        if not _PREFIX.fullmatch(prefix):
            raise SettingsError(
                f"prefix {prefix!r}: expected 1 to 100 characters, no space or brace"
            )
        self._pid = 0
        self._use(RedisBackend(url, prefix, clock, self._local_wakeups))

    async def server_report(self) -> list[tuple[str, str, str]]:
        """The server's settings for `omniq doctor`, each as `(name, value, verdict)`."""
        self._check_open()
        return server_check.report(await server_check.read_facts(self._backend.scripts.command))

    # Opening and closing

    async def _open(self) -> None:
        self._pid = os.getpid()
        # The engine knows rows that an earlier opening has claimed.
        self._use(self._backend)
        await super()._open()
        # With a limit, one at a time: the first call gets the room that is left.
        self._enqueues = EnqueueBatcher(
            self._insert, concurrent_writes=2 if self._max_pending is None else 1
        )

    async def close(self) -> None:
        if self._is_open and self._pid != os.getpid():
            # After a fork, the connection and the claims belong to the parent. They are left alone.
            self._is_open = False
            self._held.clear()
            self._claim_ids.clear()
            return
        await super().close()

    def _check_open(self) -> None:
        super()._check_open()
        if self._pid != os.getpid():
            raise StorageError(
                f"Redis storage: opened by process {self._pid}, and used in process {os.getpid()} "
                "after a fork; open a separate storage in each process"
            )

    # Enqueue

    async def _enqueue(self, rows: list[Row]) -> list[str]:
        if any(row.result_ttl < SHORT_TTL for row in rows):
            return await self._engine.enqueue(rows)
        return await self._enqueues.add(rows)

    async def _insert(self, rows: list[Row]) -> list[str]:
        row = rows[0]
        if len(rows) == 1 and self._max_pending is None and row.visible <= 0 and not row.unique:
            # When memory is full or the id is taken, the engine says what to do.
            with suppress(OutOfMemory):
                if await self._backend.enqueue_one(row):
                    return [row.id]
        return await self._engine.enqueue(rows)

    # Waiting

    async def wait_for_result(
        self, task_id: str, timeout: float | None = None
    ) -> TaskResult | None:
        if timeout is None or timeout > 0:
            result = await self.get_result(task_id)
            if result is not None and result.status.is_final:
                return result
            wakeups = self._backend.wakeups
            await wakeups.open()
            await self._backend.run("await_result", task_id)
            self._longest_pause = _NOTIFIED_PAUSE if wakeups.is_open else _POLLING_PAUSE
        return await super().wait_for_result(task_id, timeout)
