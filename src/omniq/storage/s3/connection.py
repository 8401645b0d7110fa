"""Requests to the objects below a prefix of a bucket. Only this module uses the driver.

Retries of the driver are off: a repeated create would find the object of its first attempt. This module retries
requests that are safe to repeat while the server is busy or does not respond.

The blocking functions of the driver are called, each in a new thread. Its async functions complete futures from
threads that it does not end: a process that ended soon after a request was aborted. The threads are not daemons,
so the interpreter waits for a request that is under way, at most `_DRIVER_TIMEOUT`.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec
import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from omniq.clock import Clock, to_micros
from omniq.concurrency.process_id import PROCESS_ID
from omniq.errors import StorageError, StorageRefused
from omniq.storage.s3.address import Address

if TYPE_CHECKING:
    from obstore.store import ClientConfig

_T = TypeVar("_T")

PATIENCE = 15.0
"""Seconds for which a request is repeated."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
_ANSWER_WITHIN = 10.0
"""Seconds that one request may take, plus one second for each `_SLOWEST` bytes that it transfers."""

_SLOWEST = 1_000_000
_DRIVER_TIMEOUT = "60s"
"""After which the driver gives up a request, also one that no caller waits for."""

_SERVER_SAID = re.compile(r"<Code>(?P<code>[^<]{1,100})</Code>\s*<Message>(?P<message>[^<]{1,300})")


class Entry(msgspec.Struct, frozen=True):
    """An object in a listing: the last part of its name, and the server's time when it was written."""

    name: str
    modified: int
    size: int


class _Driver:
    """Refuses a forked process: the threads of the driver do not exist there, and calls would hang."""

    def __init__(self) -> None:
        self._process = 0

    def use(self) -> None:
        """Record that this process uses the driver. Raises `StorageError` if its parent used it before the fork."""
        self._process = self._process or PROCESS_ID.number
        if self._process != PROCESS_ID.number:
            raise StorageError(
                f"process {self._process} used an s3:// storage before it forked this process, and the "
                "driver does not work after a fork; fork first, or start processes with 'spawn'"
            )


_DRIVER = _Driver()


class S3Connection:
    """The objects of one store."""

    def __init__(self, address: Address, clock: Clock, credentials: Any = None) -> None:
        _DRIVER.use()
        self._clock = clock
        self._prefix = address.prefix
        self._place = f"s3://{address.bucket}/{address.prefix}"
        self._is_reached = False
        options: dict[str, Any] = {}
        if credentials is not None:
            options["credential_provider"] = credentials
        if address.region:
            options["region"] = address.region
        if address.endpoint:
            options["endpoint"] = address.endpoint
        client: ClientConfig = {
            "timeout": _DRIVER_TIMEOUT,
            "connect_timeout": "5s",
            # Loading reads many objects concurrently; afterwards few connections are needed.
            "pool_max_idle_per_host": "4",
        }
        if address.endpoint.startswith("http://"):
            client["allow_http"] = True
        self._store = S3Store(
            address.bucket, client_options=client, retry_config={"max_retries": 0}, **options
        )

    # Requests

    async def create(self, name: str, data: bytes) -> bool:
        """Create the object; False if it exists, or if a concurrent create may have won.

        Sent once. Raises `StorageError` if it is unknown whether the object was created.
        """
        try:
            await self._ask(
                len(data),
                lambda: obstore.put(
                    self._store, self._key(name), data, mode="create", use_multipart=False
                ),
            )
        except (AlreadyExistsError, PreconditionError):
            self._is_reached = True
            return False
        except (BaseError, OSError) as error:
            self._fail(error)
        return True

    async def put(self, name: str, data: bytes) -> None:
        """Write the object, and replace an existing one."""
        key = self._key(name)
        await self._repeat(
            len(data), lambda: obstore.put(self._store, key, data, use_multipart=False)
        )

    async def get(self, name: str) -> bytes | None:
        """Read the object; None if it does not exist."""

        def read() -> bytes:
            return bytes(obstore.get(self._store, self._key(name)).bytes())

        return await self._repeat(2 * _SLOWEST, read)

    async def modified(self, name: str) -> int | None:
        """The server's time when the object was written, in microseconds and whole seconds."""
        key = self._key(name)
        found = await self._repeat(0, lambda: obstore.head(self._store, key))
        return None if found is None else to_micros(found["last_modified"])

    async def list(self, folder: str, *, most: int | None = None) -> list[Entry]:
        """The objects of a folder, sorted by name; about `most` of them, if there are more."""
        key = self._key(folder)

        def read() -> list[Entry]:
            found: list[Entry] = []
            for batch in obstore.list(self._store, key):
                found += [
                    Entry(
                        each["path"].rpartition("/")[2],
                        to_micros(each["last_modified"]),
                        each["size"],
                    )
                    for each in batch
                ]
                if most is not None and len(found) >= most:
                    break
            return sorted(found, key=lambda entry: entry.name)

        return await self._repeat(_SLOWEST, read) or []

    async def delete(self, names: Sequence[str]) -> None:
        """Delete the objects that exist."""
        keys = [self._key(name) for name in names]
        if keys:
            await self._repeat(len(keys) * 1_000, lambda: obstore.delete(self._store, keys))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    # Answers

    async def _ask(self, size: int, request: Callable[[], _T]) -> _T:
        _DRIVER.use()
        answer = await asyncio.wait_for(_in_thread(request), _ANSWER_WITHIN + size / _SLOWEST)
        self._is_reached = True
        return answer

    async def _repeat(self, size: int, request: Callable[[], _T]) -> _T | None:
        """Send a request, with retries for a limited time; None for an object that does not exist."""
        began, pause = self._clock.monotonic(), _SHORTEST_PAUSE
        while True:
            try:
                return await self._ask(size, request)
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    self._fail(error)
                self._is_reached = True
                return None
            except (BaseError, OSError) as error:
                is_late = self._clock.monotonic() - began > PATIENCE
                if is_late or not self._is_reached or _is_refusal(error):
                    self._fail(error)
            await self._clock.sleep(pause * (0.5 + self._clock.random()))
            pause = min(_LONGEST_PAUSE, pause * 2)

    def _fail(self, error: Exception) -> NoReturn:
        """Raise the error of omniq: `StorageRefused` if the first contact was refused."""
        text = _said(error)
        if "NoSuchBucket" in str(error):
            advice = f"there is no such bucket; create it, or correct the URL ({text})"
        elif isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
            advice = (
                "the server refuses these credentials; omniq needs s3:GetObject, s3:PutObject and "
                f"s3:DeleteObject on {self._prefix}/*, and s3:ListBucket ({text})"
            )
        else:
            raise StorageError(f"{self._place}: {text}") from error
        kind = StorageError if self._is_reached else StorageRefused
        raise kind(f"{self._place}: {advice}") from error


async def _in_thread(request: Callable[[], _T]) -> _T:
    """Make the request in a new thread. Whether it was made is unknown if this is cancelled."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def run() -> None:
        result: _T | None = None
        failure: Exception | None = None
        try:
            result = request()
        except Exception as error:  # Raised in the coroutine that waits.
            failure = error
        # The loop may have been closed meanwhile: then no coroutine waits.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(finish, result, failure)

    def finish(result: Any, failure: Exception | None) -> None:
        if future.done():
            return
        if failure is None:
            future.set_result(result)
        else:
            future.set_exception(failure)

    try:
        threading.Thread(target=run, name="omniq-s3").start()
    except RuntimeError as error:
        raise StorageError(f"the system refuses a thread for a request: {error}") from error
    return await future


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, (PermissionDeniedError, UnauthenticatedError))


def _said(error: Exception) -> str:
    """The message of the server, or else of the driver."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    said = _SERVER_SAID.search(str(error))
    if said is not None:
        return f"{said['code']}: {said['message']}"
    # After the first paragraph, the driver prints its internal state.
    return str(error).partition("\n\n")[0].replace("\n", " ")[:400]
