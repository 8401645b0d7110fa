"""Listens for hints from the server, for as long as somebody wants to hear them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from omniq.clock import SYSTEM_CLOCK
from omniq.errors import StorageError
from omniq.storage.redis.connection import Link

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_PATIENCE = 1.0
"""Seconds that somebody who wants to hear waits until it does; then polling has to do."""


class Ear:
    """A subscription that comes back by itself when it was lost; messages meanwhile are lost.

    `on_message` gets channel and text, and two empty texts when something may have been missed.
    """

    def __init__(
        self, link: Link, channels: list[str], on_message: Callable[[str, str], None]
    ) -> None:
        self._link = link
        self._channels = channels
        self._on_message = on_message
        self._task: asyncio.Task[None] | None = None
        self._is_open = asyncio.Event()
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether messages arrive."""
        return self._is_open.is_set()

    async def open(self) -> bool:
        """Begin to listen; whether that has begun by this call."""
        if self._is_open.is_set() or self._is_closed:
            return False
        if self._task is None:
            self._task = asyncio.create_task(self._listen())
        # Not `wait_for`, which on Python 3.11 may swallow a cancellation.
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                await self._is_open.wait()
        return self._is_open.is_set()

    async def close(self) -> None:
        """Listen no more, for good."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self._is_open.clear()

    async def _listen(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            # A hint less is no harm: whoever waits polls as well.
            with suppress(StorageError):
                await self._link.listen(self._channels, self._heard)
            if self._is_open.is_set():
                self._is_open.clear()
                pause = _FIRST_PAUSE
            await SYSTEM_CLOCK.sleep(pause * (0.5 + SYSTEM_CLOCK.random() / 2))
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _heard(self, channel: str, text: str) -> None:
        self._is_open.set()
        self._on_message(channel, text)
