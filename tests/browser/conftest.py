"""Fixtures: a queue in memory, a client of its dashboard, and dead tasks."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from omniq import AsyncTaskQueue
from omniq.models import TaskError
from omniq.outcomes import Failed
from tests.browser.served import dashboard_client

sys.path.insert(0, str(Path(__file__).parent / "demo"))


@pytest.fixture
async def queue() -> AsyncIterator[AsyncTaskQueue]:
    async with AsyncTaskQueue("memory://") as queue:
        yield queue


@pytest.fixture
async def client(queue: AsyncTaskQueue):
    """An unauthenticated client of a dashboard of the queue."""
    async with dashboard_client(queue) as client:
        yield client


@pytest.fixture
def dead(queue: AsyncTaskQueue):
    """Enqueues a task and fails it permanently; returns its id."""

    async def make(*args: Any, func: str = "shop.say", error: str = "boom", **kwargs: Any) -> str:
        handle = await queue.options(priority=1000).enqueue(func, *args, **kwargs)
        (task,) = await queue.storage.reserve(1)
        assert task.id == handle.id
        failure = TaskError(error, error_type="Boom", traceback=f"Traceback\nBoom: {error}")
        await queue.storage.record([Failed(task.id, task.token, failure)])
        return handle.id

    return make
