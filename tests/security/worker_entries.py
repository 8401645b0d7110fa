"""Every way to get a worker: each runs what is due in a storage, and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from omniq import AsyncTaskQueue, AsyncWorkerPool, TaskQueue, Worker, WorkerPool
from omniq.integrations.asgi import lifespan
from omniq.storage.base import BaseStorage
from omniq.storage.memory import MemoryStorage
from omniq.testing.builders import a_task

LAST = "tests.security.sample_tasks.good"
"""Due after everything else: a worker that has run it has had the choice of all others."""

Modules = Sequence[str] | None


async def through_async_queue(storage: MemoryStorage, modules: Modules) -> None:
    async with AsyncTaskQueue(storage.another()) as queue:
        await queue.worker(allow=modules).run_until_empty()


async def through_blocking_queue(storage: MemoryStorage, modules: Modules) -> None:
    def run() -> None:
        with TaskQueue(storage.another()) as queue:
            queue.worker(allow=modules).run_until_empty()

    await asyncio.to_thread(run)


async def through_async_pool(storage: MemoryStorage, modules: Modules) -> None:
    async with storage.another() as other:
        await AsyncWorkerPool(other, 5, allow=modules).run_until_empty()


async def through_blocking_pool(storage: MemoryStorage, modules: Modules) -> None:
    def run() -> None:
        WorkerPool(storage.another(), 5, allow=modules).run_until_empty()

    await asyncio.to_thread(run)


async def through_lifespan(storage: MemoryStorage, modules: Modules) -> None:
    queue = AsyncTaskQueue(storage.another())
    async with lifespan(queue, worker=list(modules or ["tests.security.sample_tasks"]))(None):
        await _until_last_has_run(storage)


async def through_worker(storage: MemoryStorage, modules: Modules) -> None:
    def run() -> None:
        with Worker(storage.another(), list(modules or ["tests.security.sample_tasks"])):
            asyncio.run(_until_last_has_run(storage))

    await asyncio.to_thread(run)


async def _until_last_has_run(storage: MemoryStorage) -> None:
    """Return when it has ended; the test's timeout is the deadline."""
    async with storage.another() as other:
        while True:
            (last,) = await other.list_tasks(func_path=LAST)
            if last.status.is_final:
                return
            await asyncio.sleep(0.01)


async def plant(storage: BaseStorage, paths: Sequence[str]) -> list[str]:
    """Store tasks as an attacker does who can write to the storage; returns their ids."""
    ids = await storage.enqueue_many([a_task(func_path=path, max_retries=0) for path in paths])
    await storage.enqueue(a_task(func_path=LAST, args=(1,), priority=-1))
    return ids


OPEN: list[Callable[[MemoryStorage, Modules], Awaitable[None]]] = [
    through_async_queue,
    through_blocking_queue,
    through_async_pool,
    through_blocking_pool,
]
"""The entries that need no modules."""

ALL = [*OPEN, through_lifespan, through_worker]
