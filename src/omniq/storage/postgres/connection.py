"""Connections to PostgreSQL: bounded in number and in time, and opened again when they are lost.

The only file that knows the driver. What the driver raises leaves it as a `StorageError`; whether a
call may be made again after its reply was lost is the caller's to say.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Protocol, TypeVar

import asyncpg

from omniq.clock import Clock
from omniq.errors import OmniqError, SettingsError, StorageClosed, StorageError, StorageRefused
from omniq.settings import mask_url

_T = TypeVar("_T")


class Connection(Protocol):
    """What is used of the driver's connections; it brings no types of its own."""

    async def execute(self, query: str, *args: Any) -> str: ...

    async def executemany(self, query: str, args: Any) -> None: ...

    async def fetch(self, query: str, *args: Any) -> list[Any]: ...

    async def fetchrow(self, query: str, *args: Any) -> Any: ...

    async def fetchval(self, query: str, *args: Any) -> Any: ...

    def transaction(self) -> Any: ...

    async def add_listener(self, channel: str, callback: Callable[..., None]) -> None: ...

    def add_termination_listener(self, callback: Callable[[Any], None]) -> None: ...

    def get_server_version(self) -> Any: ...

    def is_closed(self) -> bool: ...

    async def close(self, *, timeout: float) -> None: ...

    def terminate(self) -> None: ...


CALL_SECONDS: Final = 30.0
"""The longest a call may take, its waiting for locks included."""

_CONNECT_SECONDS = 10.0
_PATIENCE = 3.0
"""Seconds for which a call waits for a server that is not there."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
_CLOSE_SECONDS = 2.0
_ATTEMPTS = 8
"""How often a transaction is made again that others were in the way of."""

_READ_SIZE = 65_536
_KEEPALIVE_IDLE, _KEEPALIVE_INTERVAL, _KEEPALIVE_COUNT = 10, 5, 3

_SESSION = {
    "statement_timeout": f"{CALL_SECONDS * 1000 - 1000:.0f}",
    "lock_timeout": "10000",
    "idle_in_transaction_session_timeout": f"{CALL_SECONDS * 1000:.0f}",
    "tcp_keepalives_idle": str(_KEEPALIVE_IDLE),
    "tcp_keepalives_interval": str(_KEEPALIVE_INTERVAL),
    "tcp_keepalives_count": str(_KEEPALIVE_COUNT),
}

# What a writer does is found by an index, however small the tables were when it was planned: they
# grow a thousandfold before anybody has counted them. Behind a pooler the functions say it.
_PLANNER = {
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
}

_IN_THE_WAY = (
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.LockNotAvailableError,
    # Somebody took the id or the unique key in between: the next look finds them.
    asyncpg.UniqueViolationError,
)
_LOST = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    # The driver has lost its way on this connection.
    asyncpg.InternalClientError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    OSError,
    TimeoutError,
)
_NOT_YET = (asyncpg.CannotConnectNowError, asyncpg.TooManyConnectionsError, OSError, TimeoutError)
_REFUSED = (
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.FeatureNotSupportedError,
    asyncpg.ClientConfigurationError,
)


class Indeterminate(StorageError):
    """The reply was lost: what was asked for may have been done."""


class Target:
    """Where the server is and how it is to be talked to.

    `poll_only` is for a pooler that gives every transaction a different session: no prepared
    statements, no settings of the session.
    """

    def __init__(self, url: str, schema: str, clock: Clock, *, poll_only: bool) -> None:
        if not re.fullmatch(r"[a-z_][a-z0-9_]{0,47}", schema):
            raise SettingsError(
                f"schema {schema!r}: use 1 to 48 of the characters a-z 0-9 _, and begin with no digit"
            )
        self.url = url
        self.schema = schema
        self.clock = clock
        self.poll_only = poll_only

    def __str__(self) -> str:
        return f"PostgreSQL at {mask_url(self.url)}"

    async def connect(self, purpose: str) -> Connection:
        """A new connection. Raises `StorageRefused` when waiting cannot help."""
        own = {"application_name": f"omniq {purpose}"}
        if not self.poll_only and purpose != "transaction":
            own |= _SESSION
        if not self.poll_only and purpose.endswith("writer"):
            own |= _PLANNER
        if not self.poll_only and purpose == "counter":
            # A count may take its time; it must not take every core from those who work.
            own["max_parallel_workers_per_gather"] = "0"
        try:
            connection: Connection = await asyncpg.connect(
                self.url,
                timeout=_CONNECT_SECONDS,
                command_timeout=None if purpose == "transaction" else CALL_SECONDS,
                statement_cache_size=0 if self.poll_only else 100,
                max_cached_statement_lifetime=0,
                server_settings=own,
            )
        except (*_NOT_YET, asyncpg.PostgresError, asyncpg.InterfaceError, ValueError) as error:
            raise self.wrapped(error) from error
        _set_up(connection)
        return connection

    def wrapped(self, error: BaseException) -> StorageError:
        """The same error in our words. The URL's password is not among them."""
        text = str(error) or type(error).__name__
        kind = StorageRefused if isinstance(error, (*_REFUSED, ValueError)) else StorageError
        return kind(f"{self}: {text}")

    def closed(self) -> StorageClosed:
        """What whoever was still waiting for a connection is told."""
        return StorageClosed(f"{self}: this storage was closed during the call")


def _set_up(connection: Connection) -> None:
    """Have the system find out when the other side has gone without a word; read in small pieces."""
    # The driver has no option for it. Without it a lost peer is found by the deadline of a call.
    transport = getattr(connection, "_transport", None)
    if transport is not None and hasattr(transport, "max_size"):
        # asyncio allocates as much as it might read, and cuts it down to what it has read: a
        # hundred thousand times a quarter of a megabyte leave the heap in pieces.
        transport.max_size = _READ_SIZE
    peer = None if transport is None else transport.get_extra_info("socket")
    if peer is None or peer.family not in (socket.AF_INET, socket.AF_INET6):
        return
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_IDLE),
        ("TCP_KEEPINTVL", _KEEPALIVE_INTERVAL),
        ("TCP_KEEPCNT", _KEEPALIVE_COUNT),
        ("TCP_USER_TIMEOUT", 1000 * _KEEPALIVE_IDLE),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            peer.setsockopt(socket.IPPROTO_TCP, option, value)


class Link:
    """One connection, used by one call at a time, in the order they came."""

    def __init__(self, target: Target, purpose: str) -> None:
        self._target = target
        self._purpose = purpose
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()
        self._is_closed = False

    @property
    def is_busy(self) -> bool:
        """Whether a call would have to wait for another one."""
        return self._lock.locked()

    async def open(self) -> None:
        """Connect now, or say why not."""
        async with self._lock:
            if self._connection is None:
                self._connection = await self._target.connect(self._purpose)

    async def run(
        self, work: Callable[[Connection], Awaitable[_T]], *, is_repeatable: bool = False
    ) -> _T:
        """Have a statement or a transaction done; made again when others were in the way.

        When the connection is lost under way and `is_repeatable`, it is done once more. Otherwise
        `Indeterminate` is raised: it may have been done.
        """
        async with self._lock:
            try:
                return await self._try(work)
            except Indeterminate:
                if not is_repeatable:
                    raise
            return await self._try(work)

    async def _try(self, work: Callable[[Connection], Awaitable[_T]]) -> _T:
        connection = await self._connected()
        clock = self._target.clock
        for attempt in range(_ATTEMPTS):
            try:
                return await work(connection)
            except _IN_THE_WAY as error:
                if attempt == _ATTEMPTS - 1:
                    raise self._target.wrapped(error) from error
                await clock.sleep(_pause(attempt, clock))
            except _LOST as error:
                if isinstance(error, ValueError):
                    # A value that the driver would not send; nothing has happened.
                    raise self._target.wrapped(error) from error
                self._drop()
                raise Indeterminate(
                    f"{self._target}: {str(error) or type(error).__name__}"
                ) from error
            except asyncpg.PostgresError as error:
                raise self._target.wrapped(error) from error
            except asyncio.CancelledError:
                # A statement that was cancelled half-way leaves a connection nobody can use at once.
                self._drop()
                raise
        raise AssertionError("the last attempt returns or raises")

    async def _connected(self) -> Connection:
        """The connection, made anew where it was lost; waits a little for a server that restarts."""
        self._check_open()
        if self._connection is not None and not self._connection.is_closed():
            return self._connection
        self._drop()
        clock, attempt = self._target.clock, 0
        deadline = clock.monotonic() + _PATIENCE
        while True:
            try:
                self._connection = await self._target.connect(self._purpose)
                self._check_open()
                return self._connection
            except (StorageRefused, StorageClosed):
                raise
            except StorageError:
                if clock.monotonic() >= deadline:
                    raise
            await clock.sleep(_pause(attempt, clock))
            attempt += 1

    def _check_open(self) -> None:
        if self._is_closed:
            self._drop()
            raise self._target.closed()

    def _drop(self) -> None:
        if self._connection is not None:
            with suppress(Exception):
                self._connection.terminate()
            self._connection = None

    async def close(self) -> None:
        """Say goodbye if the server listens, after the call that is under way; no other begins."""
        self._is_closed = True
        await settle(self._lock)
        connection, self._connection = self._connection, None
        await close(connection)


def _pause(attempt: int, clock: Clock) -> float:
    """Seconds to wait: longer each time, and by chance, so that many do not come back at once."""
    longest: float = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(attempt, 10))
    return longest * (0.5 + clock.random() / 2)


async def settle(lock: asyncio.Lock) -> None:
    """Wait a little for those who have the lock, or have asked for it."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_CLOSE_SECONDS), lock:
            pass


async def close(connection: Connection | None) -> None:
    """Close a connection, the hard way if the server does not answer."""
    if connection is None or connection.is_closed():
        return
    try:
        await connection.close(timeout=_CLOSE_SECONDS)
    except (asyncpg.PostgresError, *_LOST):
        connection.terminate()


class Spares:
    """Connections that are lent out for a while; at most `size` at once, whoever is later waits."""

    def __init__(self, target: Target, size: int) -> None:
        self._target = target
        self._slots = asyncio.Semaphore(size)
        self._idle: list[Connection] = []
        self._is_closed = False

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Connection]:
        """A connection with no transaction open."""
        async with self._slots:
            connection = None
            while self._idle and (connection is None or connection.is_closed()):
                connection = self._idle.pop()
            if connection is None or connection.is_closed():
                connection = await self._target.connect("transaction")
            try:
                yield connection
            except BaseException:
                await close(connection)
                raise
            if self._is_closed:
                await close(connection)
            elif not connection.is_closed():
                self._idle.append(connection)

    async def close(self) -> None:
        """Close those that nobody has; the others when they come back."""
        self._is_closed = True
        while self._idle:
            await close(self._idle.pop())


def is_lost(error: BaseException) -> bool:
    """Whether the connection is gone, and with it the reply."""
    return isinstance(error, _LOST)


def is_driver_error(error: BaseException) -> bool:
    """Whether the driver or the server raised it."""
    return not isinstance(error, OmniqError) and isinstance(
        error, (asyncpg.PostgresError, asyncpg.InterfaceError)
    )


def is_missing(error: BaseException) -> bool:
    """Whether a table or schema is not there."""
    return isinstance(
        error.__cause__, (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError)
    )
