"""A queue in memory, with some tasks that have ended one way or the other."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from omniq import AsyncTaskQueue
from omniq.models import TaskError
from omniq.outcomes import Failed
from tests.browser.served import asked

sys.path.insert(0, str(Path(__file__).parent / "demo"))


@pytest.fixture
async def queue() -> AsyncIterator[AsyncTaskQueue]:
    async with AsyncTaskQueue("memory://") as queue:
        yield queue


@pytest.fixture
async def client(queue: AsyncTaskQueue):
    """Asks a dashboard of the queue, as nobody."""
    async with asked(queue) as client:
        yield client


@pytest.fixture
def dead(queue: AsyncTaskQueue):
    """Enqueue a task and let it fail for good; its id."""

    async def make(*args: Any, func: str = "shop.say", error: str = "boom", **kwargs: Any) -> str:
        handle = await queue.options(priority=1000).enqueue(func, *args, **kwargs)
        (task,) = await queue.storage.reserve(1)
        assert task.id == handle.id
        told = TaskError(error, error_type="Boom", traceback=f"Traceback\nBoom: {error}")
        await queue.storage.record([Failed(task.id, task.token, told)])
        return handle.id

    return make
