"""Vacuuming the live tasks while many are claimed.

Every claim leaves dead entries at the very place of the index where the next one begins to look.
The server's own vacuum comes by once a minute, which at 20,000 tasks a second is late by a million
of them.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from omniq.clock import Clock
from omniq.errors import StorageError
from omniq.storage.postgres.connection import Link
from omniq.storage.postgres.statements import Names

CLAIMS = 20_000
"""After how many it is worth the while."""

_SHARE = 20
"""It takes at most one part in so many of the time, however large the table is."""


class Tidying:
    """Counts what one worker claims. It comes by on its own, and nobody waits for it.

    Two at once do it once. A user who neither owns the table nor may MAINTAIN it is not allowed to:
    then the server's own vacuum has to do.
    """

    def __init__(self, link: Link, names: Names, clock: Clock) -> None:
        self._link = link
        self._sql = names("VACUUM (SKIP_LOCKED, TRUNCATE FALSE) {schema}.live")
        self._clock = clock
        self._claims = 0
        self._not_before = 0.0
        self._chore: asyncio.Task[None] | None = None

    def claimed(self, count: int) -> None:
        """So many more have been claimed."""
        self._claims += count
        if self._claims < CLAIMS or self._clock.monotonic() < self._not_before:
            return
        if self._chore is None or self._chore.done():
            self._claims = 0
            self._chore = asyncio.create_task(self._vacuum())

    async def _vacuum(self) -> None:
        began = self._clock.monotonic()
        with suppress(StorageError):
            await self._link.run(lambda db: db.execute(self._sql))
        now = self._clock.monotonic()
        self._not_before = now + _SHARE * (now - began)

    async def close(self) -> None:
        """Stop."""
        if self._chore is not None:
            self._chore.cancel()
            await asyncio.wait([self._chore])
