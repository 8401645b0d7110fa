"""The objects that all request handlers of the dashboard share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar, cast

from starlette.requests import Request

from omniq.dashboard.authentication import Access, Sessions
from omniq.dashboard.jobs import Jobs
from omniq.dashboard.sampler import Sampler
from omniq.dashboard.search_connection import SearchConnection
from omniq.dashboard.wrong_secrets import WrongSecrets
from omniq.events import Dispatcher
from omniq.queue.async_queue import AsyncTaskQueue

T = TypeVar("T")

_MAX_AGE = 1.0
_MAX_CACHED = 64


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
        self._cache: dict[Hashable, tuple[float, asyncio.Future[Any]]] = {}

    async def cached(
        self, key: Hashable, read: Callable[[], Awaitable[T]], max_age: float = _MAX_AGE
    ) -> T:
        """The result of `read`, shared by all requests with this key within `max_age` seconds.

        Failures are not cached.
        """
        now = self.clock.monotonic()
        entry = self._cache.get(key)
        if entry is None or now - entry[0] >= max_age:
            entry = (now, asyncio.ensure_future(read()))
            self._cache.pop(key, None)
            self._cache[key] = entry
            while len(self._cache) > _MAX_CACHED:
                del self._cache[next(iter(self._cache))]
        try:
            # Shielded: a request that is cancelled must not cancel the read of the others.
            return cast(T, await asyncio.shield(entry[1]))
        except Exception:
            self._cache.pop(key, None)
            raise

    async def close(self) -> None:
        """End all streams and jobs, and close the connections that the dashboard has opened."""
        await self.jobs.close()
        await self.sampler.close()
        await self.searches.close()

    def invalidate(self) -> None:
        """Read everything again for the next request: something was changed."""
        self._cache.clear()
        self.sampler.invalidate()


def state_of(request: Request) -> AppState:
    """The state of the application that serves the request."""
    return cast(AppState, request.app.state.dashboard)
