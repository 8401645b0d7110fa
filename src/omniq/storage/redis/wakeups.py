"""Wake-ups: a subscription to the notifications that the server publishes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from omniq.clock import SYSTEM_CLOCK
from omniq.concurrency.backoff import backoff
from omniq.errors import StorageError
from omniq.storage.redis.connection import ServerConnection

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_SUBSCRIBE_SECONDS = 1.0
"""How long a caller waits for the subscription; after that it polls."""


class Wakeups:
    """A subscription that is renewed when it is lost; messages in between are missed.

    `on_message` receives channel and text, and two empty strings when messages may have been missed.
    """

    def __init__(
        self,
        connection: ServerConnection,
        channels: list[str],
        on_message: Callable[[str, str], None],
    ) -> None:
        self._connection = connection
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
        """Subscribe; returns whether the subscription began during this call."""
        if self._is_open.is_set() or self._is_closed:
            return False
        if self._task is None:
            self._task = asyncio.create_task(self._listen())
        # Not `wait_for`, which on Python 3.11 may swallow a cancellation.
        with suppress(TimeoutError):
            async with asyncio.timeout(_SUBSCRIBE_SECONDS):
                await self._is_open.wait()
        return self._is_open.is_set()

    async def close(self) -> None:
        """End the subscription for good."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self._is_open.clear()

    async def _listen(self) -> None:
        failures = 0
        while True:
            # A missed wake-up does no harm: waiting storages poll as well.
            with suppress(StorageError):
                await self._connection.listen(self._channels, self._receive)
            if self._is_open.is_set():
                self._is_open.clear()
                failures = 0
            await SYSTEM_CLOCK.sleep(
                backoff(
                    failures,
                    first=_FIRST_PAUSE,
                    longest=_LONGEST_PAUSE,
                    jitter=SYSTEM_CLOCK.random(),
                )
            )
            failures += 1

    def _receive(self, channel: str, text: str) -> None:
        self._is_open.set()
        self._on_message(channel, text)
