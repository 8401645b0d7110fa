"""What every page and every call of the API has at hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar, cast

from starlette.requests import Request

from omniq.dashboard.authentication import Access, Sessions
from omniq.dashboard.sampler import Sampler
from omniq.events import Dispatcher
from omniq.queue.async_queue import AsyncTaskQueue

T = TypeVar("T")

_FRESH_SECONDS = 1.0
_MOST_KEPT = 64


class AppState:
    """The queue, who is in, and what was asked a moment ago."""

    def __init__(self, queue: AsyncTaskQueue, access: Access, events: Dispatcher) -> None:
        self.queue = queue
        self.storage = queue.storage
        self.clock = queue.storage.clock
        self.access = access
        self.events = events
        self.sessions = Sessions(access, self.clock)
        self.sampler = Sampler(queue.storage)
        self._answers: dict[Hashable, tuple[float, asyncio.Future[Any]]] = {}

    async def once(
        self, question: Hashable, ask: Callable[[], Awaitable[T]], fresh: float = _FRESH_SECONDS
    ) -> T:
        """The answer, shared by all who ask the same within a second; failures are not kept."""
        now = self.clock.monotonic()
        kept = self._answers.get(question)
        if kept is None or now - kept[0] >= fresh:
            kept = (now, asyncio.ensure_future(ask()))
            self._answers.pop(question, None)
            self._answers[question] = kept
            while len(self._answers) > _MOST_KEPT:
                del self._answers[next(iter(self._answers))]
        try:
            # Shielded: one reader who leaves must not take the answer from the others.
            return cast(T, await asyncio.shield(kept[1]))
        except Exception:
            self._answers.pop(question, None)
            raise

    def forget(self) -> None:
        """Ask anew from now on: something was changed."""
        self._answers.clear()
        self.sampler.expire()


def state_of(request: Request) -> AppState:
    """The state of the application that serves the request."""
    return cast(AppState, request.app.state.dashboard)
