"""Hostile tasks: exactly the attempt that misbehaves fails, and all others continue (F75 to F79)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from omniq import (
    AsyncTaskQueue,
    Settings,
    TaskError,
    TaskFailed,
    TaskResult,
    TaskStatus,
    WorkerPool,
)
from omniq.models import MAX_TEXT, MAX_TRACEBACK
from omniq.serialization import CloudpickleSerializer
from omniq.storage.memory import MemoryStorage
from omniq.tasks.functions import path_of
from tests.timing import at_most
from tests.worker import hostile_tasks as tasks
from tests.worker.recorder import until

PLACES = {
    "async": (tasks.in_the_loop, tasks.good_in_the_loop),
    "thread": (tasks.in_a_thread, tasks.good_in_a_thread),
    "process": (tasks.in_a_process, tasks.good_in_a_process),
    "async in a process": (tasks.in_the_loop_of_a_process, tasks.good_in_a_process),
}


async def results_of(queue: AsyncTaskQueue, func: Any, kinds: list[str]) -> dict[str, TaskResult]:
    handles = {kind: await queue.enqueue(func, kind) for kind in kinds}
    results = {
        kind: await queue.get_result(handle.id, timeout=20) for kind, handle in handles.items()
    }
    return {kind: result for kind, result in results.items() if result is not None}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("place", PLACES)
async def test_arguments_that_the_function_no_longer_takes_are_an_error_without_omniqs_frames(
    memory_queue, place
):
    """A path is enqueued unchecked, like a task whose function was changed while it waited."""
    _, good = PLACES[place]
    async with memory_queue.worker(concurrency=1):
        calls = memory_queue.options(max_retries=0)
        handle = await calls.enqueue(path_of(good), 1, 2, 3, 4, 5)
        result = await memory_queue.get_result(handle.id, timeout=20)

    error = error_of(result)
    assert error.error_type == "TypeError"
    assert f"{good.__name__}() takes 1 positional argument but 5 were given" in error.message
    assert error.traceback == ""
    assert "was it changed while the task waited?" in (error.recovery_hint or "")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.fault("F75", "F76")
@pytest.mark.deep_on("async in a process")
async def test_an_exception_of_any_type_fails_only_the_attempt_that_raised_it(memory_queue, place):
    bad, good = PLACES[place]
    async with memory_queue.worker(concurrency=4) as pool:
        siblings = [await memory_queue.enqueue(good, number) for number in range(20)]
        results = await results_of(memory_queue, bad, list(tasks.RAISES))
        values = [await handle.result(timeout=20) for handle in siblings]
        still = await (await memory_queue.enqueue(good, 99)).result(timeout=20)

    assert [*values, still] == [*range(20), 99]
    assert {kind: error_of(result).error_type for kind, result in results.items()} == {
        kind: kind for kind in tasks.RAISES
    }
    assert {result.status for result in results.values()} == {TaskStatus.FAILED}
    assert {result.attempts for result in results.values()} == {1}
    assert pool.stats().failed_tasks == len(tasks.RAISES)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.fault("F77")
@pytest.mark.deep_on("async in a process")
async def test_an_error_is_stored_as_bounded_text(memory_queue, place):
    bad, _ = PLACES[place]
    kinds = [
        "OverflowError",
        "RecursionError",
        "UnicodeError",
        "BadText",
        "TaskError",
        "ValueError",
    ]
    async with memory_queue.worker(concurrency=2):
        results = await results_of(memory_queue, bad, kinds)

    errors = {kind: error_of(result) for kind, result in results.items()}
    assert max(len(error.message) for error in errors.values()) < MAX_TEXT + 100
    assert max(len(error.traceback) for error in errors.values()) < MAX_TRACEBACK + 100
    assert errors["UnicodeError"].message == "\\udcff\0"
    assert errors["BadText"].message == "(the exception's text cannot be shown)"
    assert "direct cause" in errors["ValueError"].traceback
    assert "hostile_tasks.py" in errors["RecursionError"].traceback


@pytest.mark.timeout(120)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.fault("F71")
@pytest.mark.deep_on("async in a process")
async def test_a_result_that_cannot_be_encoded_in_a_child_fails_permanently_and_is_not_run_again(
    memory_queue, place
):
    bad, _ = PLACES[place]
    kinds = list(tasks.RETURNS)
    async with memory_queue.worker(concurrency=4):
        results = await results_of(memory_queue, bad, kinds)
        reasons = {letter.failure_reason for letter in await memory_queue.dead.list()}

    assert {result.status for result in results.values()} == {TaskStatus.FAILED}
    assert {error_of(result).error_type for result in results.values()} == {"SerializationError"}
    assert reasons == {"unserialisable"}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("place", PLACES)
async def test_pickles_reach_a_child_if_enabled_and_one_that_raises_fails_one_task(place):
    bad, _ = PLACES[place]
    key = "k" * 32
    storage = MemoryStorage(
        serializer=CloudpickleSerializer(key),
        settings=Settings(serializer="cloudpickle", signing_key=key),
    )
    async with AsyncTaskQueue(storage) as queue, queue.worker(concurrency=2):
        results = await results_of(queue, bad, ["an object", "a generator"])

    assert results["an object"].status is TaskStatus.SUCCESS
    assert results["a generator"].status is TaskStatus.FAILED


@pytest.mark.fault("F72")
async def test_a_callable_that_returns_a_coroutine_is_awaited_on_the_loop(memory_queue):
    async with memory_queue.worker():
        handle = await memory_queue.enqueue(tasks.returns_a_coroutine)
        thread, task_id = await handle.result(timeout=30)

    assert (thread, task_id) == ("MainThread", handle.id)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("func", "thread"),
    [
        (tasks.blocks_the_loop_on_purpose, "MainThread"),
        (tasks.has_a_loop_in_a_thread, "omniq-task"),
        (tasks.has_a_loop_in_a_process, "MainThread"),
    ],
)
async def test_a_function_runs_in_its_executor(memory_queue, func, thread):
    async with memory_queue.worker():
        handle = await memory_queue.enqueue(func)

        assert await handle.result(timeout=15) == (thread, handle.id)


@pytest.mark.fault("F81")
def test_a_task_cannot_end_the_event_loop_of_a_blocking_pool():
    """The loop of an embedded pool belongs to the application, which decides when it ends."""
    with WorkerPool(MemoryStorage(), 1, base_retry_delay=0) as pool:
        for func in (tasks.exits_in_a_subtask, tasks.stops_the_loop):
            pool.submit(func)
        asyncio.run(until(lambda: pool.stats().completed_tasks == 1))
        asyncio.run(until(lambda: pool.stats().failed_tasks == 1))


async def test_a_task_that_cancels_itself_has_failed(memory_queue):
    async with memory_queue.worker():
        handle = await memory_queue.options(max_retries=0).enqueue(tasks.cancels_itself)
        with pytest.raises(TaskFailed, match="CancelledError"):
            await handle.result(timeout=30)

        assert await (await memory_queue.enqueue(tasks.good_in_the_loop, 1)).result(timeout=30) == 1


IGNORE_CANCELLATION = [tasks.swallows_every_cancel, tasks.cleans_up_for_ever, tasks.shields_itself]


@pytest.mark.parametrize("func", IGNORE_CANCELLATION)
@pytest.mark.fault("F79")
async def test_a_task_that_ignores_its_timeout_is_cancelled_twice_and_then_abandoned(
    memory_queue, func
):
    before = asyncio.all_tasks()
    async with memory_queue.worker(concurrency=1):
        handle = await memory_queue.options(timeout=0.05, max_retries=0).enqueue(func)
        after = await memory_queue.enqueue(tasks.good_in_the_loop, 1)
        with pytest.raises(TaskFailed, match="TaskTimeout"):
            await handle.result(timeout=30)
        assert await after.result(timeout=30) == 1

    # It has really ended: `asyncio.run` would wait for it otherwise.
    await asyncio.wait_for(asyncio.gather(*ours(before), return_exceptions=True), at_most(1.0))


@pytest.mark.parametrize("func", IGNORE_CANCELLATION)
@pytest.mark.fault("F79")
async def test_a_pool_stops_in_time_while_a_task_ignores_its_cancellation(memory_queue, func):
    before = asyncio.all_tasks()
    pool = memory_queue.worker(concurrency=1)
    await pool.start()
    handle = await memory_queue.enqueue(func)
    await until(lambda: pool.stats().active_workers == 1)

    await asyncio.wait_for(pool.stop(cancel_in_flight=True), at_most(4.0))

    task = await memory_queue.get_task(handle.id)
    assert (task.status, task.attempts) == (TaskStatus.PENDING, 0)
    await asyncio.wait_for(asyncio.gather(*ours(before), return_exceptions=True), at_most(1.0))


async def test_what_a_task_returns_after_it_was_stopped_counts(memory_queue):
    async with memory_queue.worker():
        handle = await memory_queue.options(timeout=0.05).enqueue(tasks.returns_when_cancelled)

        assert await handle.result(timeout=30) == "partial"


@pytest.mark.parametrize(
    "path",
    [
        "os.system",
        "tests.worker.hostile_tasks.OwnBase",
        "tests.worker.hostile_tasks.numbers",
        "tests.worker.hostile_tasks.nothing_there",
        "tests.worker.hostile_tasks.__getattr__",
    ],
)
async def test_a_path_that_must_not_run_is_not_run_and_holds_up_nothing(memory_queue, path):
    refused = await memory_queue.enqueue(path)
    async with memory_queue.worker():
        handle = await memory_queue.enqueue(tasks.good_in_the_loop, 1)
        await handle.result(timeout=30)
        task = await memory_queue.get_task(refused.id)

    assert (task.status, task.attempts) == (TaskStatus.PENDING, 0)


def error_of(result: TaskResult) -> TaskError:
    assert result.error is not None
    return result.error


def ours(before: set[asyncio.Task[Any]]) -> set[asyncio.Task[Any]]:
    """The tasks that this test has started. Shielded code is a separate task that the user must end."""
    return {task for task in asyncio.all_tasks() - before if "sleep" not in repr(task.get_coro())}
