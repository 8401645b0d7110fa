"""The connection to a Redis server: one for all calls, every error in omniq's words.

Calls do not wait for each other: each is written as it comes, and the server answers in that
order. Nothing is sent twice here: whoever asked is told whether the server may have done it
(`Lost.was_sent`). Only this file knows the driver, which is the parser that reads the replies.
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

from omniq.errors import StorageClosed, StorageError, StorageRefused
from omniq.settings import mask_url
from omniq.storage.redis.address import Address, parse

_CONNECT_SECONDS = 5.0
_TURN_SECONDS = 10.0
"""For which a call waits at most while others try to connect, and for its own try."""

_REPLY_SECONDS = 10.0
_READ_SIZE = 1 << 16
_INCOMPLETE = object()

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
    """A connection to the server at `url`, made when it is needed and again when it was lost."""

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
        except (hiredis.ReplyError, OSError) as error:
            raise self._told(error, was_sent=True) from error

    async def listen(self, channels: list[str], on_message: Callable[[str, str], None]) -> None:
        """Give on messages as `(channel, text)`, until the connection fails; first `("", "")`."""
        heard = 0

        def on_push(reply: Any) -> None:
            nonlocal heard
            kind, channel, text = reply
            if kind == b"subscribe":
                heard += 1
                if heard == len(channels):
                    on_message("", "")
            elif kind == b"message":
                on_message(channel.decode(), text.decode("utf-8", "replace"))

        connection = await self._connect()
        try:
            await connection.listen(pack("SUBSCRIBE", *channels), on_push)
        except (hiredis.ReplyError, OSError) as error:
            raise self._told(error, was_sent=False) from error
        finally:
            connection.abort()

    async def close(self) -> None:
        """Hang up; nothing can be sent any more."""
        self._is_closed = True
        async with self._connecting:
            if self._connection is not None:
                await self._connection.close()

    async def _connected(self) -> _Connection:
        try:
            async with asyncio.timeout(_TURN_SECONDS), self._connecting:
                # Another call may have connected while this one waited.
                if self._connection is None or not self._connection.is_open:
                    self._connection = await self._connect()
                return self._connection
        except TimeoutError as error:
            late = TimeoutError(f"no connection within {_TURN_SECONDS:g} s")
            raise self._told(late, was_sent=False) from error

    async def _connect(self) -> _Connection:
        """A connection on which the server knows who is calling, and for which database."""
        address = self._address
        loop = asyncio.get_running_loop()
        connection = _Connection()
        try:
            self._check_open()
            async with _in_time(address):
                if address.path:
                    await loop.create_unix_connection(lambda: connection, address.path)
                else:
                    await loop.create_connection(
                        lambda: connection, address.host, address.port, ssl=address.tls
                    )
                await _greet(connection, address)
            self._check_open()
        except BaseException as error:
            connection.abort()
            # A host that cannot be one is found out only when it is asked for.
            if isinstance(error, (hiredis.ReplyError, OSError, UnicodeError)):
                raise self._told(error, was_sent=False) from error
            raise
        return connection

    def _check_open(self) -> None:
        if self._is_closed:
            raise StorageClosed(
                f"Redis at {self._shown_url}: this storage was closed during the call"
            )

    def _told(self, error: Exception, *, was_sent: bool) -> StorageError:
        text = f"Redis at {self._shown_url}: {str(error) or type(error).__name__}"
        if self._address.password:
            # Some servers repeat what they did not understand.
            text = text.replace(self._address.password, "***")
        if not isinstance(error, hiredis.ReplyError):
            return Lost(text, was_sent=was_sent)
        code = _code(str(error))
        if code in _REFUSALS:
            return StorageRefused(f"{text}; {_REFUSALS[code]}")
        if code in _UNREADY:
            return Unready(text)
        if code == "NOSCRIPT":
            return UnknownScript(text)
        if code == "OOM":
            return OutOfMemory(f"{text}; give the server more memory, or keep less")
        return StorageError(text)


@asynccontextmanager
async def _in_time(address: Address) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            yield
    except TimeoutError as error:
        question = "; does it speak TLS?" if address.tls else ""
        raise TimeoutError(f"no connection within {_CONNECT_SECONDS:g} s{question}") from error


async def _greet(connection: _Connection, address: Address) -> None:
    """Say who is calling, and for which database, in one round trip."""
    greetings: list[tuple[str | int, ...]] = []
    if address.username or address.password:
        user = [address.username] if address.username else []
        greetings.append(("AUTH", *user, address.password))
    if address.database:
        greetings.append(("SELECT", address.database))
    greetings.append(("CLIENT", "SETNAME", address.client_name))
    told = [connection.request(pack(*greeting)) for greeting in greetings]
    for reply in await asyncio.gather(*told, return_exceptions=True):
        # Not everybody may have a name, and it is only for people to read.
        if isinstance(reply, BaseException) and not _is_about_the_name(reply):
            raise reply


class _Connection(asyncio.BufferedProtocol):
    """Requests, and their replies in the same order."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._replies = hiredis.Reader(notEnoughData=_INCOMPLETE)
        self._buffer = memoryview(bytearray(_READ_SIZE))
        # Who waits, and until when, in the order of their requests.
        self._awaited: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._on_push: Callable[[Any], None] | None = None
        self._error: Exception = ConnectionError("not connected")
        self._is_gone = self._loop.create_future()
        self.is_open = False

    def request(self, packed: bytes) -> asyncio.Future[Any]:
        """The reply to come. Whoever does not want it any more just lets go of it."""
        reply = self._loop.create_future()
        if not self.is_open:
            reply.set_exception(self._error)
            return reply
        deadline = self._loop.time() + _REPLY_SECONDS
        self._awaited.append((reply, deadline))
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._check_time)
        self._transport.write(packed)
        return reply

    async def listen(self, packed: bytes, on_push: Callable[[Any], None]) -> None:
        """Give on what the server says by itself, until the connection fails."""
        self._on_push = on_push
        if self.is_open:
            self._transport.write(packed)
            await self._is_gone
        raise self._error

    def abort(self) -> None:
        """Hang up at once; whoever waits is told."""
        self._fail(ConnectionError("the connection was closed"))

    async def close(self) -> None:
        """Hang up, and come back when nothing is left of it."""
        if self.is_open:
            self.abort()
            await self._is_gone

    def _check_time(self) -> None:
        """The server answers in order: who waits longest speaks for all."""
        self._timer = None
        if self._awaited:
            _, deadline = self._awaited[0]
            if self._loop.time() < deadline:
                self._timer = self._loop.call_at(deadline, self._check_time)
            else:
                self._fail(TimeoutError(f"no answer within {_REPLY_SECONDS:g} s"))

    def _fail(self, error: Exception) -> None:
        """What was asked stays without an answer; one that still came would be of no use."""
        if not self.is_open:
            return
        self.is_open = False
        self._error = error
        self._transport.abort()
        if self._timer is not None:
            self._timer.cancel()
        for reply, _ in self._awaited:
            if not reply.done():
                reply.set_exception(error)
        self._awaited.clear()

    # What the event loop calls

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
                self._take(reply)
        except hiredis.ProtocolError as error:
            self._fail(ConnectionError(f"is this a Redis server? {error}"))

    def _take(self, reply: Any) -> None:
        if self._awaited:
            waiting, _ = self._awaited.popleft()
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
            self._fail(ConnectionError("an answer that nobody asked for"))

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(error or ConnectionError("the server closed the connection"))
        if not self._is_gone.done():
            self._is_gone.set_result(None)


_REFUSALS = {
    "WRONGPASS": "give the right user and password in the URL",
    "NOAUTH": "give a user and password in the URL",
    "NOPERM": "allow this user the keys and channels that begin with the prefix, and scripts",
    "MOVED": "the store's keys are on another node of this cluster: name that one in the URL",
    "CROSSSLOT": "the keys of a store belong into one slot: is this prefix used by something else?",
    "WRONGTYPE": "something else uses these keys: give this store a `?prefix=` of its own",
    "NODB": "name a database that the server has, such as /0",
    "DENIED": "the server speaks to nobody from elsewhere without a password: set one there",
}
_UNREADY = frozenset(
    (
        *("LOADING", "BUSY", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS"),
        "MAXCLIENTS",
    )
)
_CODES = {
    **{code: code for code in (*_REFUSALS, *_UNREADY, "OOM", "NOSCRIPT")},
    "DB index is out of range": "NODB",
    "invalid DB index": "NODB",
    "max number of clients": "MAXCLIENTS",
    "invalid password": "WRONGPASS",
    # What is said to a password where none is set.
    "AUTH": "WRONGPASS",
    # What servers before Redis 7 say of a key that a script may not touch.
    "The user executing the script": "NOPERM",
}
_CODE = re.compile("|".join(rf"\b{code}\b" for code in _CODES))


def _is_about_the_name(error: BaseException) -> bool:
    """Whether a server only does not want to be told who is calling."""
    return isinstance(error, hiredis.ReplyError) and (
        "client" in str(error).lower() and _code(str(error)) in ("NOPERM", "")
    )


def _code(text: str) -> str:
    """What kind of error the server told of. The error of a script has it inside its text."""
    found = _CODE.search(text)
    return _CODES[found[0]] if found else ""
