"""Listener: the connection that receives notifications, and the advisory locks that ask for them.

The connection is opened when it is first used, and again, after a pause, when it was lost. A lock is
held as long as the connection lives: a storage that is gone asks for no notifications.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import Any, Literal

from omniq.clock import Clock
from omniq.concurrency.backoff import backoff
from omniq.errors import StorageError
from omniq.storage.postgres import statements
from omniq.storage.postgres.connection import (
    Connection,
    Target,
    close,
    is_driver_error,
    wait_until_free,
)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0

Lock = Literal["work", "results"]
"""What the holder of a shared advisory lock waits for."""


class Listener:
    """One connection that listens. Used on one event loop.

    `on_notification` receives the text of each notification; `on_lost` is called when the connection is.
    """

    def __init__(
        self,
        target: Target,
        clock: Clock,
        on_notification: Callable[[str], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._target = target
        self._clock = clock
        self._on_notification = on_notification
        self._on_lost = on_lost
        self._connection: Connection | None = None
        self._in_use = asyncio.Lock()
        self._is_closed = False
        self._failures = 0
        self.connect_not_before = inf if target.poll_only else 0.0
        """When it may connect next. Never behind a pooler: its sessions cannot listen."""
        self.held_locks: set[Lock] = set()

    async def fetch_row(self, sql: str, *parameters: Any) -> Any:
        """One row over this connection; None when there is no connection."""
        async with self._in_use:
            connection = await self._connected()
            if connection is None:
                return None
            try:
                return await connection.fetchrow(
                    statements.filled(self._target.schema, sql), *parameters
                )
            except Exception as error:
                if not is_driver_error(error):
                    raise
                # Only a hint is lost: polling finds the work or the result.
                connection.terminate()
                self._connection_lost()
                return None

    async def take(self, lock: Lock) -> bool:
        """Take the lock, unless it is held; returns whether it is held now."""
        sql = f"SELECT pg_catalog.pg_advisory_lock_shared({{schema}}.lock_key('{lock}'))"
        if lock not in self.held_locks and await self.fetch_row(sql) is not None:
            self.held_locks.add(lock)
        return lock in self.held_locks

    async def release(self, lock: Lock) -> None:
        """Release the lock, if it is held."""
        if lock in self.held_locks:
            self.held_locks.discard(lock)
            await self.fetch_row(
                f"SELECT pg_catalog.pg_advisory_unlock_shared({{schema}}.lock_key('{lock}'))"
            )

    async def close(self) -> None:
        """Stop listening and close the connection."""
        self._is_closed = True
        await wait_until_free(self._in_use)
        connection, self._connection = self._connection, None
        await close(connection)

    async def _connected(self) -> Connection | None:
        if self._connection is not None and not self._connection.is_closed():
            return self._connection
        if self._is_closed or self._clock.monotonic() < self.connect_not_before:
            return None
        try:
            connection = await self._target.connect("listener")
            await self._listen(connection)
        except Exception as error:
            if not (isinstance(error, StorageError) or is_driver_error(error)):
                raise
            self._connection_lost()
            return None
        connection.add_termination_listener(self._on_terminated)
        self._connection, self._failures = connection, 0
        return connection

    async def _listen(self, connection: Connection) -> None:
        try:
            channel = await connection.fetchval(
                statements.filled(self._target.schema, "SELECT name FROM {schema}.channel")
            )
            if channel is not None:
                await connection.add_listener(channel, self._receive)
            if self._is_closed:
                raise self._target.closed_error()
        except BaseException:
            # Also when cancelled or closed: no other code has a reference to this connection yet.
            connection.terminate()
            raise

    def _receive(self, _connection: Any, _pid: int, _channel: str, message: str) -> None:
        self._on_notification(message)

    def _on_terminated(self, connection: Connection) -> None:
        if connection is self._connection:
            self._connection_lost()
            self._on_lost()

    def _connection_lost(self) -> None:
        self._connection = None
        self.held_locks.clear()
        self._failures += 1
        self.connect_not_before = self._clock.monotonic() + backoff(
            self._failures, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE, jitter=self._clock.random()
        )
