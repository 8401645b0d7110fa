"""Schedules with a real pool, on every backend: fired in time, by any of the workers."""

from __future__ import annotations

from datetime import timedelta

import pytest

from omniq import AsyncTaskQueue
from omniq.events import Event, WorkerProblem
from tests.worker import sample_tasks
from tests.worker.conftest import Store
from tests.worker.recorder import RunRecorder, until

LONG_POLL = 30.0
"""Longer than any test may take: what happens sooner does not happen because of a poll."""

SOON = timedelta(milliseconds=100)


async def appear(recorder: RunRecorder, name: str, times: int = 1) -> None:
    await until(lambda: len(recorder.times(name)) >= times)


async def test_a_schedule_that_is_added_beside_a_pool_is_fired_when_it_is_due(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    async with queue.worker(poll_interval=LONG_POLL):
        now = queue.storage.clock.now()
        await queue.schedules.add("s", sample_tasks.note, args=("soon",), at=now + SOON)
        await appear(recorder, "soon")

    (task,) = await queue.list_tasks()
    assert task.schedule_id == "s"
    assert task.started_at is not None
    assert task.started_at >= now + SOON


async def test_an_interval_schedule_fires_again_and_again(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    async with queue.worker(poll_interval=LONG_POLL):
        await queue.schedules.add("s", sample_tasks.note, args=("tick",), interval=SOON)
        await appear(recorder, "tick", 4)


async def test_a_schedule_of_another_process_is_noticed_within_a_poll_interval(
    store: Store, queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    async with queue.worker(poll_interval=0.1), AsyncTaskQueue(store.another()) as elsewhere:
        now = queue.storage.clock.now()
        await elsewhere.schedules.add("s", sample_tasks.note, args=("soon",), at=now)
        await appear(recorder, "soon")


async def test_a_schedule_that_was_changed_while_it_waits_is_fired_at_its_new_time(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    async with queue.worker(poll_interval=LONG_POLL):
        now = queue.storage.clock.now()
        await queue.schedules.add("s", sample_tasks.note, args=("old",), at=now + SOON * 100)
        await queue.schedules.add("s", sample_tasks.note, args=("new",), at=now + SOON)
        await appear(recorder, "new")

    assert recorder.names() == ["new"]


@pytest.mark.parametrize("pools", [3])
async def test_many_pools_fire_each_nominal_time_once(
    store: Store, queue: AsyncTaskQueue, recorder: RunRecorder, pools: int
) -> None:
    emitted: list[Event] = []
    queues = [AsyncTaskQueue(store.another()) for _ in range(pools)]
    async with queues[0], queues[1], queues[2]:
        workers = [each.worker(poll_interval=0.05) for each in queues]
        for worker in workers:
            worker.events.subscribe(emitted.append)
            await worker.start()
        await queue.schedules.add(
            "s", sample_tasks.note, args=("tick",), interval=0.05, missed="all"
        )
        await appear(recorder, "tick", 10)
        await queue.schedules.delete("s")
        for worker in workers:
            await worker.stop()

    tasks = await queue.list_tasks(limit=1000)
    times = sorted(task.metadata["scheduled_for"] for task in tasks)
    assert len(set(times)) == len(times) == len(tasks)
    assert len(recorder.times("tick")) == len(tasks)
    assert [event for event in emitted if isinstance(event, WorkerProblem)] == []


async def test_run_until_empty_fires_due_schedules_first(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    now = queue.storage.clock.now()
    await queue.schedules.add("s", sample_tasks.note, args=("due",), at=now)
    await queue.worker(poll_interval=LONG_POLL).run_until_empty()

    assert recorder.names() == ["due"]
