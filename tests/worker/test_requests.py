"""Requests to a worker: a failure of the store at the wrong moment costs none of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from omniq.errors import StorageError
from omniq.storage.backend import Section
from omniq.storage.memory import MemoryStorage
from omniq.storage.types import WorkerAnswer, WorkerRequest
from omniq.tasks.functions import FunctionCache
from omniq.worker.worker_requests import WorkerRequests


class _Pool:
    def __init__(self) -> None:
        self.stops: list[bool] = []

    def on_stop_request(self, *, restart: bool) -> None:
        self.stops.append(restart)


async def test_a_stop_is_followed_although_an_earlier_ping_cannot_be_answered(monkeypatch):
    pool: Any = _Pool()
    async with MemoryStorage() as storage:
        await storage.renew()
        assert await storage.ping_worker(storage.owner, 0.001) is None
        await storage._engine.ask_worker(storage.owner, "1", "ping")
        assert await storage.stop_worker(storage.owner)

        async def answer_request(request: WorkerRequest, answer: WorkerAnswer) -> None:
            raise StorageError("the store is down")

        monkeypatch.setattr(storage, "answer_request", answer_request)
        with pytest.raises(StorageError):
            await WorkerRequests(FunctionCache(), pool).follow(storage)

    assert pool.stops == [False]


async def test_a_stop_is_followed_although_the_reply_that_says_so_is_lost(monkeypatch):
    pool: Any = _Pool()
    async with MemoryStorage() as storage:
        await storage.renew()
        assert await storage.stop_worker(storage.owner)
        backend = storage._engine.backend
        transact = backend.transact

        async def lose_replies(
            work: Callable[[Section], Awaitable[Any]], *, writes: bool = True, **options: Any
        ) -> Any:
            reply = await transact(work, writes=writes, **options)
            if writes:
                raise StorageError("the connection was lost")
            return reply

        requests = WorkerRequests(FunctionCache(), pool)
        with monkeypatch.context() as lossy:
            lossy.setattr(backend, "transact", lose_replies)
            await requests.follow(storage)
        await requests.follow(storage)

    assert pool.stops == [False]
