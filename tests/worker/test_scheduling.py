"""Schedules with a real pool, on every backend: fired in time, by whoever is there."""

from __future__ import annotations

from datetime import timedelta

import pytest

from omniq import AsyncTaskQueue
from omniq.events import ChoreFailed, Event
from tests.worker import sample_tasks
from tests.worker.conftest import Store
from tests.worker.stage import Stage, until

LONG_POLL = 30.0
"""Longer than any test may take: whatever happens sooner does not happen because of a poll."""

SOON = timedelta(milliseconds=100)


async def appear(stage: Stage, name: str, times: int = 1) -> None:
    await until(lambda: len(stage.times(name)) >= times)


async def test_a_schedule_that_is_added_beside_a_pool_is_fired_when_it_is_due(
    queue: AsyncTaskQueue, stage: Stage
) -> None:
    async with queue.worker(poll_interval=LONG_POLL):
        now = queue.storage.clock.now()
        await queue.schedules.add("s", sample_tasks.note, args=("soon",), at=now + SOON)
        await appear(stage, "soon")

    (task,) = await queue.list_tasks()
    assert task.schedule_id == "s"
    assert task.started_at is not None
    assert task.started_at >= now + SOON


async def test_an_interval_goes_on_from_one_time_to_the_next(
    queue: AsyncTaskQueue, stage: Stage
) -> None:
    async with queue.worker(poll_interval=LONG_POLL):
        await queue.schedules.add("s", sample_tasks.note, args=("tick",), interval=SOON)
        await appear(stage, "tick", 4)


async def test_a_schedule_of_another_process_is_noticed_within_a_poll_interval(
    store: Store, queue: AsyncTaskQueue, stage: Stage
) -> None:
    async with queue.worker(poll_interval=0.1), AsyncTaskQueue(store.another()) as elsewhere:
        now = queue.storage.clock.now()
        await elsewhere.schedules.add("s", sample_tasks.note, args=("soon",), at=now)
        await appear(stage, "soon")


async def test_a_schedule_that_was_changed_while_it_waits_is_fired_at_its_new_time(
    queue: AsyncTaskQueue, stage: Stage
) -> None:
    async with queue.worker(poll_interval=LONG_POLL):
        now = queue.storage.clock.now()
        await queue.schedules.add("s", sample_tasks.note, args=("old",), at=now + SOON * 100)
        await queue.schedules.add("s", sample_tasks.note, args=("new",), at=now + SOON)
        await appear(stage, "new")

    assert stage.names() == ["new"]


@pytest.mark.parametrize("pools", [3])
async def test_many_pools_fire_each_time_once(
    store: Store, queue: AsyncTaskQueue, stage: Stage, pools: int
) -> None:
    told: list[Event] = []
    queues = [AsyncTaskQueue(store.another()) for _ in range(pools)]
    async with queues[0], queues[1], queues[2]:
        workers = [each.worker(poll_interval=0.05) for each in queues]
        for worker in workers:
            worker.events.subscribe(told.append)
            await worker.start()
        await queue.schedules.add(
            "s", sample_tasks.note, args=("tick",), interval=0.05, missed="all"
        )
        await appear(stage, "tick", 10)
        await queue.schedules.delete("s")
        for worker in workers:
            await worker.stop()

    tasks = await queue.list_tasks(limit=1000)
    times = sorted(task.metadata["scheduled_for"] for task in tasks)
    assert len(set(times)) == len(times) == len(tasks)
    assert len(stage.times("tick")) == len(tasks)
    assert [event for event in told if isinstance(event, ChoreFailed)] == []


async def test_what_is_due_is_fired_before_a_burst(queue: AsyncTaskQueue, stage: Stage) -> None:
    now = queue.storage.clock.now()
    await queue.schedules.add("s", sample_tasks.note, args=("due",), at=now)
    await queue.worker(poll_interval=LONG_POLL).run_until_empty()

    assert stage.names() == ["due"]
