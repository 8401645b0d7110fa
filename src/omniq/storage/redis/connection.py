"""The connection to a Redis server: one for all calls. Its errors are raised as `StorageError`.

Calls do not wait for each other: each is sent immediately, and the server replies in that order. This
module sends nothing twice: `ConnectionLost.was_sent` says whether the server may have run the call.
Only this module uses the driver, which is the parser of the replies.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, cast

import hiredis
import msgspec

from omniq.concurrency.futures import finish
from omniq.errors import OmniqError, StorageClosed, StorageError, StorageRefused
from omniq.storage.connection_advice import connect_timeout, network_advice
from omniq.storage.redis.address import Address, Node, parse
from omniq.storage.redis.error_replies import (
    ConnectionLost,
    NotPrimary,
    error_of,
    is_client_name_refused,
    redirection,
)
from omniq.storage.redis.primaries import Primaries, UnknownService
from omniq.text.masking import mask_url

_CONNECT_SECONDS = 5.0
_CONNECT_WAIT_SECONDS = 10.0
"""How long a call waits while other calls try to connect, its own attempt included."""

_REPLY_SECONDS = 10.0
_READ_SIZE = 1 << 16
_REFUSALS = (UnknownService, ssl.SSLCertVerificationError)
_INCOMPLETE = object()

# A peer that has vanished without closing the connection is noticed after some 25 seconds.
_KEEPALIVE = {
    getattr(socket, name): value
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
}


def pack(*parts: bytes | str | int, more: int = 0) -> bytes:
    """A command in the protocol of the server; `more` is the number of parts that follow it.

    >>> pack("GET", "a")
    b'*2\\r\\n$3\\r\\nGET\\r\\n$1\\r\\na\\r\\n'
    """
    encoded = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    packed = b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in encoded)
    return b"*%d\r\n%b" % (len(encoded) + more, packed)


class ServerConnection:
    """A connection to the server at `url`, opened at first use and again after it was lost.

    Through Sentinels or in a cluster it is a connection to the server that has the keys with that hash tag.
    """

    def __init__(self, url: str, *, name: str, hash_tag: str = "") -> None:
        self._shown_url = mask_url(url)
        address = parse(url)
        self._address = msgspec.structs.replace(address, client_name=address.client_name or name)
        self._primaries = Primaries(address, hash_tag)
        self._connection: _Connection | None = None
        self._listening: _Connection | None = None
        self._connecting = asyncio.Lock()
        self._is_closed = False
        self._password = address.password
        self.has_worked = False
        """Whether the store was opened: what the server refuses now, it may accept again."""

    async def command(self, *parts: bytes | str | int) -> Any:
        """The server's reply to one command, sent once."""
        return await self.send(pack(*parts))

    async def send(self, packed: bytes, *, after: bytes = b"") -> Any:
        """The server's reply to a packed command, sent once. `after`: sent before it, if not empty."""
        connection = self._connection
        if connection is None or not connection.is_open:
            connection = await self._connected()
        try:
            if after:
                await connection.request(after)
            return await connection.request(packed)
        except Exception as error:
            if isinstance(error, hiredis.ReplyError) and self._address.kind == "cluster":
                redirected = redirection(str(error))
                if redirected is not None:
                    return await self._follow(connection, *redirected, packed, after)
            wrapped = self._wrap_error(error, was_sent=True)
            if isinstance(wrapped, NotPrimary):
                connection.abort()
            raise wrapped from error

    async def _follow(
        self, connection: _Connection, kind: str, node: Node, packed: bytes, after: bytes
    ) -> Any:
        """Send a call that the server has refused to the server that it has named."""
        node = node if node.host else Node(connection.node.host, node.port)
        if kind == "MOVED":
            self._primaries.note(node)
            connection.abort()
            raise NotPrimary(
                f"Redis at {self._shown_url}: the store is on {node.host}:{node.port} now"
            )
        # The slot is on its way: only this call belongs there, and the next one is asked for here.
        asked = await self._connect_to(node)
        try:
            await asyncio.gather(*map(asked.request, filter(None, (after, pack("ASKING")))))
            return await asked.request(packed)
        except Exception as error:
            raise self._wrap_error(error, was_sent=True) from error
        finally:
            asked.abort()

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

        connection = self._listening = await self._connect()
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
                    self._connection = connection = await self._connect()
                    if self._listening is not None and self._listening.node != connection.node:
                        # What is published is published by the new primary.
                        self._listening.abort()
                return self._connection
        except TimeoutError as error:
            late = TimeoutError(f"no connection within {_CONNECT_WAIT_SECONDS:g} s")
            raise self._wrap_error(late, was_sent=False) from error

    async def _connect(self) -> _Connection:
        """A new connection to the server that has the store."""
        last: Exception = LookupError("no server is known")
        try:
            self._check_open()
            async with (
                _connect_timeout(self._address),
                aclosing(self._primaries.find(self._ask)) as nodes,
            ):
                async for node in nodes:
                    try:
                        return await self._open_primary(node)
                    except Exception as error:
                        last = error
        except Exception as error:
            last = error
        # Any: an impossible host name, for example, raises UnicodeError when it is resolved.
        raise (
            last if isinstance(last, OmniqError) else self._wrap_error(last, was_sent=False)
        ) from last

    async def _open_primary(self, node: Node) -> _Connection:
        connection = await self._open(node)
        try:
            await self._check_primary(connection)
            self._check_open()
        except BaseException:
            connection.abort()
            raise
        return connection

    async def _connect_to(self, node: Node) -> _Connection:
        """A new connection to that server."""
        try:
            async with _connect_timeout(self._address):
                return await self._open(node)
        except Exception as error:
            raise self._wrap_error(error, was_sent=False) from error

    async def _open(self, node: Node) -> _Connection:
        """A new connection, authenticated, and with the database selected."""
        password = self._password = self._address.current_password()
        commands: list[tuple[str | int, ...]] = [*_authentication(self._address.username, password)]
        if self._address.database:
            commands.append(("SELECT", self._address.database))
        commands.append(("CLIENT", "SETNAME", self._address.client_name))
        return await self._open_with(node, commands)

    async def _open_with(self, node: Node, commands: list[tuple[str | int, ...]]) -> _Connection:
        address = self._address
        loop = asyncio.get_running_loop()
        connection = _Connection(node)
        try:
            if address.path:
                await loop.create_unix_connection(lambda: connection, address.path)
            else:
                await loop.create_connection(
                    lambda: connection, node.host, node.port, ssl=address.tls
                )
            await _handshake(connection, commands)
        except BaseException:
            connection.abort()
            raise
        return connection

    async def _ask(self, node: Node, *command: str) -> Any:
        """The reply of a Sentinel, or of a server of the cluster, on a connection for this call alone."""
        if self._address.kind == "cluster":
            connection = await self._open(node)
        else:
            user, password = self._address.sentinel_username, self._address.sentinel_password
            try:
                connection = await self._open_with(node, _authentication(user, password))
            except hiredis.ReplyError as error:
                raise self._sentinel_error(node, error) from error
        try:
            return await connection.request(pack(*command))
        except hiredis.ReplyError as error:
            if self._address.kind == "cluster":
                raise
            raise self._sentinel_error(node, error) from error
        finally:
            connection.abort()

    def _sentinel_error(self, node: Node, error: hiredis.ReplyError) -> StorageError:
        text = self._without_passwords(f"the Sentinel {node.host}:{node.port}: {error}")
        reason = f"{text}; its own options are ?sentinel_username= and ?sentinel_password="
        return error_of(reason, str(error), has_worked=self.has_worked)

    async def _check_primary(self, connection: _Connection) -> None:
        """Refuse a replica that a Sentinel has taken for the primary until a moment ago."""
        if self._address.kind != "sentinel":
            return
        try:
            role = (await connection.request(pack("ROLE")))[0]
        except hiredis.ReplyError:
            # Not every user may ask. A replica refuses the first write.
            return
        if role != b"master":
            raise NotPrimary(
                f"Redis at {self._shown_url}: {connection.node.host}:{connection.node.port} is no "
                "primary any more, or not yet"
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise StorageClosed(
                f"Redis at {self._shown_url}: this storage was closed during the call"
            )

    def _wrap_error(self, error: Exception, *, was_sent: bool) -> StorageError:
        if isinstance(error, StorageError):
            return error
        text = f"Redis at {self._shown_url}: {str(error) or type(error).__name__}"
        text = self._without_passwords(text)
        if isinstance(error, hiredis.ReplyError):
            return error_of(text, str(error), has_worked=self.has_worked)
        text += network_advice(error)
        if isinstance(error, _REFUSALS) and not self.has_worked:
            return StorageRefused(text)
        return ConnectionLost(text, was_sent=was_sent)

    def _without_passwords(self, text: str) -> str:
        # Some servers repeat a command that they did not understand.
        for password in filter(None, (self._password, self._address.sentinel_password)):
            text = text.replace(password, "***")
        return text


@asynccontextmanager
async def _connect_timeout(address: Address) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            yield
    except TimeoutError as error:
        raise connect_timeout(_CONNECT_SECONDS, tls=address.tls is not None) from error


def _authentication(username: str, password: str) -> list[tuple[str | int, ...]]:
    if not (username or password):
        return []
    return [("AUTH", *([username] if username else []), password)]


async def _handshake(connection: _Connection, commands: list[tuple[str | int, ...]]) -> None:
    """Send the commands in one round trip."""
    replies = [connection.request(pack(*command)) for command in commands]
    for reply in await asyncio.gather(*replies, return_exceptions=True):
        # Not every user may set a client name, and only operators read it.
        is_name = isinstance(reply, hiredis.ReplyError) and is_client_name_refused(str(reply))
        if isinstance(reply, BaseException) and not is_name:
            raise reply


class _Connection(asyncio.BufferedProtocol):
    """Requests, and their replies in the same order."""

    def __init__(self, node: Node) -> None:
        self.node = node
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
        try:
            self._replies.feed(self._buffer, 0, nbytes)  # type: ignore[arg-type]
            while (reply := self._replies.gets()) is not _INCOMPLETE:
                self._receive(reply)
        except Exception as error:
            # Any: the parser raises MemoryError for a huge list, and a message may have any shape.
            self._fail(ConnectionError(f"is this a Redis server? {error!r}"))

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
