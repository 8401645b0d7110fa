"""`on_failure` and `on_dead`: called once a failure is recorded, and never the worse for it."""

from __future__ import annotations

import pytest

from omniq import AsyncTaskQueue, InvalidTask, TaskStatus
from omniq.events import Event, HookFailed, TaskDead
from omniq.storage.memory import MemoryStorage
from omniq.tasks.options import check_options
from omniq.testing.clock import ManualClock
from tests.worker import guarded_tasks
from tests.worker.stage import a_while, until


async def test_every_failure_is_told_and_the_last_one_twice(queue, stage):
    handle = await queue.enqueue(guarded_tasks.fail_with_hooks, "x")
    await queue.enqueue(guarded_tasks.succeed_with_hooks, "y")
    await queue.worker(concurrency=2, base_retry_delay=0).run_until_empty()

    assert sorted(stage.names()) == ["dead x", "failed x ValueError 0", "failed x ValueError 1"]
    assert stage.facts["dead"] == (handle.id, ("x",), "x failed")


async def test_a_hook_is_called_when_the_failure_is_on_record(queue, stage):
    handle = await queue.enqueue(guarded_tasks.fail_with_hooks, "x")
    async with queue.worker(base_retry_delay=0):
        await until(lambda: "dead x" in stage.names())

    assert await queue.dead.get(handle.id) is not None


async def test_what_a_hook_raises_is_told_and_changes_nothing(queue, stage):
    handle = await queue.enqueue(guarded_tasks.fail_with_broken_hooks, "x")
    pool = queue.worker()
    told = []
    pool.events.subscribe(lambda event: told.append(event) if event.name == "hook.failed" else None)
    async with pool:
        await until(lambda: len(told) == 2)
        assert await (await queue.enqueue(guarded_tasks.add, 1)).result(5) == 1

    facts = {event.hook: event.error for event in told if isinstance(event, HookFailed)}
    assert "the hook is broken" in facts["on_failure"]
    assert "SystemExit" in facts["on_dead"]
    letter = await queue.dead.get(handle.id)
    assert (letter.failure_reason, letter.attempt_count) == ("permanent", 1)


async def test_a_pool_that_stops_waits_for_its_hooks(memory_queue, stage):
    await memory_queue.enqueue(guarded_tasks.fail_with_a_slow_hook)
    pool = memory_queue.worker()
    await pool.start()
    await until(lambda: "hook began" in stage.names())
    await pool.stop()

    assert stage.names() == ["hook began", "hook ended"]


async def test_a_task_that_died_with_its_workers_is_told_by_whoever_gives_it_back(stage):
    clock = ManualClock()
    async with MemoryStorage(clock=clock) as storage:
        queue = AsyncTaskQueue(storage)
        handle = await queue.enqueue(guarded_tasks.fail_with_hooks, "x")
        for _ in range(2):
            await lose(storage, clock)
            await storage.give_back_abandoned()
        await lose(storage, clock)
        pool = queue.worker()
        told: list[Event] = []
        pool.events.subscribe(told.append)
        async with pool:
            while "dead x" not in stage.names():
                clock.advance(1)
                await a_while(0.001)

    dead = [event for event in told if isinstance(event, TaskDead)]
    assert [(event.id, event.reason, event.attempt) for event in dead] == [
        (handle.id, "crashed", 3)
    ]
    assert stage.names() == ["dead x"]
    assert stage.facts["dead"][0] == handle.id


async def lose(storage: MemoryStorage, clock: ManualClock) -> None:
    """Claim a task as a worker that then says no more, until its lease has ended."""
    lost = storage.another()
    await lost.open()
    assert len(await lost.reserve(1)) == 1
    clock.advance(storage.settings.lease + 1)


async def test_a_failure_that_was_not_recorded_has_no_hook(memory_queue, stage):
    """Cancelled meanwhile: the task ends as CANCELLED and nothing has failed."""
    handle = await memory_queue.enqueue(guarded_tasks.fail_with_hooks, "x")
    await handle.cancel()
    await memory_queue.worker().run_until_empty()

    assert stage.names() == []
    assert await handle.status() is TaskStatus.CANCELLED


@pytest.mark.parametrize("name", ["on_failure", "on_dead"])
def test_a_hook_must_be_a_function(name):
    with pytest.raises(InvalidTask, match=name):
        check_options(**{name: "mail.send"})
