"""Slows down clients that guess secrets. A right secret is never slowed down."""

from __future__ import annotations

import ipaddress
from collections import deque

from omniq.clock import Clock
from omniq.errors import OmniqError

_WINDOW = 60.0
_FREE = 5
"""How many wrong secrets of one client within the window are answered without a delay."""

_FIRST_DELAY, _LONGEST_DELAY = 0.5, 8.0
_REMEMBERED = 12
_MAX_CLIENTS = 10_000
_MAX_WAITING = 50


class TooManyAttempts(OmniqError):
    """The client has sent too many wrong secrets recently."""

    def __init__(self, seconds: float) -> None:
        super().__init__("too many wrong attempts; the answers to further ones come later")
        self.seconds = seconds


class WrongSecrets:
    """The recent wrong secrets of each client, and how long each further one has to wait.

    They delay each other only: a client behind the same address that knows the secret gets in. Many
    requests at the same time gain little, since only some of them wait and the others are refused.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._recent: dict[str, deque[float]] = {}
        self._waiting = 0

    async def delay(self, client: str) -> None:
        """Note a wrong secret. Waits and raises `TooManyAttempts` if the client has sent many."""
        excess = self._note(_group(client)) - _FREE
        if excess <= 0:
            return
        seconds = min(_FIRST_DELAY * 2 ** (excess - 1), _LONGEST_DELAY)
        if self._waiting < _MAX_WAITING:
            self._waiting += 1
            try:
                await self._clock.sleep(seconds)
            finally:
                self._waiting -= 1
        raise TooManyAttempts(seconds)

    def _note(self, client: str) -> int:
        """Note a wrong secret; returns how many the client has sent within the window."""
        now = self._clock.monotonic()
        recent = self._recent.pop(client, None) or deque(maxlen=_REMEMBERED)
        while recent and now - recent[0] > _WINDOW:
            recent.popleft()
        recent.append(now)
        # Moved to the end, so that the client that was quiet for longest is forgotten first.
        self._recent[client] = recent
        while len(self._recent) > _MAX_CLIENTS:
            del self._recent[next(iter(self._recent))]
        return len(recent)


def _group(client: str) -> str:
    """The client; the network of an IPv6 address, since one client has many addresses.

    >>> _group("192.0.2.7"), _group("2001:db8:1:2:3:4:5:6")
    ('192.0.2.7', '2001:db8:1:2::/64')
    """
    try:
        address = ipaddress.ip_address(client.partition("%")[0])
    except ValueError:
        return client
    if address.version == 4:
        return client
    return str(ipaddress.ip_network((address, 64), strict=False))
