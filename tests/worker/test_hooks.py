"""`on_failure` and `on_dead`: called once a failure is recorded; their errors change nothing."""

from __future__ import annotations

import pytest

from omniq import AsyncTaskQueue, InvalidTask, TaskStatus
from omniq.events import Event, HookFailed, TaskDead
from omniq.storage.memory import MemoryStorage
from omniq.tasks.options import check_options
from omniq.testing.clock import ManualClock
from tests.worker import guarded_tasks
from tests.worker.recorder import a_while, until


async def test_every_failure_calls_on_failure_and_the_last_one_on_dead_too(queue, recorder):
    handle = await queue.enqueue(guarded_tasks.fail_with_hooks, "x")
    await queue.enqueue(guarded_tasks.succeed_with_hooks, "y")
    await queue.worker(concurrency=2, base_retry_delay=0).run_until_empty()

    assert sorted(recorder.names()) == ["dead x", "failed x ValueError 0", "failed x ValueError 1"]
    assert recorder.facts["dead"] == (handle.id, ("x",), "x failed")


async def test_a_hook_is_called_when_the_failure_is_recorded(queue, recorder):
    handle = await queue.enqueue(guarded_tasks.fail_with_hooks, "x")
    async with queue.worker(base_retry_delay=0):
        await until(lambda: "dead x" in recorder.names())

    assert await queue.dead.get(handle.id) is not None


async def test_an_exception_of_a_hook_is_reported_and_changes_nothing(queue, recorder):
    handle = await queue.enqueue(guarded_tasks.fail_with_broken_hooks, "x")
    pool = queue.worker()
    emitted = []
    pool.events.subscribe(
        lambda event: emitted.append(event) if event.name == "hook.failed" else None
    )
    async with pool:
        await until(lambda: len(emitted) == 2)
        assert await (await queue.enqueue(guarded_tasks.add, 1)).result(30) == 1

    facts = {event.hook: event for event in emitted if isinstance(event, HookFailed)}
    assert facts["on_failure"].error_message == "the hook is broken"
    assert "the hook is broken" in facts["on_failure"].traceback
    assert facts["on_dead"].error == "SystemExit"
    letter = await queue.dead.get(handle.id)
    assert (letter.failure_reason, letter.attempt_count) == ("permanent", 1)


async def test_a_pool_that_stops_waits_for_its_hooks(memory_queue, recorder):
    await memory_queue.enqueue(guarded_tasks.fail_with_a_slow_hook)
    pool = memory_queue.worker()
    await pool.start()
    await until(lambda: "hook began" in recorder.names())
    await pool.stop()

    assert recorder.names() == ["hook began", "hook ended"]


async def test_a_task_that_crashed_its_workers_is_reported_by_the_worker_that_recovers_it(recorder):
    clock = ManualClock()
    async with MemoryStorage(clock=clock) as storage:
        queue = AsyncTaskQueue(storage)
        handle = await queue.enqueue(guarded_tasks.fail_with_hooks, "x")
        for _ in range(2):
            await lose(storage, clock)
            await storage.give_back_abandoned()
        await lose(storage, clock)
        pool = queue.worker()
        emitted: list[Event] = []
        pool.events.subscribe(emitted.append)
        async with pool:
            while "dead x" not in recorder.names():
                clock.advance(1)
                await a_while(0.001)

    dead = [event for event in emitted if isinstance(event, TaskDead)]
    assert [(event.id, event.reason, event.attempt) for event in dead] == [
        (handle.id, "crashed", 3)
    ]
    assert recorder.names() == ["dead x"]
    assert recorder.facts["dead"][0] == handle.id


async def lose(storage: MemoryStorage, clock: ManualClock) -> None:
    """Claim a task as a worker that then stops renewing, until its lease has expired."""
    lost = storage.another()
    await lost.open()
    assert len(await lost.reserve(1)) == 1
    clock.advance(storage.settings.lease + 1)


async def test_no_hook_is_called_for_a_failure_that_was_not_recorded(memory_queue, recorder):
    """The task was cancelled meanwhile: it ends as CANCELLED and has not failed."""
    handle = await memory_queue.enqueue(guarded_tasks.fail_with_hooks, "x")
    await handle.cancel()
    await memory_queue.worker().run_until_empty()

    assert recorder.names() == []
    assert await handle.status() is TaskStatus.CANCELLED


@pytest.mark.parametrize("name", ["on_failure", "on_dead"])
def test_a_hook_must_be_a_function(name):
    with pytest.raises(InvalidTask, match=name):
        check_options(**{name: "mail.send"})
