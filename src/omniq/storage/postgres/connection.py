"""Connection: connections to PostgreSQL, bounded in number and time, and reopened when lost.

The only module that imports the driver. Errors of the driver leave it as `StorageError`. The caller
decides whether a call may be repeated after its reply was lost.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final, TypeAlias, TypeVar

import asyncpg

from omniq.clock import Clock
from omniq.concurrency.backoff import backoff
from omniq.errors import (
    LeaseLost,
    OmniqError,
    QueueFull,
    SettingsError,
    StorageClosed,
    StorageError,
    StorageRefused,
)
from omniq.storage.backend import Moved
from omniq.storage.connection_advice import connect_timeout, network_advice
from omniq.storage.postgres import address, transport
from omniq.storage.postgres.statements import PLANNER_SETTINGS, SEARCH_PATH
from omniq.text.masking import mask_url

_T = TypeVar("_T")


Connection: TypeAlias = Any
"""A connection of the driver, which has no types."""

CALL_SECONDS: Final = 30.0
"""The timeout of a call, including the time it waits for locks."""

_CONNECT_SECONDS = 10.0
_RECONNECT_SECONDS = 3.0
"""How long a call tries to reach a server that does not accept connections, without the setting `reconnect_timeout`."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
_CLOSE_SECONDS = 2.0
_ATTEMPTS = 8
"""How often a transaction is attempted that conflicts with others."""

_SESSION_SETTINGS = {
    "search_path": SEARCH_PATH,
    "statement_timeout": f"{CALL_SECONDS * 1000 - 1000:.0f}",
    "lock_timeout": "10000",
    "idle_in_transaction_session_timeout": f"{CALL_SECONDS * 1000:.0f}",
    "tcp_keepalives_idle": str(transport.KEEPALIVE_IDLE),
    "tcp_keepalives_interval": str(transport.KEEPALIVE_INTERVAL),
    "tcp_keepalives_count": str(transport.KEEPALIVE_COUNT),
}

_CONFLICTS = (
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.LockNotAvailableError,
)
_WRITE_REFUSALS: dict[str, Callable[[str], Exception]] = {
    "OQ001": lambda _: Moved(),
    "OQ002": LeaseLost,
    "OQ003": lambda bound: QueueFull(int(bound)),
    asyncpg.UniqueViolationError.sqlstate: lambda _: Moved(),
}
"""What an error of the SQL function `write` means, by its SQLSTATE and its message."""

_CONNECTION_LOST = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    # The driver's protocol state is broken; this connection cannot be used any more.
    asyncpg.InternalClientError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    OSError,
    TimeoutError,
)
_REFUSED = (
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
    asyncpg.FeatureNotSupportedError,
    asyncpg.ClientConfigurationError,
    ssl.SSLCertVerificationError,
)


_ADVICE: dict[type[Exception], str] = {
    asyncpg.InvalidAuthorizationSpecificationError: "check the user and the password of the URL",
    asyncpg.InvalidCatalogNameError: "create the database, for example with createdb",
    asyncpg.InsufficientPrivilegeError: (
        "let an owner of the database run omniq schema install, or give this user a schema: "
        "CREATE SCHEMA omniq AUTHORIZATION <user>"
    ),
    asyncpg.ReadOnlySQLTransactionError: (
        "this server cannot be written to: is it a standby? Name all servers in the URL, "
        "postgresql://host1,host2/database, so that the primary is found"
    ),
    asyncpg.TargetServerAttributeNotMatched: "this server is a standby, or read-only",
    asyncpg.TooManyConnectionsError: (
        "raise max_connections, or use fewer workers: each uses up to six connections"
    ),
}
"""What to do about an error of the server."""


class ReplyLost(StorageError):
    """The connection was lost before the reply: the server may have carried out the call."""


class Target:
    """The server's address, the store's schema, and how to connect.

    `poll_only` is for a pooler that gives every transaction a different session: no prepared
    statements, no session settings. `largest`: bytes of a value that the server sends, at most.
    """

    def __init__(
        self,
        url: str,
        schema: str,
        clock: Clock,
        *,
        poll_only: bool,
        largest: int,
        reconnect_timeout: float | None = None,
    ) -> None:
        if not re.fullmatch(r"[a-z_][a-z0-9_]{0,47}", schema):
            raise SettingsError(
                f"schema {schema!r}: use 1 to 48 of the characters a-z 0-9 _, and begin with no digit"
            )
        address.check(url)
        self.url = url
        self.schema = schema
        self.clock = clock
        self.poll_only = poll_only
        self.reconnect_timeout = reconnect_timeout or _RECONNECT_SECONDS
        self.has_answered = False
        """Whether this store could be used once: what is refused then may be allowed again later."""
        self._largest = largest
        # Of several servers, the one that is connected to first: the last one that could be used.
        self._servers = list(address.servers(url))
        self._role = None if address.names_a_role(url) or not self._servers else "read-write"

    def __str__(self) -> str:
        return f"PostgreSQL at {mask_url(self.url)}"

    async def connect(self, purpose: str) -> Connection:
        """Open a connection. Raises `StorageRefused` when a later attempt would fail as well."""
        settings = {"application_name": f"omniq {purpose}"}
        if not self.poll_only and purpose != "transaction":
            settings |= _SESSION_SETTINGS | {"omniq.largest": str(self._largest)}
        if not self.poll_only and purpose.endswith("writer"):
            settings |= PLANNER_SETTINGS
        if not self.poll_only and purpose == "counter":
            # A count may be slow, but must not take every core from the workers.
            settings["max_parallel_workers_per_gather"] = "0"
        connection = await self._connect_to_one(purpose, settings)
        transport.configure(connection)
        return connection

    async def _connect_to_one(self, purpose: str, settings: dict[str, str]) -> Connection:
        """Connect to the first of the servers that accepts it."""
        failures: list[StorageError] = []
        for server in tuple(self._servers) or (None,):
            try:
                connection = await self._connect_to(server, purpose, settings)
            except StorageError as error:
                failures.append(error)
            else:
                if server is not None:
                    self._servers.remove(server)
                    self._servers.insert(0, server)
                return connection
        if len(failures) == 1:
            raise failures[0]
        is_refused = all(isinstance(failure, StorageRefused) for failure in failures)
        kind = StorageRefused if is_refused else StorageError
        raise kind("; ".join(dict.fromkeys(map(str, failures)))) from failures[0]

    async def _connect_to(
        self, server: address.Server | None, purpose: str, settings: dict[str, str]
    ) -> Connection:
        # A server that does not answer must leave time for the others.
        seconds = _CONNECT_SECONDS / max(1, len(self._servers))
        place: dict[str, Any] = {} if server is None else {"host": server.host, "port": server.port}
        try:
            return await asyncpg.connect(
                self.url,
                **place,
                timeout=seconds,
                command_timeout=None if purpose == "transaction" else CALL_SECONDS,
                statement_cache_size=0 if self.poll_only else 100,
                max_cached_statement_lifetime=0,
                server_settings=settings,
                target_session_attrs=self._role,
            )
        except TimeoutError as error:
            late = connect_timeout(seconds, tls=False)
            raise self.wrap_error(late, server) from error
        except Exception as error:
            # Also what the driver raises that is none of its classes: it calls none of our code here.
            is_quoting = _is_parse_error(error)
            raise self.wrap_error(error, server) from (None if is_quoting else error)

    def wrap_error(
        self, error: BaseException, server: address.Server | None = None
    ) -> StorageError:
        """Return the driver's error as a `StorageError`, without the URL's password.

        What the server refuses is final only before it was used for the first time. Later it is an
        outage: a password that is changed, a right that is taken away for a moment.
        """
        text = str(error) or type(error).__name__
        if _is_parse_error(error):
            text = f"the URL {address.UNREADABLE}"
        is_final = isinstance(error, (*_REFUSED, ValueError)) and not self.has_answered
        kind = StorageRefused if is_final else StorageError
        where = str(self) if server is None else f"{self}, server {server}"
        return kind(f"{where}: {text}{_advice(error)}")

    @contextmanager
    def wrapped_errors(self) -> Iterator[None]:
        """Raise errors of the driver as `StorageError`."""
        try:
            yield
        except Exception as error:
            if is_driver_error(error):
                raise self.wrap_error(error) from error
            raise

    def closed_error(self) -> StorageClosed:
        """Return the error for calls that still wait for a connection when the storage closes."""
        return StorageClosed(f"{self}: this storage was closed during the call")


def _advice(error: BaseException) -> str:
    for kind, advice in _ADVICE.items():
        if isinstance(error, kind):
            return f"; {advice}"
    return network_advice(error)


def _is_parse_error(error: BaseException) -> bool:
    """Whether the driver could not read the URL: the text of such an error may quote the password."""
    is_of_driver = isinstance(error, asyncpg.PostgresError | asyncpg.InterfaceError)
    return isinstance(error, ValueError | OverflowError) and not is_of_driver


class ServerConnection:
    """One connection, used by one call at a time, in the order of the calls."""

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
        """Connect once, without retries; raises `StorageError`."""
        async with self._lock:
            if self._connection is None:
                self._connection = await self._target.connect(self._purpose)

    async def run(
        self, work: Callable[[Connection], Awaitable[_T]], *, is_repeatable: bool = False
    ) -> _T:
        """Run a statement or a transaction; conflicts with other transactions are retried.

        When the connection is lost during the call and `is_repeatable`, the call is made once more.
        Otherwise `ReplyLost` is raised: the server may have carried it out.
        """
        async with self._lock:
            try:
                return await self._attempt(work)
            except ReplyLost:
                if not is_repeatable:
                    raise
            return await self._attempt(work)

    def fetch(self, sql: str, *parameters: Any) -> Awaitable[list[Any]]:
        """Run a statement, once more if its reply is lost."""
        return self.run(lambda db: db.fetch(sql, *parameters), is_repeatable=True)

    def fetch_once(self, sql: str, *parameters: Any) -> Awaitable[list[Any]]:
        """Run a statement; `ReplyLost` if its reply is lost."""
        return self.run(lambda db: db.fetch(sql, *parameters))

    async def _attempt(self, work: Callable[[Connection], Awaitable[_T]]) -> _T:
        connection = await self._connected()
        clock = self._target.clock
        for attempt in range(_ATTEMPTS):
            try:
                return await work(connection)
            except _CONFLICTS as error:
                if attempt == _ATTEMPTS - 1:
                    raise self._target.wrap_error(error) from error
                await clock.sleep(_pause(attempt, clock))
            except asyncpg.ReadOnlySQLTransactionError as error:
                # A standby, or a primary that is about to stop: another server may be the primary now.
                self._drop()
                raise self._target.wrap_error(error) from error
            except _CONNECTION_LOST as error:
                if isinstance(error, ValueError):
                    # The driver refused to send a value; the server has received nothing.
                    raise self._target.wrap_error(error) from error
                self._drop()
                raise ReplyLost(f"{self._target}: {str(error) or type(error).__name__}") from error
            except asyncpg.PostgresError as error:
                raise_if_refused(error)
                raise self._target.wrap_error(error) from error
            except asyncio.CancelledError:
                # A statement that was cancelled half-way leaves the connection busy for a while.
                self._drop()
                raise
            except (OmniqError, Moved):
                raise
            except Exception as error:
                # A reply of the wrong shape: no later one on this connection can be trusted.
                self._drop()
                raise ReplyLost(f"{self._target}: unexpected reply: {error!r}") from error
        raise AssertionError("the last attempt returns or raises")

    async def _connected(self) -> Connection:
        """Return the connection; reconnect if it was lost, for up to `reconnect_timeout`."""
        self._check_open()
        if self._connection is not None and not self._connection.is_closed():
            return self._connection
        self._drop()
        clock, attempt = self._target.clock, 0
        deadline = clock.monotonic() + self._target.reconnect_timeout
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
            raise self._target.closed_error()

    def _drop(self) -> None:
        if self._connection is not None:
            with suppress(Exception):
                self._connection.terminate()
            self._connection = None

    async def close(self) -> None:
        """Close the connection after the call that is running; later calls are refused."""
        self._is_closed = True
        await wait_until_free(self._lock)
        connection, self._connection = self._connection, None
        await close(connection)


def _pause(attempt: int, clock: Clock) -> float:
    return backoff(attempt, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE, jitter=clock.random())


async def wait_until_free(lock: asyncio.Lock) -> None:
    """Wait for the calls that hold the lock or queue for it, for up to `_CLOSE_SECONDS`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_CLOSE_SECONDS), lock:
            pass


async def close(connection: Connection | None) -> None:
    """Close a connection; terminate it if the server does not answer."""
    if connection is None or connection.is_closed():
        return
    try:
        await connection.close(timeout=_CLOSE_SECONDS)
    except (asyncpg.PostgresError, *_CONNECTION_LOST):
        connection.terminate()


class ConnectionPool:
    """At most `size` connections, each used by one caller at a time; further callers wait."""

    def __init__(self, target: Target, size: int) -> None:
        self._target = target
        self._slots = asyncio.Semaphore(size)
        self._idle: list[Connection] = []
        self._is_closed = False

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Connection]:
        """Return a connection with no open transaction; it is closed when the block raises."""
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
        """Close the idle connections; the others are closed when they are released."""
        self._is_closed = True
        while self._idle:
            await close(self._idle.pop())


def is_connection_lost(error: BaseException) -> bool:
    """Whether the error means that the connection, and with it the reply, was lost."""
    return isinstance(error, _CONNECTION_LOST)


def is_driver_error(error: BaseException) -> bool:
    """Whether the driver or the server raised the error, or the connection was lost."""
    return not isinstance(error, OmniqError) and isinstance(
        error, (asyncpg.PostgresError, *_CONNECTION_LOST)
    )


def raise_if_refused(error: BaseException) -> None:
    """Raise what the error of a write means, if it is a refusal."""
    refusal = _WRITE_REFUSALS.get(getattr(error, "sqlstate", ""))
    if refusal is not None:
        raise refusal(str(error)) from error


def is_missing(error: BaseException) -> bool:
    """Whether the error was caused by a missing table or schema."""
    return isinstance(
        error.__cause__, (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError)
    )
