"""Several processes that retry the same dead letters at the same time."""

from __future__ import annotations

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Barrier

from omniq.models import Task, TaskError
from omniq.outcomes import Failed
from omniq.storage import open_storage

BARRIER_TIMEOUT = 30.0

_barrier: Barrier | None = None


async def create_dead_letters(url: str, count: int) -> list[str]:
    """Create that many dead letters and return their ids."""
    async with open_storage(url) as storage:
        ids = await storage.enqueue_many([Task(func_path="m.f", args=(n,)) for n in range(count)])
        error = TaskError("boom", error_type="ValueError")
        while tasks := await storage.reserve(100):
            await storage.record([Failed(task.id, task.token, error) for task in tasks])
        return ids


def retry_together(url: str, ids: list[str], processes: int = 2) -> list[list[bool]]:
    """Return for each process whether each of its retries succeeded."""
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(processes)
    with ProcessPoolExecutor(
        processes, mp_context=spawn, initializer=_set_barrier, initargs=(barrier,)
    ) as pool:
        calls = [pool.submit(_retry_all, url, ids) for _ in range(processes)]
        return [call.result() for call in calls]


def _set_barrier(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier


def _retry_all(url: str, ids: list[str]) -> list[bool]:
    return asyncio.run(_retry_each(url, ids))


async def _retry_each(url: str, ids: list[str]) -> list[bool]:
    assert _barrier is not None
    async with open_storage(url) as storage:
        retried = []
        for task_id in ids:
            _barrier.wait(BARRIER_TIMEOUT)
            retried.append(await storage.retry_dead(task_id))
        return retried
