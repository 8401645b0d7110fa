"""How a pool stops: in order, in time, and without leaks."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from omniq import (
    AsyncTaskQueue,
    AsyncWorkerPool,
    PoolStopped,
    ShutdownTimeout,
    StorageError,
    Task,
    TaskStatus,
)
from omniq.events import WorkerProblem, WorkerStopped
from omniq.storage import BaseStorage
from omniq.storage.memory import MemoryStorage
from omniq.testing.faults import FaultyStorage
from omniq.worker.executors.execution import Run
from omniq.worker.running_tasks import RunningTasks
from tests.timing import at_most
from tests.worker import sample_tasks
from tests.worker.conftest import Store
from tests.worker.recorder import RunRecorder, a_while, until


def threads_of_omniq() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("omniq")}


async def is_unharmed(storage: BaseStorage, task_id: str) -> bool:
    """Whether the task waits as if it had never been claimed."""
    task = await storage.get_task(task_id)
    assert task is not None
    return (task.status, task.attempts, task.crashes) == (TaskStatus.PENDING, 0, 0)


async def test_an_idle_pool_stops_at_once_however_long_its_poll_interval(
    queue: AsyncTaskQueue,
) -> None:
    pool = queue.worker(poll_interval=60)
    await pool.start()
    await a_while(0.05)
    began = time.monotonic()
    await pool.stop()

    assert time.monotonic() - began < at_most(0.5)


async def test_a_worker_that_waits_for_its_tasks_is_shown_as_stopping(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    pool = queue.worker(poll_interval=0.02, lease=0.9)
    await pool.start()
    await queue.enqueue(sample_tasks.hold, "held")
    await until(lambda: recorder.inside == 1)
    (before,) = await queue.workers()
    stopping = asyncio.create_task(pool.stop())
    while not (await queue.workers())[0].stopping:
        await a_while(0.05)
    recorder.gate("held").set()
    await stopping

    assert not before.stopping
    assert await queue.workers() == []


async def test_stop_waits_for_running_tasks_and_claims_nothing_more(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    pool = queue.worker(concurrency=2, poll_interval=0.02)
    await pool.start()
    held = await queue.enqueue(sample_tasks.hold, "held")
    await until(lambda: recorder.inside == 1)
    stopping = asyncio.create_task(pool.stop())
    await until(lambda: not pool.running)
    # A claim that was under way may still take what is there when the server runs it.
    await a_while(0.1)
    late = await queue.enqueue(sample_tasks.note, "late")
    await a_while(0.1)
    assert not stopping.done()
    recorder.gate("held").set()
    await stopping

    assert await held.status() is TaskStatus.SUCCESS
    assert await late.status() is TaskStatus.PENDING
    assert recorder.names() == ["held"]


async def test_cancel_in_flight_releases_running_tasks_without_using_an_attempt(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    pool = queue.worker(concurrency=2)
    await pool.start()
    handle = await queue.enqueue(sample_tasks.hold, "async")
    thread = await queue.enqueue(sample_tasks.until_cancelled, "thread")
    await until(lambda: len(recorder.names()) == 2)
    await pool.stop(cancel_in_flight=True)

    assert await is_unharmed(queue.storage, handle.id)
    assert await is_unharmed(queue.storage, thread.id)
    await until(lambda: {"async cancelled", "thread cancelled"} <= set(recorder.names()))


@pytest.mark.parametrize("stop", [{"cancel_in_flight": True}, {"timeout": 0.1}], ids=str)
async def test_a_run_of_a_task_that_may_run_once_ends_as_a_dead_letter_at_the_stop(
    queue: AsyncTaskQueue, recorder: RunRecorder, stop: dict[str, Any]
) -> None:
    pool = queue.worker(concurrency=1)
    await pool.start()
    once = queue.options(max_crashes=0)
    begun = await once.enqueue(sample_tasks.hold, "begun")
    await until(lambda: recorder.names() == ["begun"])
    waiting = await once.enqueue(sample_tasks.hold, "waiting")
    with suppress(ShutdownTimeout):
        await pool.stop(**stop)

    letter = await queue.dead.get(begun.id)
    assert letter is not None
    assert (letter.failure_reason, letter.attempt_count) == ("crashed", 1)
    assert "its worker was stopped" in letter.error_details
    assert await is_unharmed(queue.storage, waiting.id)


async def test_a_claimed_task_that_may_run_once_and_has_not_begun_is_released(
    queue: AsyncTaskQueue, recorder: RunRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, stops = RunningTasks.start, list[str]()
    pool = queue.worker()

    def start_and_stop(runs: RunningTasks, tasks: list[Task]) -> None:
        start(runs, tasks)
        runs.stop_all("shutdown")
        assert pool._runtime is not None
        pool._runtime.parts.stop_requested.set_result(None)
        stops.extend(task.id for task in tasks)

    monkeypatch.setattr(RunningTasks, "start", start_and_stop)
    await pool.start()
    handle = await queue.options(max_crashes=0).enqueue(sample_tasks.hold, "not begun")
    await until(lambda: stops)
    await pool.stop()

    assert await is_unharmed(queue.storage, handle.id)
    assert recorder.names() == []


async def test_what_a_thread_returns_after_it_saw_the_stop_is_not_stored(
    queue: AsyncTaskQueue, recorder: RunRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However soon: it returns while the event loop is busy with something else."""
    stop = RunningTasks._stop

    def stop_and_be_busy(runs: RunningTasks, run: Run, *given: Any) -> None:
        stop(runs, run, *given)
        while "thread cancelled" not in recorder.names():
            time.sleep(0.001)
        # It has noted its name, and is about to return.
        time.sleep(0.02)

    monkeypatch.setattr(RunningTasks, "_stop", stop_and_be_busy)
    pool = queue.worker()
    await pool.start()
    thread = await queue.enqueue(sample_tasks.until_cancelled, "thread")
    await until(lambda: recorder.names() == ["thread"])
    await pool.stop(cancel_in_flight=True)

    assert await is_unharmed(queue.storage, thread.id)


async def test_a_stop_that_times_out_raises_and_releases_the_tasks(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    pool = queue.worker()
    stopped: list[WorkerStopped] = []
    pool.events.subscribe(
        lambda event: stopped.append(event) if isinstance(event, WorkerStopped) else None
    )
    await pool.start()
    handle = await queue.enqueue(sample_tasks.hold, "held")
    await until(lambda: recorder.inside == 1)
    began = time.monotonic()
    with pytest.raises(ShutdownTimeout, match="worker pool shutdown timeout"):
        await pool.stop(timeout=0.1)

    assert 0.1 <= time.monotonic() - began < at_most(1.0)
    assert await is_unharmed(queue.storage, handle.id)
    assert [event.released for event in stopped] == [1]


@pytest.mark.parametrize("func", [sample_tasks.ignore_cancellation, sample_tasks.hold_in_thread])
async def test_a_task_that_ignores_its_cancellation_cannot_delay_the_stop(
    queue: AsyncTaskQueue, recorder: RunRecorder, func
) -> None:
    pool = queue.worker()
    await pool.start()
    handle = await queue.enqueue(func, "ignore_cancellation")
    await until(lambda: recorder.names())
    began = time.monotonic()
    with pytest.raises(ShutdownTimeout):
        await pool.stop(timeout=0.1)

    assert time.monotonic() - began < at_most(1.1)
    assert await is_unharmed(queue.storage, handle.id)


async def test_a_second_stop_can_shorten_the_first(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    pool = queue.worker()
    await pool.start()
    handle = await queue.enqueue(sample_tasks.hold, "held")
    await until(lambda: recorder.inside == 1)
    patient = asyncio.create_task(pool.stop())
    await a_while(0.05)
    assert not patient.done()
    await pool.stop(cancel_in_flight=True)
    await patient

    assert await is_unharmed(queue.storage, handle.id)


async def test_a_stop_that_was_cancelled_can_be_repeated(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    pool = queue.worker()
    await pool.start()
    handle = await queue.enqueue(sample_tasks.hold, "held")
    await until(lambda: recorder.inside == 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pool.stop(), 0.05)
    assert not pool.running
    recorder.open_all()
    await pool.stop()

    assert await handle.status() is TaskStatus.SUCCESS
    assert await queue.workers() == []


async def test_stopping_twice_or_before_the_start_does_nothing(queue: AsyncTaskQueue) -> None:
    pool = queue.worker()
    await pool.stop()
    await pool.start()
    await pool.stop()
    await pool.stop()

    assert not pool.running


async def test_a_stop_during_the_start_ends_the_pool(memory_store: Store) -> None:
    storage = FaultyStorage(memory_store.another())
    storage.delay("open", seconds=0.1)
    pool = AsyncWorkerPool(storage)
    starting = asyncio.create_task(pool.start())
    await a_while(0.02)
    await pool.stop()

    with pytest.raises(PoolStopped):
        await starting
    assert not pool.running
    assert not storage.is_open


async def test_a_start_that_hangs_is_ended_by_a_stop_with_a_timeout(memory_store: Store) -> None:
    storage = FaultyStorage(memory_store.another())
    storage.delay("open", seconds=60)
    pool = AsyncWorkerPool(storage)
    starting = asyncio.create_task(pool.start())
    await a_while(0.02)
    began = time.monotonic()
    with pytest.raises(ShutdownTimeout):
        await pool.stop(timeout=0.1)

    assert time.monotonic() - began < at_most(1.5)
    with pytest.raises(PoolStopped):
        await starting


@pytest.mark.parametrize("verb", ["open", "renew"])
async def test_a_start_that_fails_closes_what_it_had_opened(store: Store, verb) -> None:
    before = threads_of_omniq()
    storage = FaultyStorage(store.another())
    storage.fail(verb)
    pool = AsyncWorkerPool(storage)
    with pytest.raises(StorageError, match="on purpose"):
        await pool.start()

    assert not pool.running
    assert not storage.is_open
    assert threads_of_omniq() <= before
    async with pool:
        assert pool.running


async def test_a_start_that_is_cancelled_closes_what_it_had_opened(memory_store: Store) -> None:
    before = threads_of_omniq()
    storage = FaultyStorage(memory_store.another())
    storage.delay("renew", seconds=60)
    pool = AsyncWorkerPool(storage)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pool.start(), 0.05)

    assert not pool.running
    assert not storage.is_open
    assert threads_of_omniq() <= before


async def test_a_stopped_pool_leaves_no_thread_and_no_asyncio_task_and_closes_its_storage(
    store: Store, recorder: RunRecorder
) -> None:
    before = threads_of_omniq(), asyncio.all_tasks()
    storage = store.another()
    async with AsyncWorkerPool(storage, concurrency=3) as pool:
        for n in range(3):
            await pool.submit(sample_tasks.hold_in_thread, f"{n}")
        await until(lambda: recorder.inside == 3)
        recorder.open_all()
    await until(lambda: threads_of_omniq() <= before[0], 2)

    assert asyncio.all_tasks() <= before[1]
    assert not storage.is_open


async def test_a_pool_leaves_a_storage_open_that_it_did_not_open(queue: AsyncTaskQueue) -> None:
    async with queue.worker():
        pass

    assert queue.storage.is_open


@pytest.mark.parametrize("when", ["idle", "with an outcome to record"])
@pytest.mark.fault("F10")
async def test_a_stop_during_an_outage_stays_within_its_timeout(
    memory_store: Store, recorder: RunRecorder, when
) -> None:
    async with FaultyStorage(memory_store.another()) as storage:
        queue = AsyncTaskQueue(storage)
        pool = queue.worker(poll_interval=0.02)
        await pool.start()
        if when != "idle":
            await queue.enqueue(sample_tasks.hold, "held")
            await until(lambda: recorder.inside == 1)
        storage.fail("reserve", "record", "renew", "give_back", "close", "read", times=None)
        recorder.open_all()
        await a_while(0.3)
        began = time.monotonic()
        with suppress(ShutdownTimeout):
            await pool.stop(timeout=0.2)
        assert time.monotonic() - began < at_most(1.4)
        storage.heal()


async def test_a_stop_of_an_idle_pool_during_an_outage_needs_no_timeout(
    memory_store: Store,
) -> None:
    async with FaultyStorage(memory_store.another()) as storage:
        pool = AsyncWorkerPool(storage, poll_interval=0.02)
        await pool.start()
        storage.fail("reserve", "renew", "give_back", "close", "read", times=None)
        await until(lambda: storage.calls["reserve"] > 4)
        began = time.monotonic()
        await pool.stop()
        assert time.monotonic() - began < at_most(1.0)
        storage.heal()


async def test_a_storage_that_does_not_answer_cannot_hold_up_the_stop(
    memory_store: Store, recorder: RunRecorder
) -> None:
    async with FaultyStorage(memory_store.another()) as storage:
        queue = AsyncTaskQueue(storage)
        pool = queue.worker()
        await pool.start()
        await queue.enqueue(sample_tasks.hold, "held")
        await until(lambda: recorder.inside == 1)
        storage.delay("record", "renew", "close", seconds=60, times=None)
        recorder.open_all()
        began = time.monotonic()
        with pytest.raises(ShutdownTimeout):
            await pool.stop(timeout=0.1)
        assert time.monotonic() - began < at_most(2.5)
        storage.heal()


@pytest.mark.fault("F32")
async def test_outcomes_that_could_not_be_recorded_are_held_until_the_storage_is_reachable(
    memory_store: Store, recorder: RunRecorder
) -> None:
    async with FaultyStorage(memory_store.another()) as storage:
        queue = AsyncTaskQueue(storage)
        pool = queue.worker()
        await pool.start()
        handle = await queue.enqueue(sample_tasks.hold, "held")
        await until(lambda: recorder.inside == 1)
        storage.fail("record", times=4)
        recorder.open_all()
        await pool.stop()

        assert await handle.status() is TaskStatus.SUCCESS
        assert recorder.names() == ["held"]


async def test_a_stop_without_a_timeout_stops_waiting_for_the_storage_when_the_lease_has_expired(
    memory_store: Store, recorder: RunRecorder
) -> None:
    async with FaultyStorage(memory_store.another()) as storage:
        queue = AsyncTaskQueue(storage)
        pool = queue.worker(lease=0.5)
        await pool.start()
        handle = await queue.enqueue(sample_tasks.hold, "held")
        await until(lambda: recorder.inside == 1)
        storage.fail("record", "reserve", "renew", "give_back", times=None)
        recorder.open_all()
        await pool.stop()
        storage.heal()

        assert pool.stats().stale_outcomes == 1
        assert await is_unharmed(storage, handle.id)


async def test_leaving_the_block_by_an_error_does_not_wait_for_running_tasks(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    handle = await queue.enqueue(sample_tasks.hold, "held")

    async def leave_by_an_error() -> None:
        async with queue.worker():
            await until(lambda: recorder.inside == 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await leave_by_an_error()

    assert await is_unharmed(queue.storage, handle.id)


def test_an_event_loop_that_ends_under_the_pool_uses_no_attempt(
    store: Store, recorder: RunRecorder
) -> None:
    async def forget_to_stop() -> str:
        async with AsyncTaskQueue(store.another()) as queue:
            handle = await queue.enqueue(sample_tasks.hold, "held")
        await AsyncWorkerPool(store.another()).start()
        await until(lambda: recorder.inside == 1)
        return handle.id

    async def check(task_id: str) -> bool:
        async with store.another() as storage:
            return await is_unharmed(storage, task_id)

    assert asyncio.run(check(asyncio.run(forget_to_stop())))


async def test_a_failing_step_of_the_stop_is_reported_and_the_others_are_done(store: Store) -> None:
    storage = FaultyStorage(store.another())
    pool = AsyncWorkerPool(storage)
    emitted: list[WorkerProblem] = []
    pool.events.subscribe(
        lambda event: emitted.append(event) if isinstance(event, WorkerProblem) else None
    )
    await pool.start()
    storage.fail("close", error=ZeroDivisionError("a bug"))
    await pool.stop()

    assert [event.activity for event in emitted] == ["retire"]
    assert not storage.is_open


async def test_a_start_that_fails_after_its_caller_was_cancelled_logs_no_unretrieved_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Gone(MemoryStorage):
        async def open(self) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise StorageError("cut off") from None

    starting = asyncio.create_task(AsyncWorkerPool(Gone()).start())
    await a_while(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    del starting
    gc.collect()

    assert caplog.messages == []
