"""Vacuum: vacuums the table of live tasks while many are claimed.

Every claim leaves dead entries at the start of the index range that the next claim reads. Autovacuum
runs once a minute, which at 20,000 tasks a second is a million dead entries too late.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from omniq.clock import Clock
from omniq.errors import StorageError
from omniq.storage.postgres.connection import ServerConnection
from omniq.storage.postgres.statements import filled

CLAIMS_PER_VACUUM = 20_000

_PAUSE_FACTOR = 20
"""The pause after a vacuum, as a multiple of its duration: vacuuming takes at most 5 % of the time."""


class Vacuum:
    """Counts the claims of one worker and vacuums in the background; no call waits for it.

    When two workers vacuum at the same time, the second one skips the locked table. A user who
    neither owns the table nor has the privilege MAINTAIN cannot vacuum: autovacuum then has to do.
    """

    def __init__(self, connection: ServerConnection, schema: str, clock: Clock) -> None:
        self._connection = connection
        self._sql = filled(schema, "VACUUM (SKIP_LOCKED, TRUNCATE FALSE) {schema}.live")
        self._clock = clock
        self._claims = 0
        self._not_before = 0.0
        self._running: asyncio.Task[None] | None = None

    def count_claims(self, count: int) -> None:
        """Add to the number of claims, and start a vacuum when there were enough."""
        self._claims += count
        if self._claims < CLAIMS_PER_VACUUM or self._clock.monotonic() < self._not_before:
            return
        if self._running is None or self._running.done():
            self._claims = 0
            self._running = asyncio.create_task(self._vacuum())

    async def _vacuum(self) -> None:
        began = self._clock.monotonic()
        with suppress(StorageError):
            await self._connection.run(lambda db: db.execute(self._sql))
        now = self._clock.monotonic()
        self._not_before = now + _PAUSE_FACTOR * (now - began)

    async def close(self) -> None:
        """Cancel a vacuum that is running."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
