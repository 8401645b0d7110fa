"""Connections to a Redis server: few, each call with a deadline, every error in omniq's words.

The only file that knows the driver. redis-py would repeat a command whose reply was lost; here
nothing is sent twice: whoever asked is told whether the server may have done it (`Lost.was_sent`).
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from redis import exceptions
from redis.asyncio.connection import AbstractConnection, Connection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from omniq.errors import SettingsError, StorageError, StorageRefused
from omniq.settings import mask_url

CONNECTIONS = 4
"""Connections of one storage object, at most; `?max_connections=` in the URL says otherwise."""

_CONNECT_SECONDS = 5.0
_REPLY_SECONDS = 10.0
_READ_SIZE = 1 << 18

# A peer that went away without a word is noticed after some 25 seconds.
_KEEPALIVE = {
    getattr(socket, name): value
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
}


class Lost(StorageError):
    """The connection failed. `was_sent`: the server may have done what it was asked."""

    def __init__(self, message: str, *, was_sent: bool) -> None:
        super().__init__(message)
        self.was_sent = was_sent


class Unready(StorageError):
    """The server does nothing at the moment: it loads, is busy, or is not the primary. Ask again."""


class UnknownScript(StorageError):
    """The server has forgotten the script; nothing was done."""


class OutOfMemory(StorageError):
    """The server may not use more memory; nothing was written."""


def pack(*parts: bytes | str | int, more: int = 0) -> bytes:
    """A command as the server reads it; `more` parts are to follow it.

    >>> pack("GET", "a")
    b'*2\\r\\n$3\\r\\nGET\\r\\n$1\\r\\na\\r\\n'
    """
    words = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    packed = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
    return b"*%d\r\n%b" % (len(words) + more, packed)


class Link:
    """A bounded number of connections to the server at `url`, opened when they are needed."""

    def __init__(self, url: str, *, name: str) -> None:
        self._shown_url = mask_url(url)
        options = _options(url, name)
        limit = options.pop("max_connections", None)
        self._kind: type[AbstractConnection] = options.pop("connection_class", Connection)
        self._options = options
        self._slots = asyncio.Semaphore(int(limit or CONNECTIONS))
        self._idle: list[AbstractConnection] = []
        self._is_closed = False

    async def command(self, *parts: bytes | str | int) -> Any:
        """The server's reply to one command, sent once."""
        return await self.send([pack(*parts)])

    async def send(self, packed: list[bytes]) -> Any:
        """The server's reply to a packed command, sent once."""
        async with self._connection() as connection:
            try:
                async with asyncio.timeout(_REPLY_SECONDS):
                    await connection.send_packed_command(packed, check_health=False)
                    return await connection.read_response(timeout=math.inf)
            except BaseException as error:
                if not isinstance(error, exceptions.ResponseError):
                    # An unread reply would be taken for the answer to the next command.
                    await connection.disconnect(nowait=True)
                if isinstance(error, (exceptions.RedisError, OSError, TimeoutError)):
                    raise self._told(error, was_sent=True) from error
                raise

    async def connect(self, **options: Any) -> AbstractConnection:
        """A connection of one's own; `options` are the driver's."""
        connection = self._kind(**{**self._options, **options})
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                await connection.connect()  # type: ignore[no-untyped-call]
        except BaseException as error:
            await connection.disconnect(nowait=True)
            if isinstance(error, (exceptions.RedisError, OSError, TimeoutError)):
                raise self._told(error, was_sent=False) from error
            raise
        return connection

    async def listen(self, channels: list[str]) -> AsyncIterator[tuple[str, str]]:
        """Messages as `(channel, text)`, until the connection fails; first `("", "")`: listening."""
        # In the older protocol messages are plain replies.
        connection = await self.connect(protocol=2)
        try:
            await connection.send_command("SUBSCRIBE", *channels)
            heard = 0
            while True:
                kind, channel, text = await connection.read_response(timeout=math.inf)
                if kind == b"subscribe":
                    heard += 1
                    if heard == len(channels):
                        yield "", ""
                elif kind == b"message":
                    yield channel.decode(), text.decode()
        except (exceptions.RedisError, OSError) as error:
            raise self._told(error, was_sent=False) from error
        finally:
            await connection.disconnect(nowait=True)

    async def close(self) -> None:
        """Close what is open; nothing can be sent any more."""
        self._is_closed = True
        while self._idle:
            await self._idle.pop().disconnect()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[AbstractConnection]:
        async with self._slots:
            connection = await self._take()
            try:
                yield connection
            finally:
                if connection.is_connected and not self._is_closed:
                    self._idle.append(connection)
                else:
                    await connection.disconnect(nowait=True)

    async def _take(self) -> AbstractConnection:
        while self._idle:
            connection = self._idle.pop()
            # Something to read before anything was asked: the server has hung up.
            if connection.is_connected and not await connection.can_read():
                return connection
            await connection.disconnect(nowait=True)
        return await self.connect()

    def _told(self, error: Exception, *, was_sent: bool) -> StorageError:
        text = f"Redis at {self._shown_url}: {str(error) or type(error).__name__}"
        code = _code(error)
        if code in _REFUSALS or isinstance(error, exceptions.AuthenticationError):
            return StorageRefused(f"{text}; {_REFUSALS.get(code, _REFUSALS['WRONGPASS'])}")
        if isinstance(error, exceptions.BusyLoadingError) or code in _UNREADY:
            return Unready(text)
        if isinstance(error, exceptions.NoScriptError):
            return UnknownScript(text)
        if code == "OOM":
            return OutOfMemory(f"{text}; give the server more memory, or keep less")
        if isinstance(error, exceptions.ResponseError):
            return StorageError(text)
        return Lost(text, was_sent=was_sent)


_REFUSALS = {
    "WRONGPASS": "give the right user and password in the URL",
    "NOAUTH": "give a user and password in the URL",
    "NOPERM": "allow this user the keys and channels that begin with the prefix, and scripts",
    "MOVED": "the store's keys are on another node of this cluster: name that one in the URL",
    "CROSSSLOT": "the keys of a store belong into one slot: is this prefix used by something else?",
    "WRONGTYPE": "something else uses these keys: give this store a `?prefix=` of its own",
    "NODB": "name a database that the server has, such as /0",
}
_UNREADY = frozenset(
    ("LOADING", "BUSY", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS")
)
_CODES = {
    **{code: code for code in (*_REFUSALS, *_UNREADY, "OOM")},
    "DB index is out of range": "NODB",
    # What servers before Redis 7 say of a key that a script may not touch.
    "The user executing the script": "NOPERM",
}
_CODE = re.compile("|".join(rf"\b{code}\b ?" for code in _CODES))


def _code(error: Exception) -> str:
    """What kind of error the server told of. The error of a script has it inside its text."""
    code = getattr(error, "status_code", None)
    if code in _CODES:
        return str(code)
    found = _CODE.search(str(error))
    return _CODES[found[0].rstrip()] if found else ""


def _options(url: str, name: str) -> dict[str, Any]:
    """What the driver needs to know of a URL. What the URL says comes first."""
    scheme, colon, rest = url.partition(":")
    driver_url = scheme.lower().replace("valkey", "redis") + colon + rest
    try:
        given: dict[str, Any] = {**parse_url(driver_url)}
    except ValueError as error:
        raise SettingsError(f"storage URL {mask_url(url)}: {error}") from error
    is_socket = not issubclass(given.get("connection_class", Connection), Connection)
    keepalive = (
        {} if is_socket else {"socket_keepalive": True, "socket_keepalive_options": _KEEPALIVE}
    )
    return {
        "client_name": name,
        "protocol": 2,
        "socket_read_size": _READ_SIZE,
        **keepalive,
        **given,
        "decode_responses": False,
        "driver_info": None,
        "socket_timeout": None,
        "socket_connect_timeout": _CONNECT_SECONDS,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_error": [],
        "retry_on_timeout": False,
        "health_check_interval": 0,
    }
