"""A function with @batched gets several tasks in one call, and each of them has an outcome of its own."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from omniq import (
    AsyncTaskQueue,
    InvalidTask,
    OmniqError,
    SerializationError,
    Settings,
    Task,
    TaskCancelled,
    TaskContext,
    TaskError,
    TaskStatus,
    batched,
    current_task,
    events,
    task,
)
from omniq.storage.base import BaseStorage
from omniq.storage.memory import MemoryStorage
from omniq.tasks.flow import Flow
from omniq.testing.clock import ManualClock
from omniq.testing.manual import AsyncManualQueue, ManualQueue
from tests.worker import batch_tasks
from tests.worker.batch_tasks import ENDS, Doc, sizes
from tests.worker.conftest import Store
from tests.worker.recorder import RECORDER, RunRecorder, until


async def drain(queue: AsyncTaskQueue, **options: Any) -> None:
    async with queue.worker(**{"concurrency": 1, **options}) as pool:
        await pool.run_until_empty()


async def get(queue: AsyncTaskQueue, task_id: str) -> Task:
    found = await queue.get_task(task_id)
    assert found is not None
    return found


async def statuses_of(queue: AsyncTaskQueue, handles: list[Any]) -> list[TaskStatus | None]:
    results = [await queue.get_result(handle.id) for handle in handles]
    return [None if result is None else result.status for result in results]


async def errors_of(queue: AsyncTaskQueue) -> dict[str, TaskError]:
    """The errors of the dead letters, by task."""
    found = {}
    for dead in await queue.dead.list():
        result = await queue.get_result(dead.task_id)
        assert result is not None
        assert result.error is not None
        found[dead.task_id] = result.error
    return found


# Outcomes


@pytest.mark.parametrize("place", list(ENDS))
async def test_each_item_of_a_call_has_its_own_outcome(
    memory_queue: AsyncTaskQueue, place: str
) -> None:
    words = ["a", "fail", "permanent", "retry", "snooze", "discard", "b"]
    handles = await memory_queue.options(max_retries=1).enqueue_many(
        ENDS[place], [(word,) for word in words]
    )
    await drain(memory_queue)

    by_word = dict(zip(words, handles, strict=True))
    assert [await by_word[word].result() for word in "ab"] == ["A", "B"]
    fail, retry, snooze = [
        await get(memory_queue, by_word[word].id) for word in ("fail", "retry", "snooze")
    ]
    assert (fail.status, fail.failures) == (TaskStatus.RETRYING, 1)
    assert (retry.status, retry.failures) == (TaskStatus.RETRYING, 1)
    assert (snooze.status, snooze.failures) == (TaskStatus.PENDING, 0)
    with pytest.raises(TaskCancelled, match="not wanted"):
        await by_word["discard"].result()
    errors = await errors_of(memory_queue)
    assert {task_id: each.message for task_id, each in errors.items()} == {
        by_word["permanent"].id: "permanent"
    }


async def test_a_worker_with_one_slot_fills_each_call(queue: AsyncTaskQueue) -> None:
    handles = await queue.enqueue_many(batch_tasks.store, [(number,) for number in range(25)])
    await drain(queue)

    assert sizes("store") == [10, 10, 5]
    assert await statuses_of(queue, handles) == [TaskStatus.SUCCESS] * 25


async def test_no_call_gets_more_than_size_items_whatever_runs_beside_it(
    queue: AsyncTaskQueue,
) -> None:
    for number in range(60):
        await queue.enqueue(batch_tasks.store if number % 2 else batch_tasks.plain, number)
    await drain(queue, concurrency=7)

    assert sum(sizes("store")) == 30
    assert max(sizes("store")) <= 10
    assert RECORDER.names().count("plain") == 30


async def test_when_the_function_raises_all_items_fail_and_the_spoilt_one_is_soon_alone() -> None:
    async with AsyncManualQueue() as queue:
        handles = await queue.enqueue_many(batch_tasks.spoilt, [(number,) for number in range(50)])
        await queue.run_for(hours=1)

        (dead,) = await queue.dead.list()
        assert (dead.task_id, dead.attempt_count) == (handles[13].id, 4)
        others = [*handles[:13], *handles[14:]]
        assert [await handle.result() for handle in others] == [*range(13), *range(14, 50)]
    # 50 failed together; then one call of ten did, and then the item alone, twice.
    assert sizes("spoilt")[0] == 50
    assert sorted(sizes("spoilt")[1:6]) == [10] * 5
    assert sizes("spoilt")[6:] == [1] * 11


@pytest.mark.parametrize("func", [batch_tasks.too_few, batch_tasks.no_list])
async def test_without_an_outcome_for_each_item_all_are_dead_letters(
    memory_queue: AsyncTaskQueue, func: Any
) -> None:
    await memory_queue.enqueue_many(func, [(1,), (2,), (3,)])
    await drain(memory_queue)

    errors = list((await errors_of(memory_queue)).values())
    assert [each.error_type for each in errors] == ["WrongOutcomes"] * 3
    assert "3 items" in errors[0].message
    # An exception that several runs raise collects no frames.
    assert len({each.traceback for each in errors}) == 1


@pytest.mark.parametrize(
    "func",
    [
        batch_tasks.count_words,
        pytest.param(batch_tasks.count_words_in_process, marks=pytest.mark.deep),
    ],
)
async def test_items_and_values_have_the_annotated_types(
    memory_queue: AsyncTaskQueue, func: Any
) -> None:
    handles = [await memory_queue.enqueue(func, Doc(key, 1)) for key in "ab"]
    await drain(memory_queue)

    assert [await handle.result() for handle in handles] == [Doc("a", 2), Doc("b", 2)]
    with pytest.raises(SerializationError, match="docs"):
        await memory_queue.enqueue(batch_tasks.count_words, 3)  # type: ignore[call-overload]


async def test_an_item_that_does_not_fit_fails_alone(memory_queue: AsyncTaskQueue) -> None:
    path = "tests.worker.batch_tasks.count_words"
    wrong = await memory_queue.enqueue(path, 3)
    none = await memory_queue.enqueue(path)
    right = await memory_queue.enqueue(batch_tasks.count_words, Doc("a"))
    await drain(memory_queue)

    assert await right.result() == Doc("a", 1)
    errors = await errors_of(memory_queue)
    assert {task_id: each.error_type for task_id, each in errors.items()} == {
        wrong.id: "SerializationError",
        none.id: "WrongSignature",
    }


@pytest.mark.deep
async def test_a_process_runs_the_items_of_a_call_together(memory_queue: AsyncTaskQueue) -> None:
    handles = await memory_queue.enqueue_many(batch_tasks.process_ids, [(n,) for n in range(6)])
    await drain(memory_queue)

    results = [await handle.result() for handle in handles]
    assert len({pid for pid, _ in results}) == 1
    assert [count for _, count in results] == [6] * 6


@pytest.mark.deep
async def test_when_the_process_dies_each_item_has_failed_once(
    memory_queue: AsyncTaskQueue,
) -> None:
    handles = await memory_queue.enqueue_many(batch_tasks.die_in_process, [(12,), (13,), (14,)])
    await drain(memory_queue)

    tasks = [await get(memory_queue, handle.id) for handle in handles]
    assert [(each.status, each.failures) for each in tasks] == [(TaskStatus.RETRYING, 1)] * 3


async def test_a_function_without_annotations_takes_any_items(memory_queue: AsyncTaskQueue) -> None:
    handles = [await memory_queue.enqueue(batch_tasks.untyped, item) for item in (1, "b", None)]
    await drain(memory_queue)

    assert [await handle.result() for handle in handles] == [1, "b", None]


# Waiting to be full


async def test_a_batch_waits_until_it_is_full() -> None:
    clock = ManualClock()
    async with (
        AsyncTaskQueue(MemoryStorage(clock=clock)) as queue,
        queue.worker(concurrency=2) as pool,
    ):
        first = [await queue.enqueue(batch_tasks.gather, number) for number in (1, 2)]
        await until(lambda: pool.stats().active_workers == 2)
        assert sizes("gather") == []
        third = await queue.enqueue(batch_tasks.gather, 3)

        assert [await handle.result(30) for handle in [*first, third]] == [1, 2, 3]
        assert sizes("gather") == [3]


async def test_a_batch_waits_no_longer_than_it_may() -> None:
    clock = ManualClock()
    async with (
        AsyncTaskQueue(MemoryStorage(clock=clock)) as queue,
        queue.worker(concurrency=1, lease=1e6) as pool,
    ):
        handle = await queue.enqueue(batch_tasks.gather, 1)
        await until(lambda: pool.stats().active_workers == 1)
        # The task of the batch begins to wait in the next turn of the event loop.
        await asyncio.sleep(0.01)
        for _ in range(10):
            clock.advance(2.9)
            await asyncio.sleep(0.01)
        assert sizes("gather") == []
        clock.advance(2)

        assert await handle.result(30) == 1


async def test_a_worker_with_one_slot_finds_what_comes_while_a_batch_waits() -> None:
    clock = ManualClock()
    async with (
        AsyncTaskQueue(MemoryStorage(clock=clock)) as queue,
        queue.worker(concurrency=1, lease=1e6) as pool,
    ):
        first = await queue.enqueue(batch_tasks.gather, 1)
        await until(lambda: pool.stats().active_workers == 1)
        others = [await queue.enqueue(batch_tasks.gather, number) for number in (2, 3)]

        async def advance() -> None:
            while not sizes("gather"):
                clock.advance(0.5)
                await asyncio.sleep(0.005)

        await asyncio.wait_for(advance(), 30)
        assert [await handle.result(30) for handle in [first, *others]] == [1, 2, 3]
        assert sizes("gather") == [3]


async def test_other_tasks_run_while_a_batch_waits(memory_queue: AsyncTaskQueue) -> None:
    async with memory_queue.worker(concurrency=2):
        await memory_queue.enqueue(batch_tasks.gather, 1)
        handles = [await memory_queue.enqueue(batch_tasks.plain, number) for number in range(20)]

        assert [await handle.result(30) for handle in handles] == list(range(20))
        assert sizes("gather") == []


async def test_a_batch_has_one_slot(memory_queue: AsyncTaskQueue) -> None:
    async with memory_queue.worker(concurrency=2) as pool:
        await memory_queue.enqueue_many(batch_tasks.hold, [("a",)] * 25)
        await until(lambda: len(sizes("hold")) == 2)
        await asyncio.sleep(0.05)

        assert sizes("hold") == [10, 10]
        assert pool.stats().active_workers == 20
        RECORDER.gate("hold").set()
        await until(lambda: pool.stats().completed_tasks == 25)


# Stopping


async def test_a_collected_item_that_is_cancelled_never_runs(memory_queue: AsyncTaskQueue) -> None:
    async with memory_queue.worker(concurrency=2) as pool:
        first = await memory_queue.enqueue(batch_tasks.gather, 1)
        await until(lambda: pool.stats().active_workers == 1)
        await first.cancel()
        with pytest.raises(TaskCancelled):
            await first.result(30)
        handles = [await memory_queue.enqueue(batch_tasks.gather, number) for number in (2, 3, 4)]

        assert [await handle.result(30) for handle in handles] == [2, 3, 4]


async def test_a_running_item_that_is_cancelled_does_not_stop_the_others(
    memory_queue: AsyncTaskQueue,
) -> None:
    async with memory_queue.worker(concurrency=1):
        handles = await memory_queue.enqueue_many(batch_tasks.hold_contexts, [("a",), ("b",)])
        await until(lambda: sizes("hold") == [2])
        contexts: list[TaskContext] = RECORDER.facts["contexts"]
        assert [context.task_id for context in contexts] == [handle.id for handle in handles]
        await handles[0].cancel()
        await until(lambda: contexts[0].cancelled)
        assert not contexts[1].cancelled
        RECORDER.gate("hold").set()

        with pytest.raises(TaskCancelled):
            await handles[0].result(30)
        # Reading `cancelled` says that the function may have returned too early, for the first alone.
        task = await get(memory_queue, handles[1].id)
        assert await handles[1].result(30) == handles[1].id, task


@pytest.mark.parametrize("func", [batch_tasks.hold, batch_tasks.hold_thread])
async def test_when_all_items_are_cancelled_the_call_ends(
    memory_queue: AsyncTaskQueue, func: Any
) -> None:
    async with memory_queue.worker(concurrency=1):
        handles = await memory_queue.enqueue_many(func, [("a",), ("b",)])
        await until(lambda: sizes("hold") == [2])
        for handle in handles:
            await handle.cancel()
        for handle in handles:
            with pytest.raises(TaskCancelled):
                await handle.result(30)
        RECORDER.gate("hold").set()
        plain = await memory_queue.enqueue(batch_tasks.plain, 1)

        assert await plain.result(30) == 1


@pytest.mark.parametrize(
    "func", [batch_tasks.hold, batch_tasks.hold_thread, batch_tasks.never_ends]
)
async def test_a_timeout_stops_the_call_and_every_item_has_failed_once(
    memory_queue: AsyncTaskQueue, func: Any
) -> None:
    options = memory_queue.options(timeout=0.05, retry=[3600])
    handles = await options.enqueue_many(func, [("a",), ("b",)])
    async with memory_queue.worker(concurrency=1) as pool:
        await until(lambda: pool.stats().retried_runs == 2)

        for handle in handles:
            task = await get(memory_queue, handle.id)
            assert (task.status, task.failures) == (TaskStatus.RETRYING, 1)
        RECORDER.gate("hold").set()
        plain = await memory_queue.enqueue(batch_tasks.plain, 1)
        assert await plain.result(30) == 1


async def test_the_time_of_an_item_counts_from_its_call() -> None:
    clock = ManualClock()
    async with (
        AsyncTaskQueue(MemoryStorage(clock=clock)) as queue,
        queue.worker(concurrency=2, lease=1e6) as pool,
    ):
        handle = await queue.options(timeout=5).enqueue(batch_tasks.gather, 1)
        await until(lambda: pool.stats().active_workers == 1)
        for _ in range(40):
            clock.advance(1)
            await asyncio.sleep(0.002)

        assert await handle.result(30) == 1


async def test_a_stop_releases_what_is_collected_without_an_attempt(
    memory_queue: AsyncTaskQueue,
) -> None:
    async with memory_queue.worker(concurrency=1) as pool:
        handle = await memory_queue.enqueue(batch_tasks.gather, 1)
        await until(lambda: pool.stats().active_workers == 1)
        await pool.stop(timeout=30)

    task = await get(memory_queue, handle.id)
    assert (task.status, task.failures, sizes("gather")) == (TaskStatus.PENDING, 0, [])


async def test_a_stop_out_of_time_releases_every_item_of_a_running_call(
    memory_queue: AsyncTaskQueue,
) -> None:
    handles = await memory_queue.enqueue_many(batch_tasks.hold, [("a",), ("b",), ("c",)])
    async with memory_queue.worker(concurrency=1) as pool:
        await until(lambda: sizes("hold") == [3])
        await pool.stop(cancel_in_flight=True)

    tasks = [await get(memory_queue, handle.id) for handle in handles]
    assert [(each.status, each.failures) for each in tasks] == [(TaskStatus.PENDING, 0)] * 3


async def test_a_paused_worker_calls_what_it_has_collected() -> None:
    clock = ManualClock()
    async with (
        AsyncTaskQueue(MemoryStorage(clock=clock)) as queue,
        queue.worker(concurrency=1, lease=1e6) as pool,
    ):
        handle = await queue.enqueue(batch_tasks.gather, 1)
        await until(lambda: pool.stats().active_workers == 1)
        assert pool._runtime is not None
        assert pool._runtime.parts.claim_loop is not None
        pool._runtime.parts.claim_loop._demand.pause()
        for _ in range(40):
            clock.advance(1)
            await asyncio.sleep(0.002)

        assert await handle.result(30) == 1


# Around the call


async def test_middleware_runs_around_each_item_and_may_fail_one(
    memory_queue: AsyncTaskQueue,
) -> None:
    seen: dict[str, Any] = {}

    async def refuse_b(ctx: TaskContext, call_next: Any) -> None:
        assert current_task() is ctx
        if ctx.metadata.get("name") == "b":
            raise ValueError("refused")
        await asyncio.sleep(0)
        try:
            seen[ctx.task_id] = await call_next()
        except Exception as error:
            seen[ctx.task_id] = type(error)
            raise

    handles = [
        await memory_queue.options(metadata={"name": name}, max_retries=0).enqueue(
            batch_tasks.end_async, word
        )
        for name, word in (("a", "x"), ("b", "y"), ("c", "fail"))
    ]
    await drain(memory_queue, middleware=[refuse_b])

    assert await handles[0].result() == "X"
    assert sizes("end_async") == [2]
    assert seen == {handles[0].id: "X", handles[2].id: ValueError}
    errors = await errors_of(memory_queue)
    assert {task_id: each.message for task_id, each in errors.items()} == {
        handles[1].id: "refused",
        handles[2].id: "fail",
    }


async def test_resources_are_made_once_for_a_worker_and_once_for_a_call(
    memory_queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    handles = await memory_queue.enqueue_many(batch_tasks.with_resources, [(1,), (2,), (3,)])
    await drain(memory_queue)

    results = [await handle.result() for handle in handles]
    assert results == [f"client session {number}" for number in (1, 2, 3)]
    names = recorder.names()
    assert (names.count("client made"), names.count("session made")) == (1, 2)
    assert (names.count("client closed"), names.count("session closed")) == (1, 2)


@pytest.mark.parametrize(
    "func",
    [
        batch_tasks.with_resources_in_thread,
        pytest.param(batch_tasks.with_resources_in_process, marks=pytest.mark.deep),
    ],
)
async def test_functions_of_threads_and_processes_get_their_resources(
    memory_queue: AsyncTaskQueue, func: Any
) -> None:
    handles = await memory_queue.enqueue_many(func, [(1,), (2,)])
    await drain(memory_queue)

    assert [await handle.result() for handle in handles] == ["client 1", "client 2"]


async def test_a_resource_with_the_context_of_one_task_is_refused(
    memory_queue: AsyncTaskQueue,
) -> None:
    await memory_queue.enqueue(batch_tasks.with_resource_of_a_run, 1)
    await drain(memory_queue)

    (error,) = (await errors_of(memory_queue)).values()
    assert error.error_type == "InvalidTask"
    assert "list[TaskContext]" in error.message


async def test_each_item_has_its_events_and_is_the_current_task_of_its_listener(
    memory_queue: AsyncTaskQueue,
) -> None:
    started, ended = [], []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.TaskStarted):
            started.append((event.id, current_task().task_id))
        elif isinstance(event, events.TaskSucceeded | events.TaskFailure):
            ended.append((event.id, type(event)))

    handles = await memory_queue.options(max_retries=0).enqueue_many(
        batch_tasks.end_async, [("a",), ("fail",)]
    )
    async with memory_queue.worker(concurrency=1) as pool:
        pool.events.subscribe(listen)
        await pool.run_until_empty()

    assert started == [(handle.id, handle.id) for handle in handles]
    assert ended == [(handles[0].id, events.TaskSucceeded), (handles[1].id, events.TaskFailure)]


async def test_a_batch_is_no_single_current_task(memory_queue: AsyncTaskQueue) -> None:
    await memory_queue.options(max_retries=0).enqueue(batch_tasks.who_runs, 1)
    await drain(memory_queue)

    (error,) = (await errors_of(memory_queue)).values()
    assert error.error_type == OmniqError.__name__
    assert "contexts" in error.message


async def test_log_lines_of_the_function_carry_the_first_item(memory_queue: AsyncTaskQueue) -> None:
    handles = await memory_queue.enqueue_many(batch_tasks.note_running, [(1,), (2,)])
    await drain(memory_queue)

    running = RECORDER.facts["running"]
    path = "tests.worker.batch_tasks.note_running"
    assert (running.task_id, running.func_path, running.attempt) == (handles[0].id, path, 1)


async def test_a_batch_cannot_stop_its_own_pool(memory_queue: AsyncTaskQueue) -> None:
    async with memory_queue.worker(concurrency=1) as pool:
        RECORDER.facts["pool"] = pool
        await memory_queue.options(max_retries=0).enqueue_many(batch_tasks.stop_pool, [(1,), (2,)])
        await until(lambda: pool.stats().failed_tasks == 2)

    errors = (await errors_of(memory_queue)).values()
    assert {error.error_type for error in errors} == {"InvalidValue"}


async def test_a_flow_maps_over_a_batched_function(memory_queue: AsyncTaskQueue) -> None:
    flow = Flow("numbers")
    numbers = flow.add("numbers", batch_tasks.numbers_up_to, 15)
    flow.map("double", batch_tasks.as_text, numbers)
    handle = await memory_queue.start(flow)
    await drain(memory_queue)

    assert await handle.result(30) == [str(number) for number in range(15)]


async def test_older_arguments_are_changed_and_newer_ones_are_left(
    memory_queue: AsyncTaskQueue,
) -> None:
    old = await memory_queue.options(version=1).enqueue(batch_tasks.newer, "a")
    now = await memory_queue.enqueue(batch_tasks.newer, "b")
    await drain(memory_queue)

    assert [await old.result(), await now.result()] == ["a", "b"]
    assert sizes("newer") == [2]


# In tests of an application


async def test_a_manual_queue_calls_a_batch_that_is_not_full_and_lets_no_time_pass() -> None:
    async with AsyncManualQueue() as queue:
        began = queue.clock.now()
        await queue.enqueue_many(batch_tasks.gather, [(1,), (2,)])
        await queue.run()

        assert sizes("gather") == [2]
        assert queue.clock.now() - began < timedelta(seconds=1)


def test_a_blocking_manual_queue_does_so_too() -> None:
    with ManualQueue() as queue:
        handle = queue.enqueue(batch_tasks.gather, 1)
        queue.run()

        assert handle.result() == 1


async def test_items_of_a_killed_worker_run_again() -> None:
    async with AsyncManualQueue() as queue:
        handles = await queue.enqueue_many(batch_tasks.store, [(number,) for number in range(5)])
        queue.kill_at("record")
        await queue.run()
        await queue.run_for(minutes=5)

        assert await statuses_of(queue, handles) == [TaskStatus.SUCCESS] * 5
        assert sum(sizes("store")) == 10


async def test_called_directly_it_takes_one_item() -> None:
    assert await batch_tasks.end_async("a") == "A"
    assert batch_tasks.end_thread("b") == "B"
    await batch_tasks.store(1)
    assert sizes("store") == [1]
    with pytest.raises(ValueError, match="fail"):
        await batch_tasks.end_async("fail")


# Bad input


async def none(items: list[int]) -> None: ...
def with_contexts(contexts: list[TaskContext], items: list[int]) -> None: ...


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size 0"),
        ({"size": -1}, "size -1"),
        ({"size": 1.5}, "whole number"),
        ({"size": True}, "whole number"),
        ({"size": 1_001}, "at most 1,000"),
        ({"size": 10, "wait": -1}, "wait"),
        ({"size": 10, "wait": float("nan")}, "wait"),
        ({"size": 10, "wait": float("inf")}, "wait"),
        ({"size": 10, "wait": "1"}, "wait"),
    ],
)
def test_a_size_or_wait_that_cannot_be_is_refused(options: Any, message: str) -> None:
    with pytest.raises(InvalidTask, match=message):
        batched(**options)(none)


def test_a_function_that_takes_no_list_is_refused() -> None:
    def nothing() -> None: ...
    def named(*, items: list[int]) -> None: ...
    def contexts(contexts: list[TaskContext]) -> None: ...
    def one(item: int) -> None: ...
    def two(items: list[int], other: int) -> None: ...

    for func in (nothing, named, contexts):
        with pytest.raises(InvalidTask, match="takes no list of items"):
            batched(size=2)(func)  # type: ignore[arg-type]
    with pytest.raises(InvalidTask, match="annotate it as list"):
        batched(size=2)(one)  # type: ignore[arg-type]
    with pytest.raises(InvalidTask, match="parameter other"):
        batched(size=2)(two)
    with pytest.raises(InvalidTask, match="not int"):
        batched(size=2)(3)  # type: ignore[call-overload]
    with pytest.raises(InvalidTask, match="below @task"):
        batched(size=2)(task(none))


def test_contexts_in_a_child_process_are_refused() -> None:
    with pytest.raises(InvalidTask, match="child process"):
        task(executor="process")(batched(size=2)(with_contexts))


async def test_a_task_takes_one_item(memory_queue: AsyncTaskQueue) -> None:
    enqueue: Any = memory_queue.enqueue
    for args, kwargs in (((), {}), ((1, 2), {}), ((), {"numbers": 1})):
        with pytest.raises(InvalidTask):
            await enqueue(batch_tasks.store, *args, **kwargs)


# On every storage


async def test_all_items_end_on_every_storage(storage: BaseStorage, store: Store) -> None:
    queue = AsyncTaskQueue(storage)
    words = ["a", "permanent", "discard"] * 8
    handles = await queue.enqueue_many(batch_tasks.end_async, [(word,) for word in words])
    await drain(queue, concurrency=20)

    assert max(sizes("end_async")) <= 10
    assert sum(sizes("end_async")) == 24
    assert (
        await statuses_of(queue, handles)
        == [TaskStatus.SUCCESS, TaskStatus.FAILED, TaskStatus.CANCELLED] * 8
    )


async def test_the_settings_of_a_worker_hold_for_items() -> None:
    async with AsyncTaskQueue(MemoryStorage(settings=Settings(default_timeout=0.05))) as queue:
        await queue.options(retry=[3600]).enqueue(batch_tasks.hold, "a")
        async with queue.worker(concurrency=1) as pool:
            await until(lambda: pool.stats().retried_runs == 1)
