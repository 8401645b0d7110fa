"""A second connection to the storage, for searches, so that a slow search does not delay the snapshots.

The first search opens it, and it is closed after some time without searches. A mounted application gets no shutdown
notification, so it must not keep an unused connection open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from omniq.storage.base import BaseStorage

_IDLE_SECONDS = 20.0


class SearchConnection:
    """Opens and closes a sibling of the storage."""

    def __init__(self, storage: BaseStorage) -> None:
        self._storage = storage
        self._sibling: BaseStorage | None = None
        self._lock = asyncio.Lock()
        self._users = 0
        self._closing: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def use(self) -> AsyncIterator[BaseStorage]:
        """The storage over the second connection."""
        self._users += 1
        try:
            yield await self._opened()
        finally:
            self._users -= 1
            if not self._users:
                self._close_later()

    async def close(self) -> None:
        """Close the connection."""
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
        async with self._lock:
            sibling, self._sibling = self._sibling, None
            if sibling is not None:
                await sibling.close()

    async def _opened(self) -> BaseStorage:
        async with self._lock:
            if self._sibling is None:
                sibling = self._storage.sibling()
                await sibling.open()
                self._sibling = sibling
            return self._sibling

    def _close_later(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
        self._closing = asyncio.get_running_loop().create_task(self._close_when_idle())

    async def _close_when_idle(self) -> None:
        await self._storage.clock.sleep(_IDLE_SECONDS)
        if not self._users:
            self._closing = None
            await self.close()
