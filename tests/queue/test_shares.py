"""The options fair_key, fair_weight, cost and ageing, as a queue stores them."""

from __future__ import annotations

import asyncio
import math
from datetime import timedelta

import pytest

from omniq import (
    AsyncTaskQueue,
    FairShare,
    InvalidTask,
    Settings,
    TaskContext,
    TaskQueue,
    TaskStatus,
    task,
)


@task(
    fair_key=lambda tenant, megabytes: tenant,
    fair_weight=lambda tenant, megabytes: 3 if tenant == "gold" else 1,
    cost=lambda tenant, megabytes: megabytes,
)
def transcode(tenant: str, megabytes: float) -> None: ...


@task
def plain(tenant: str) -> None: ...


@task(priority=5, ageing=0.05)
async def urgent(ctx: TaskContext) -> None:
    """Keeps its worker busy: there is always another one."""
    await asyncio.sleep(0.002)
    await ctx.enqueue(urgent)


@task(ageing=0.05)
async def patient() -> None: ...


@pytest.fixture
def queue():
    with TaskQueue("memory://") as opened:
        yield opened


def test_key_weight_and_cost_may_be_functions_of_the_arguments(queue):
    queue.enqueue(transcode, "gold", 2.5)

    (stored,) = queue.list_tasks()
    assert stored.fair == FairShare(key="gold", weight=3, cost=2.5)


def test_a_call_may_name_another_key(queue):
    queue.options(fair_key="all", fair_weight=2).enqueue(plain, "gold")
    queue.options(ageing=timedelta(minutes=1), priority=2).enqueue(plain, "gold")

    first, second = sorted(queue.list_tasks(), key=lambda each: each.priority)
    assert (first.fair, first.ageing) == (FairShare(key="all", weight=2), None)
    assert (second.fair, second.ageing, second.priority) == (None, 60, 2)


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf, "2", None, True, 10**400])
def test_a_function_that_makes_no_number_above_0_is_refused_before_anything_is_stored(queue, bad):
    for name in ("fair_weight", "cost"):
        with pytest.raises(InvalidTask, match=name):
            queue.options(fair_key="k", **{name: lambda tenant: bad}).enqueue_many(
                plain, [("a",), ("b",)]
            )

    assert queue.list_tasks() == []


@pytest.mark.parametrize("key", ["", 5, None])
def test_a_function_that_makes_no_key_is_refused(queue, key):
    with pytest.raises(InvalidTask, match="fair_key"):
        queue.options(fair_key=lambda tenant: key).enqueue(plain, "a")

    assert queue.list_tasks() == []


def test_a_cost_that_nothing_counts_is_refused(queue):
    with pytest.raises(InvalidTask, match="fair_key as well"):
        queue.options(cost=2).enqueue(plain, "a")


def test_the_settings_of_a_queue_are_for_its_tasks_without_another_order():
    settings = Settings(queues={"default": {"ageing": 60}, "web": {"ageing": timedelta(hours=1)}})
    with TaskQueue("memory://", settings=settings) as queue:
        queue.enqueue(plain, "a")
        queue.options(ageing=5).enqueue(plain, "a")
        queue.options(queue="web").enqueue(plain, "a")
        queue.enqueue(transcode, "gold", 1)
        queue.options(queue="other").enqueue(plain, "a")

        assert sorted(str(each.ageing) for each in queue.list_tasks()) == [
            *("3600.0", "5.0", "60.0"),
            *("None", "None"),
        ]


@pytest.mark.fault("F95")
async def test_a_task_that_ages_runs_beside_a_flood_of_urgent_ones():
    async with AsyncTaskQueue("memory://") as queue:
        for _ in range(3):
            await queue.enqueue(urgent)
        handle = await queue.enqueue(patient)
        async with queue.worker(concurrency=1):
            await handle.result(timeout=30)
            urgent_runs = len(await queue.list_tasks(func_path=f"{__name__}.urgent", limit=1000))

        assert await handle.status() is TaskStatus.SUCCESS
        assert urgent_runs > 10
