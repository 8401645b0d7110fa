"""Limits the connections of the dashboard's server, and the time that a request may take to arrive.

Clients that open connections and send nothing, or very little, cannot shut out the others.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import Counter
from functools import partial
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

READ_SECONDS = 10.0
"""How long a request may take to arrive, from its first byte or from the connection on."""

_MAX_CONNECTIONS = 500
_FEWEST = 8


class ConnectionLimits:
    """The open connections, and which of them have not sent a whole request yet."""

    def __init__(self, maximum: int | None = None, read_seconds: float = READ_SECONDS) -> None:
        self.maximum = maximum or _default_maximum()
        self.read_seconds = read_seconds
        self._by_client: Counter[str] = Counter()
        # In the order in which they began to wait.
        self._waiting: dict[LimitedProtocol, None] = {}

    @property
    def protocol(self) -> partial[LimitedProtocol]:
        """The protocol class for uvicorn."""
        return partial(LimitedProtocol, self)

    def admit(self, connection: LimitedProtocol) -> bool:
        """Count the connection; False if its client has too many, or if all are in use.

        One client gets at most half of them. When all are taken, the one that has waited for
        longest without a request is closed.
        """
        client = connection.client_address
        if self._by_client[client] >= self.maximum // 2:
            return False
        if self._by_client.total() >= self.maximum:
            if not self._waiting:
                return False
            next(iter(self._waiting)).give_up()
        self._by_client[client] += 1
        return True

    def forget(self, client: str) -> None:
        """A connection of the client was closed."""
        self._by_client[client] -= 1
        if self._by_client[client] <= 0:
            del self._by_client[client]

    def begin_waiting(self, connection: LimitedProtocol) -> None:
        """The connection has not sent a whole request."""
        self._waiting[connection] = None

    def end_waiting(self, connection: LimitedProtocol) -> None:
        """The connection has sent a whole request, or was closed."""
        self._waiting.pop(connection, None)


class LimitedProtocol(H11Protocol):
    """Closes a connection whose request does not arrive in time."""

    def __init__(self, limits: ConnectionLimits, /, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None
        self._is_counted = False
        self.client_address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.client_address = self.client[0] if self.client else ""
        self._is_counted = self._limits.admit(self)
        if self._is_counted:
            self._begin_waiting()
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._timer is None:
            self._begin_waiting()
        super().data_received(data)
        if getattr(self.cycle, "more_body", True) is False:
            self._end_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_counting()
        super().connection_lost(exc)

    def give_up(self) -> None:
        """Close the connection without an answer."""
        self._stop_counting()
        self.transport.abort()

    def _begin_waiting(self) -> None:
        self._timer = self.loop.call_later(self._limits.read_seconds, self.give_up)
        self._limits.begin_waiting(self)

    def _end_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._limits.end_waiting(self)

    def _stop_counting(self) -> None:
        self._end_waiting()
        if self._is_counted:
            self._is_counted = False
            self._limits.forget(self.client_address)


def silence_warnings() -> None:
    """Let the server log errors only: any client can cause any number of its warnings."""
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)


def _default_maximum() -> int:
    """Fewer than the process may have open files, so that it can always accept a connection."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(_FEWEST, min(_MAX_CONNECTIONS, soft // 2))
