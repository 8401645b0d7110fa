"""The objects that all request handlers of the dashboard share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from math import inf
from typing import Any, TypeVar, cast

from starlette.requests import Request

from omniq.dashboard.alerts import Alerts, webhook_of
from omniq.dashboard.authentication import Access, Sessions
from omniq.dashboard.endings import Endings
from omniq.dashboard.jobs import Jobs
from omniq.dashboard.sampler import Sampler
from omniq.dashboard.search_connection import SearchConnection
from omniq.dashboard.wrong_secrets import WrongSecrets
from omniq.events import Dispatcher
from omniq.queue.async_queue import AsyncTaskQueue

T = TypeVar("T")

_MAX_AGE = 1.0
_MAX_CACHED = 64
_PAUSE_FACTOR, _MAX_PAUSE = 10, 15.0
"""A read is repeated after this many times its duration, or after that many seconds."""


class _CachedRead:
    """A read that runs or has ended, and the result of the one before."""

    def __init__(self, future: asyncio.Future[Any], began: float, before: Any) -> None:
        self.future = future
        self.before = before
        self._began = began
        self._took: float | None = None

    @property
    def result(self) -> Any:
        """The result, or that of the read before; None if there is none."""
        is_good = self._took is not None and not self.future.exception()
        return self.future.result() if is_good else self.before

    def end(self, now: float) -> None:
        """The read has ended."""
        self._took = now - self._began

    def is_older_than(self, max_age: float, now: float) -> bool:
        """Whether it is to be read again."""
        if self._took is None:
            return False
        if self.future.cancelled() or self.future.exception():
            return True
        return now - self._began >= max(max_age, min(_PAUSE_FACTOR * self._took, _MAX_PAUSE))


class AppState:
    """The queue, the sessions, the sampler, and a cache of recent reads."""

    def __init__(self, queue: AsyncTaskQueue, access: Access, events: Dispatcher) -> None:
        self.queue = queue
        self.storage = queue.storage
        self.clock = queue.storage.clock
        self.access = access
        self.events = events
        self.sessions = Sessions(access, self.clock)
        self.wrong_secrets = WrongSecrets(self.clock)
        self.sampler = Sampler(queue.storage)
        self.jobs = Jobs()
        self.searches = SearchConnection(queue.storage)
        self.endings = Endings(queue.storage)
        webhook = webhook_of()
        self.alerts = Alerts(self.sampler, webhook) if webhook else None
        self._cache: dict[Hashable, _CachedRead] = {}

    async def cached(
        self, key: Hashable, read: Callable[[], Awaitable[T]], max_age: float = _MAX_AGE
    ) -> T:
        """The result of `read`, shared by all requests with this key until it is `max_age` seconds old.

        A read that took long is repeated less often. Failures are not cached.
        """
        # Shielded: a request that is cancelled must not cancel the read of the others.
        return cast(T, await asyncio.shield(self._read(key, read, max_age).future))

    async def soon(
        self,
        key: Hashable,
        read: Callable[[], Awaitable[T]],
        default: T,
        *,
        max_age: float = _MAX_AGE,
        patience: float,
    ) -> tuple[T, bool]:
        """The result of `read` if it is there within `patience` seconds, and whether it is not.

        Otherwise it is the result of the read before, or `default`; the read goes on for the next request.
        """
        entry = self._read(key, read, max_age)
        await asyncio.wait((entry.future,), timeout=None if patience == inf else patience)
        if entry.future.done():
            return cast(T, entry.future.result()), False
        return (default if entry.before is None else cast(T, entry.before)), True

    def _read(
        self, key: Hashable, read: Callable[[], Awaitable[Any]], max_age: float
    ) -> _CachedRead:
        """The running or recent read with this key, or a new one."""
        known = self._cache.get(key)
        now = self.clock.monotonic()
        if known is not None and not known.is_older_than(max_age, now):
            return known
        entry = _CachedRead(asyncio.ensure_future(read()), now, known and known.result)
        entry.future.add_done_callback(lambda _: entry.end(self.clock.monotonic()))
        self._cache.pop(key, None)
        self._cache[key] = entry
        while len(self._cache) > _MAX_CACHED:
            del self._cache[next(iter(self._cache))]
        return entry

    async def close(self) -> None:
        """End all streams and jobs, and close the connections that the dashboard has opened."""
        await self.jobs.close()
        await self.endings.close()
        await self.sampler.close()
        await self.searches.close()

    def invalidate(self) -> None:
        """Read everything again for the next request: something was changed."""
        self._cache.clear()
        self.sampler.invalidate()


def state_of(request: Request) -> AppState:
    """The state of the application that serves the request."""
    return cast(AppState, request.app.state.dashboard)
