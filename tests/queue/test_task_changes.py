"""`queue.change` and `queue.run_now`, on both queues and on handles, with the log line of each change."""

from __future__ import annotations

from datetime import timedelta

import pytest
from loguru import logger

from omniq import (
    AsyncTaskQueue,
    InvalidTask,
    TaskNotFound,
    TaskNotWaiting,
    TaskQueue,
    TaskStatus,
    log,
    task,
)
from omniq.storage.memory import MemoryStorage
from omniq.testing.clock import ManualClock


@task
def double(number: int) -> int:
    return number * 2


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def queue(clock: ManualClock):
    async with AsyncTaskQueue(MemoryStorage(clock=clock)) as queue:
        yield queue


async def test_a_waiting_task_gets_another_priority_queue_and_eta(queue, clock):
    handle = await queue.enqueue(double, 2)
    eta = clock.now() + timedelta(minutes=5)

    changed = await queue.change(handle.id, priority=3, queue="slow", eta=eta)

    assert (changed.priority, changed.queue, changed.eta) == (3, "slow", eta)
    assert await queue.get_task(handle.id) == changed


async def test_a_delay_counts_from_now(queue, clock):
    handle = await queue.enqueue(double, 2)

    assert (await handle.change(delay=60)).eta == clock.now() + timedelta(seconds=60)
    changed = await queue.change(handle.id, delay=timedelta(hours=1))
    assert changed.eta == clock.now() + timedelta(hours=1)


async def test_a_delayed_task_is_run_now(queue):
    handle = await queue.options(delay=3600).enqueue(double, 2)

    assert (await handle.run_now()).status is TaskStatus.PENDING
    await queue.worker().run_until_empty()

    assert await handle.result() == 4


async def test_what_cannot_be_changed_is_refused_with_a_sentence(queue, clock):
    handle = await queue.enqueue(double, 2)
    with pytest.raises(InvalidTask, match="give the priority, queue or eta"):
        await queue.change(handle.id)
    with pytest.raises(InvalidTask, match="either eta or delay"):
        await queue.change(handle.id, eta=clock.now(), delay=3)
    with pytest.raises(TaskNotFound):
        await queue.run_now("unknown")
    await queue.worker().run_until_empty()

    with pytest.raises(TaskNotWaiting, match=r"has ended \(success\).*enqueue it again") as refused:
        await queue.change(handle.id, priority=1)
    assert refused.value.status is TaskStatus.SUCCESS


async def test_a_change_is_a_line_of_the_log(queue, clock):
    lines: list[str] = []
    handle = await queue.enqueue(double, 2)
    sink = logger.add(lines.append, format="{message} {extra}")
    log.enable("INFO")
    try:
        await queue.change(handle.id, priority=7)
    finally:
        log.disable()
        logger.remove(sink)

    (line,) = lines
    assert "task.changed" in line
    assert handle.id in line
    assert "priority=7" in line


def test_a_blocking_queue_changes_tasks(clock):
    with TaskQueue(MemoryStorage(clock=clock)) as queue:
        handle = queue.options(delay=60).enqueue(double, 2)

        assert queue.change(handle.id, priority=2).priority == 2
        assert handle.change(queue="slow").queue == "slow"
        assert queue.run_now(handle.id).eta == clock.now()
        assert handle.run_now().priority == 2


def test_a_breaker_is_closed_by_hand(clock):
    with TaskQueue(MemoryStorage(clock=clock)) as queue:
        assert not queue.breakers.close("smtp")
