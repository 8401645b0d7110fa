"""`on_failure` and `on_dead`: called once a failure is recorded; their errors change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from omniq import (
    AsyncTaskQueue,
    InvalidTask,
    Settings,
    ShutdownTimeout,
    TaskError,
    TaskStatus,
    task,
)
from omniq.events import Event, HookFailed, TaskDead
from omniq.operations.explain import explain
from omniq.operations.task_detail import task_detail
from omniq.outcomes import Failed
from omniq.storage.base import BaseStorage
from omniq.storage.memory import MemoryStorage
from omniq.tasks.options import check_options
from omniq.testing.clock import ManualClock
from omniq.testing.faults import FaultyStorage
from omniq.worker import dead_hooks, failure_hooks
from tests.storage.memory_log import MemoryLogStore
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
    assert {event.attempt for event in facts.values()} == {1}
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


# Hooks of lost workers


def memory_stores(clock: ManualClock) -> Callable[[], BaseStorage]:
    first = MemoryStorage(clock=clock)
    return lambda: first.another()


def log_stores(clock: ManualClock) -> Callable[[], BaseStorage]:
    store = MemoryLogStore(clock, Settings(), None)
    return store.another


@pytest.mark.parametrize("stores", [memory_stores, log_stores])
async def test_a_hook_is_called_by_another_worker_if_its_own_was_lost(recorder, stores):
    """The worker that recorded the dead letter never calls the hook."""
    clock = ManualClock()
    make = stores(clock)
    async with make() as lost, AsyncTaskQueue(make()) as queue:
        handle = await queue.enqueue(guarded_tasks.fail_with_hooks, "x")
        (claimed,) = await lost.reserve(1)
        error = TaskError("no stock", error_type="ShopError")
        await lost.record([Failed(claimed.id, claimed.token, error, hook=lost.owner)])
        async with queue.worker():
            for _ in range(20):
                clock.advance(1)
                await a_while(0.001)
            assert recorder.names() == []
            clock.advance(queue.storage.settings.lease)
            while await queue.storage.pending_hook(handle.id) is not None:
                clock.advance(1)
                await a_while(0.001)

    assert recorder.names() == ["dead x"]
    assert recorder.facts["dead"] == (handle.id, ("x",), "no stock")


async def test_a_pool_that_stops_leaves_its_hook_to_the_next_one(recorder, memory_queue):
    handle = await memory_queue.enqueue(guarded_tasks.fail_with_an_endless_hook)
    first = memory_queue.worker()
    await first.start()
    await until(lambda: "hook began" in recorder.names())
    with pytest.raises(ShutdownTimeout):
        await first.stop(0.1)
    assert await memory_queue.storage.pending_hook(handle.id) is not None

    recorder.gate("hook").set()
    async with memory_queue.worker(lease=1):
        await until(lambda: "hook ended" in recorder.names())
        while await memory_queue.storage.pending_hook(handle.id) is not None:
            await a_while(0.01)

    assert recorder.names() == ["hook began", "hook began", "hook ended"]


async def test_a_hook_that_its_function_no_longer_has_is_forgotten(recorder):
    clock = ManualClock()
    storage = MemoryStorage(clock=clock)
    async with AsyncTaskQueue(storage) as queue:
        handle = await queue.enqueue(guarded_tasks.add, 1)
        lost = storage.another()
        await lost.open()
        (claimed,) = await lost.reserve(1)
        await lost.record([Failed(claimed.id, claimed.token, TaskError("no stock"), hook="")])
        async with queue.worker():
            while await queue.storage.pending_hook(handle.id) is not None:
                clock.advance(1)
                await a_while(0.001)

    assert recorder.names() == []


async def test_a_hook_whose_end_could_not_be_recorded_is_recorded_later(recorder):
    clock = ManualClock()
    faulty = FaultyStorage(MemoryStorage(clock=clock))
    async with AsyncTaskQueue(faulty) as queue:
        handle = await queue.options(max_retries=0).enqueue(guarded_tasks.fail_with_hooks, "x")
        faulty.fail("dead", times=3)
        async with queue.worker():
            while await queue.storage.pending_hook(handle.id) is not None:
                clock.advance(1)
                await a_while(0.001)

    assert recorder.names().count("dead x") == 1


async def _die(storage: BaseStorage, owners: list[BaseStorage], count: int) -> None:
    """Have the next tasks die under the first owner; the others then take over the hooks."""
    claimed = await owners[0].reserve(count)
    error = TaskError("no stock")
    await owners[0].record(
        [Failed(task.id, task.token, error, hook=owners[0].owner) for task in claimed]
    )
    for owner in owners[1:]:
        for hook in (await storage.pending_hooks())[0]:
            assert await owner.take_hook(hook)


async def _owners(storage: MemoryStorage, count: int) -> list[BaseStorage]:
    owners = [storage.another() for _ in range(count)]
    for owner in owners:
        await owner.open()
    return list(owners)


async def test_a_hook_that_five_workers_were_lost_with_is_not_called_again(recorder):
    clock = ManualClock()
    storage = MemoryStorage(clock=clock)
    emitted: list[Event] = []
    async with AsyncTaskQueue(storage) as queue:
        handle = await queue.enqueue(guarded_tasks.fail_with_hooks, "x")
        await _die(storage, await _owners(storage, 5), 1)
        clock.advance(queue.storage.settings.lease + 1)
        pool = queue.worker()
        pool.events.subscribe(emitted.append)
        async with pool:
            while await storage.pending_hook(handle.id) is not None:
                clock.advance(1)
                await a_while(0.001)
            await until(lambda: any(isinstance(event, HookFailed) for event in emitted))
        assert await queue.dead.get(handle.id) is not None

    assert recorder.names() == []
    (failed,) = [event for event in emitted if isinstance(event, HookFailed)]
    assert (failed.hook, failed.error) == ("on_dead", "WorkerLost")
    assert failed.error_message.startswith("5 workers were lost")


async def test_hooks_that_two_workers_were_lost_with_are_called_one_at_a_time(
    recorder, monkeypatch
):
    """If one of them kills the worker again, the others are not lost with it."""
    monkeypatch.setattr(failure_hooks, "_PATIENCE", 2.0)
    clock = ManualClock()
    storage = MemoryStorage(clock=clock)
    async with AsyncTaskQueue(storage) as queue:
        for _ in range(3):
            await queue.enqueue(guarded_tasks.fail_with_an_endless_hook)
        await _die(storage, await _owners(storage, 2), 3)
        clock.advance(queue.storage.settings.lease + 1)
        async with queue.worker():
            for _ in range(30):
                clock.advance(0.5)
                await a_while(0.001)
            assert recorder.names() == ["hook began"]
            recorder.gate("hook").set()
            while (await storage.pending_hooks())[0]:
                clock.advance(0.5)
                await a_while(0.001)

    assert recorder.names() == ["hook began", *["hook began", "hook ended"] * 2]


async def test_the_end_of_each_hook_is_recorded_once(recorder, monkeypatch):
    storage = MemoryStorage()
    ended = []
    record_end = storage.end_hook

    async def end_hook(task_id: str, token: int) -> None:
        ended.append(task_id)
        await a_while(0.01)
        await record_end(task_id, token)

    monkeypatch.setattr(storage, "end_hook", end_hook)
    async with AsyncTaskQueue(storage) as queue:
        for number in range(10):
            await queue.options(max_retries=0).enqueue(guarded_tasks.fail_with_hooks, str(number))
        async with queue.worker(concurrency=10):
            await until(lambda: len(ended) >= 10)
            while (await storage.pending_hooks())[0]:
                await a_while(0.01)

    assert len(ended) == len(set(ended)) == 10


async def test_a_hook_of_which_the_reply_was_lost_is_called_beside_a_page_of_others(
    recorder, monkeypatch
):
    """Hooks of another worker fill pages; the round that sees this one again comes later."""
    monkeypatch.setattr(dead_hooks, "_PAGE", 2)
    clock = ManualClock()
    storage = MemoryStorage(clock=clock)
    async with AsyncTaskQueue(storage) as queue:
        await queue.enqueue(guarded_tasks.fail_with_hooks, "x")
        for number in range(5):
            await queue.enqueue(guarded_tasks.fail_with_hooks, str(number))
        async with queue.worker(queues=["other"]):
            other = storage.another()
            await other.open()
            claimed = await other.reserve(6)
            for task_ in claimed:
                owner = storage.owner if task_.args == ("x",) else other.owner
                failed = Failed(task_.id, task_.token, TaskError("no stock"), hook=owner)
                await other.record([failed])
            for _ in range(200):
                clock.advance(1)
                await other.renew()
                await a_while(0.001)
            assert recorder.names() == ["dead x"]


async def test_a_task_whose_function_has_no_hook_leaves_nothing_to_call(memory_queue):
    handle = await memory_queue.options(max_retries=0).enqueue(guarded_tasks.fail, "x")
    await memory_queue.worker().run_until_empty()

    assert await memory_queue.dead.get(handle.id) is not None
    assert await memory_queue.storage.pending_hooks() == ([], "")


async def test_explain_and_the_detail_of_a_task_show_its_pending_hook():
    async with AsyncTaskQueue(MemoryStorage()) as queue:
        storage = queue.storage
        handle = await queue.enqueue(guarded_tasks.fail_with_hooks, "x")
        (claimed,) = await storage.reserve(1)
        outcome = Failed(claimed.id, claimed.token, TaskError("no stock"), hook=storage.owner)
        await storage.record([outcome])

        reasons = (await explain(storage, handle.id)).reasons
        assert [reason.code for reason in reasons] == ["dead", "hook"]
        assert f"worker {storage.owner} calls it" in reasons[1].text
        detail = await task_detail(storage, handle.id)
        assert detail.pending_hook is not None
        assert await storage.take_hook(detail.pending_hook)
        await storage.end_hook(handle.id, claimed.token)
        assert len((await explain(storage, handle.id)).reasons) == 1


def _one(error: Any) -> None: ...


def _keyword(task: Any, *, error: Any) -> None: ...


@pytest.mark.parametrize("name", ["on_success", "on_failure", "on_dead"])
@pytest.mark.parametrize("hook", [_one, _keyword])
def test_a_hook_that_cannot_be_called_with_two_arguments_is_refused_at_once(name, hook):
    second = "result" if name == "on_success" else "error"
    with pytest.raises(InvalidTask, match=rf"function of \(task, {second}\), but it takes \("):
        task(**{name: hook})(guarded_tasks.add)
