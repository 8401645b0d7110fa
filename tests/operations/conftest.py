"""A storage in memory with a clock that the test moves, and workers on the same memory."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from omniq.models import Runnable
from omniq.storage.memory import MemoryStorage
from omniq.testing.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def storage(clock: ManualClock):
    async with MemoryStorage(clock=clock) as storage:
        yield storage


@pytest.fixture
async def worker(storage: MemoryStorage):
    """A function that starts another owner on the same memory, with the given lease data."""
    async with AsyncExitStack() as stack:

        async def start(
            concurrency: int = 1,
            queues: tuple[str, ...] = (),
            lease: float = 30,
            runnable: Runnable | None = None,
        ):
            other = await stack.enter_async_context(storage.another())
            await other.renew(
                concurrency=concurrency, queues=queues, lease=lease, runnable=runnable
            )
            return other

        yield start
