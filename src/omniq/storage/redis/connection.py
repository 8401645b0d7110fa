"""The connection to a Redis server: one for all calls. Its errors are raised as `StorageError`.

Calls do not wait for each other: each is sent immediately, and the server replies in that order. This
module sends nothing twice: `ConnectionLost.was_sent` says whether the server may have run the call.
Only this module uses the driver, which is the parser of the replies.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import hiredis
import msgspec

from omniq.concurrency.futures import finish
from omniq.errors import (
    OmniqError,
    StorageClosed,
    StorageCorrupt,
    StorageError,
    StorageRefused,
)
from omniq.storage.connection_advice import connect_timeout, network_advice
from omniq.storage.redis.address import Address, parse
from omniq.text.masking import mask_url

DAMAGED_COUNTER = "a counter of the store is damaged: restore the store from a backup"

_CONNECT_SECONDS = 5.0
_CONNECT_WAIT_SECONDS = 10.0
"""How long a call waits while other calls try to connect, its own attempt included."""

_REPLY_SECONDS = 10.0
_READ_SIZE = 1 << 16
_INCOMPLETE = object()

# A peer that has vanished without closing the connection is noticed after some 25 seconds.
_KEEPALIVE = {
    getattr(socket, name): value
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
}


class ConnectionLost(StorageError):
    """The connection failed. `was_sent`: the server may have run the call."""

    def __init__(self, message: str, *, was_sent: bool) -> None:
        super().__init__(message)
        self.was_sent = was_sent


class ServerNotReady(StorageError):
    """The server refuses calls for now: it loads, is busy, or is not the primary. Try again."""


class UnknownScript(StorageError):
    """The server does not have the script; nothing was done."""


class OutOfMemory(StorageError):
    """The server may not use more memory; nothing was written."""


def pack(*parts: bytes | str | int, more: int = 0) -> bytes:
    """A command in the protocol of the server; `more` is the number of parts that follow it.

    >>> pack("GET", "a")
    b'*2\\r\\n$3\\r\\nGET\\r\\n$1\\r\\na\\r\\n'
    """
    encoded = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    packed = b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in encoded)
    return b"*%d\r\n%b" % (len(encoded) + more, packed)


class ServerConnection:
    """A connection to the server at `url`, opened at first use and again after it was lost."""

    def __init__(self, url: str, *, name: str) -> None:
        self._shown_url = mask_url(url)
        address = parse(url)
        self._address = msgspec.structs.replace(address, client_name=address.client_name or name)
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()
        self._is_closed = False

    async def command(self, *parts: bytes | str | int) -> Any:
        """The server's reply to one command, sent once."""
        return await self.send(pack(*parts))

    async def send(self, packed: bytes) -> Any:
        """The server's reply to a packed command, sent once."""
        connection = self._connection
        if connection is None or not connection.is_open:
            connection = await self._connected()
        try:
            return await connection.request(packed)
        except Exception as error:
            raise self._wrap_error(error, was_sent=True) from error

    def discard(self) -> None:
        """Close the connection, whose replies cannot be trusted; the next call opens another."""
        if self._connection is not None:
            self._connection.abort()

    async def listen(self, channels: list[str], on_message: Callable[[str, str], None]) -> None:
        """Pass on messages as `(channel, text)` until the connection fails; first `("", "")`."""
        subscribed = 0

        def on_push(reply: Any) -> None:
            nonlocal subscribed
            kind, channel, text = reply
            if kind == b"subscribe":
                subscribed += 1
                if subscribed == len(channels):
                    on_message("", "")
            elif kind == b"message":
                on_message(channel.decode(), text.decode("utf-8", "replace"))

        connection = await self._connect()
        try:
            await connection.listen(pack("SUBSCRIBE", *channels), on_push)
        except Exception as error:
            raise self._wrap_error(error, was_sent=False) from error
        finally:
            connection.abort()

    async def close(self) -> None:
        """Close the connection; nothing can be sent any more."""
        self._is_closed = True
        async with self._connecting:
            if self._connection is not None:
                await self._connection.close()

    async def _connected(self) -> _Connection:
        try:
            async with asyncio.timeout(_CONNECT_WAIT_SECONDS), self._connecting:
                # Another call may have connected while this one waited.
                if self._connection is None or not self._connection.is_open:
                    self._connection = await self._connect()
                return self._connection
        except TimeoutError as error:
            late = TimeoutError(f"no connection within {_CONNECT_WAIT_SECONDS:g} s")
            raise self._wrap_error(late, was_sent=False) from error

    async def _connect(self) -> _Connection:
        """A new connection, authenticated, and with the database selected."""
        address = self._address
        loop = asyncio.get_running_loop()
        connection = _Connection()
        try:
            self._check_open()
            async with _connect_timeout(address):
                if address.path:
                    await loop.create_unix_connection(lambda: connection, address.path)
                else:
                    await loop.create_connection(
                        lambda: connection, address.host, address.port, ssl=address.tls
                    )
                await _handshake(connection, address)
            self._check_open()
        except BaseException as error:
            connection.abort()
            if isinstance(error, OmniqError) or not isinstance(error, Exception):
                raise
            # Any: an impossible host name, for example, raises UnicodeError when it is resolved.
            raise self._wrap_error(error, was_sent=False) from error
        return connection

    def _check_open(self) -> None:
        if self._is_closed:
            raise StorageClosed(
                f"Redis at {self._shown_url}: this storage was closed during the call"
            )

    def _wrap_error(self, error: Exception, *, was_sent: bool) -> StorageError:
        text = f"Redis at {self._shown_url}: {str(error) or type(error).__name__}"
        if self._address.password:
            # Some servers repeat a command that they did not understand.
            text = text.replace(self._address.password, "***")
        if not isinstance(error, hiredis.ReplyError):
            return ConnectionLost(text + network_advice(error), was_sent=was_sent)
        code = _code(str(error))
        if code in _REFUSALS:
            return StorageRefused(f"{text}; {_REFUSALS[code]}")
        if code in _NOT_READY:
            return ServerNotReady(text)
        if code == "NOSCRIPT":
            return UnknownScript(text)
        if code == "OOM":
            return OutOfMemory(f"{text}; give the server more memory, or store less")
        if "value is not an integer" in text:
            return StorageCorrupt(f"{text}; {DAMAGED_COUNTER}")
        return StorageError(text)


@asynccontextmanager
async def _connect_timeout(address: Address) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            yield
    except TimeoutError as error:
        raise connect_timeout(_CONNECT_SECONDS, tls=address.tls is not None) from error


async def _handshake(connection: _Connection, address: Address) -> None:
    """Authenticate, select the database and set the client name, in one round trip."""
    commands: list[tuple[str | int, ...]] = []
    if address.username or address.password:
        user = [address.username] if address.username else []
        commands.append(("AUTH", *user, address.password))
    if address.database:
        commands.append(("SELECT", address.database))
    commands.append(("CLIENT", "SETNAME", address.client_name))
    replies = [connection.request(pack(*command)) for command in commands]
    for reply in await asyncio.gather(*replies, return_exceptions=True):
        # Not every user may set a client name, and only operators read it.
        if isinstance(reply, BaseException) and not _is_client_name_refused(reply):
            raise reply


class _Connection(asyncio.BufferedProtocol):
    """Requests, and their replies in the same order."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._replies = hiredis.Reader(notEnoughData=_INCOMPLETE)
        self._buffer = memoryview(bytearray(_READ_SIZE))
        # The pending replies and their deadlines, in the order of the requests.
        self._pending: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._on_push: Callable[[Any], None] | None = None
        self._error: Exception = ConnectionError("not connected")
        self._closed = self._loop.create_future()
        self.is_open = False

    def request(self, packed: bytes) -> asyncio.Future[Any]:
        """The future reply. A caller that no longer needs it may drop it."""
        reply = self._loop.create_future()
        if not self.is_open:
            reply.set_exception(self._error)
            return reply
        deadline = self._loop.time() + _REPLY_SECONDS
        self._pending.append((reply, deadline))
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._check_time)
        self._transport.write(packed)
        return reply

    async def listen(self, packed: bytes, on_push: Callable[[Any], None]) -> None:
        """Pass on what the server pushes, until the connection fails."""
        self._on_push = on_push
        if self.is_open:
            self._transport.write(packed)
            await self._closed
        raise self._error

    def abort(self) -> None:
        """Close the connection immediately; pending requests fail."""
        self._fail(ConnectionError("the connection was closed"))

    async def close(self) -> None:
        """Close the connection, and return when it is closed."""
        if self.is_open:
            self.abort()
            await self._closed

    def _check_time(self) -> None:
        """Fail if the oldest request is late: the server replies in order."""
        self._timer = None
        if self._pending:
            _, deadline = self._pending[0]
            if self._loop.time() < deadline:
                self._timer = self._loop.call_at(deadline, self._check_time)
            else:
                self._fail(TimeoutError(f"no answer within {_REPLY_SECONDS:g} s"))

    def _fail(self, error: Exception) -> None:
        """Fail all pending requests; a reply that still arrived could not be assigned."""
        if not self.is_open:
            return
        self.is_open = False
        self._error = error
        self._transport.abort()
        if self._timer is not None:
            self._timer.cancel()
        for reply, _ in self._pending:
            if not reply.done():
                reply.set_exception(error)
        self._pending.clear()

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True
        opened: socket.socket = transport.get_extra_info("socket")
        if opened.family in (socket.AF_INET, socket.AF_INET6):
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                opened.setsockopt(socket.IPPROTO_TCP, option, value)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._replies.feed(self._buffer, 0, nbytes)  # type: ignore[arg-type]
        try:
            while (reply := self._replies.gets()) is not _INCOMPLETE:
                self._receive(reply)
        except hiredis.ProtocolError as error:
            self._fail(ConnectionError(f"is this a Redis server? {error}"))

    def _receive(self, reply: Any) -> None:
        if self._pending:
            waiting, _ = self._pending.popleft()
            if waiting.done():
                return
            if isinstance(reply, hiredis.ReplyError):
                waiting.set_exception(reply)
            else:
                waiting.set_result(reply)
        elif isinstance(reply, hiredis.ReplyError):
            self._fail(reply)
        elif self._on_push is not None:
            self._on_push(reply)
        else:
            self._fail(ConnectionError("a reply without a request"))

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(error or ConnectionError("the server closed the connection"))
        finish(self._closed)


_REFUSALS = {
    "WRONGPASS": "give the right user and password in the URL",
    "NOAUTH": "give a user and password in the URL",
    "NOPERM": "allow this user the keys and channels that begin with the prefix, and scripts",
    "MOVED": "the store's keys are on another node of this cluster: name that one in the URL",
    "CROSSSLOT": "the keys of a store belong in one slot: does another program use this prefix?",
    "WRONGTYPE": "another program uses these keys: give this store another `?prefix=`",
    "NODB": "name a database that the server has, such as /0",
    "DENIED": "the server refuses remote clients while it has no password: set one there",
}
_NOT_READY = frozenset(
    (
        *("LOADING", "BUSY", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS"),
        "MAXCLIENTS",
    )
)
_CODES = {
    **{code: code for code in (*_REFUSALS, *_NOT_READY, "OOM", "NOSCRIPT")},
    "DB index is out of range": "NODB",
    "invalid DB index": "NODB",
    "max number of clients": "MAXCLIENTS",
    "invalid password": "WRONGPASS",
    # The reply to a password where none is set.
    "AUTH": "WRONGPASS",
    # The reply of servers before Redis 7 when a script may not touch a key.
    "The user executing the script": "NOPERM",
}
_CODE = re.compile("|".join(rf"\b{code}\b" for code in _CODES))


def _is_client_name_refused(error: BaseException) -> bool:
    """Whether the server only refuses `CLIENT SETNAME`."""
    return isinstance(error, hiredis.ReplyError) and (
        "client" in str(error).lower() and _code(str(error)) in ("NOPERM", "")
    )


def _code(text: str) -> str:
    """The code of a server's error. The error of a script has it inside its text."""
    found = _CODE.search(text)
    return _CODES[found[0]] if found else ""
