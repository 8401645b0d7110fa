"""Limits apply across all pools of a store. `tests/faults/test_limits.py` also kills workers."""

from __future__ import annotations

from contextlib import AsyncExitStack
from datetime import timedelta

import pytest

from omniq import AsyncTaskQueue
from tests.faults.limits import most_within
from tests.worker import guarded_tasks

POOLS = 3


async def drain(store, func, tasks: int):
    """The results of that many tasks, run by three pools of one store."""
    async with AsyncExitStack() as stack:
        queues = [
            AsyncTaskQueue(await stack.enter_async_context(store.another())) for _ in range(POOLS)
        ]
        handles = await queues[0].enqueue_many(func, range(tasks))
        for queue in queues:
            await stack.enter_async_context(queue.worker(concurrency=8, poll_interval=0.05))
        assert [await handle.result(timeout=60) for handle in handles] == list(range(tasks))
        return [await queues[0].get_result(handle.id) for handle in handles]


@pytest.mark.timeout(120)
async def test_no_more_run_at_once_than_the_limit_allows(store, recorder):
    await drain(store, guarded_tasks.one_of_three, 120)

    assert (recorder.most_inside, len(recorder.names())) == (3, 120)


@pytest.mark.timeout(120)
async def test_no_span_of_time_has_more_starts_than_the_rate_allows(store):
    """100 starts a second, as 25 in a quarter: 150 tasks take at least a second and a quarter."""
    results = await drain(store, guarded_tasks.rated, 150)
    starts = sorted(result.started_at for result in results)

    assert most_within(starts, timedelta(seconds=0.25)) <= 25
    assert starts[-1] - starts[0] >= timedelta(seconds=1.25)
