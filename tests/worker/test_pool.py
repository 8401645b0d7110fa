"""A running pool: it claims, fills its slots, and survives failures of its storage and its tasks."""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import omniq.worker
from omniq import (
    AsyncTaskQueue,
    AsyncWorkerPool,
    InvalidValue,
    PoolStopped,
    QueueFull,
    Settings,
    StorageClosed,
    Task,
    TaskCancelled,
    TaskFailed,
    TaskStatus,
    WorkerPool,
    task,
)
from omniq.events import Event, PollEmpty, WorkerProblem
from omniq.outcomes import Outcome, Succeeded
from omniq.storage import BaseStorage
from omniq.storage.memory import MemoryStorage
from omniq.testing.faults import FaultyStorage
from tests.timing import at_most
from tests.worker import sample_tasks
from tests.worker.conftest import Store
from tests.worker.recorder import RECORDER, RunRecorder, a_while, until

SRC = Path(omniq.worker.__file__).parent
MODULES = [path.stem for path in sorted(SRC.glob("[a-z]*.py"))]


def failures_of(pool: AsyncWorkerPool) -> list[WorkerProblem]:
    failures: list[WorkerProblem] = []
    pool.events.subscribe(
        lambda event: failures.append(event) if isinstance(event, WorkerProblem) else None
    )
    return failures


# Structure


def test_both_pools_are_exported_by_worker_and_have_the_documented_parameters():
    assert omniq.worker.AsyncWorkerPool is AsyncWorkerPool
    assert omniq.worker.WorkerPool is WorkerPool
    for pool in (AsyncWorkerPool, WorkerPool):
        parameters = list(inspect.signature(pool).parameters.values())[:4]
        assert [parameter.name for parameter in parameters] == [
            "storage",
            "concurrency",
            "poll_interval",
            "base_retry_delay",
        ]
        assert [parameter.default for parameter in parameters[1:]] == [1, 1.0, 1.0]


@pytest.mark.parametrize("module", MODULES)
def test_the_pool_imports_the_storage_contract_and_no_backend(module):
    tree = ast.parse((SRC / f"{module}.py").read_text())
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}

    of_storage = {name for name in imported if name.startswith("omniq.storage")}
    assert of_storage <= {
        "omniq.storage.base",
        "omniq.operations.health",
        "omniq.storage.claim_register",
        "omniq.storage.run_counts",
        "omniq.storage.types",
    }


@pytest.mark.parametrize("module", MODULES)
def test_no_function_of_the_pool_is_longer_than_45_lines(module):
    tree = ast.parse((SRC / f"{module}.py").read_text())
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = {
        node.name: size
        for node in functions
        if (size := (node.end_lineno or 0) - node.lineno + 1) > 45
    }

    assert long == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrency": 0},
        {"concurrency": 1.5},
        {"poll_interval": 0},
        {"poll_interval": float("nan")},
        {"base_retry_delay": -1},
        {"lease": 0},
        {"queues": [""]},
    ],
)
@pytest.mark.fault("F26")
def test_an_invalid_value_is_refused(wrong):
    with pytest.raises(InvalidValue):
        AsyncWorkerPool(MemoryStorage(), **wrong)


async def test_start_returns_while_the_pool_runs(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    pool = queue.worker()
    running = [pool.running]
    await queue.enqueue(sample_tasks.hold, "held")

    await pool.start()
    running.append(pool.running)
    await until(lambda: recorder.inside == 1)
    with pytest.raises(InvalidValue, match="already running"):
        await pool.start()
    recorder.open_all()
    await pool.stop()
    assert [*running, pool.running] == [False, True, False]


async def test_a_pool_that_was_stopped_may_be_started_again(store: Store) -> None:
    pool = AsyncWorkerPool(store.another())
    for value in range(3):
        await pool.start()
        task_id = await pool.submit(sample_tasks.add, value)
        result = await pool._storage.wait_for_result(task_id, 5)
        assert result is not None
        assert result.result == value
        await pool.stop()

    assert pool.stats().completed_tasks == 3


async def test_two_pools_on_one_queue_do_not_disturb_each_other(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    """They are one owner to the storage, and one must not release what the other runs."""
    async with queue.worker(queues=["a"], lease=1.5) as first:
        async with queue.worker(queues=["b"], lease=1.5):
            here = await queue.options(queue="a").enqueue(sample_tasks.hold, "here")
            there = await queue.options(queue="b").enqueue(sample_tasks.hold, "there")
            await until(lambda: recorder.inside == 2)
            await a_while(1.6)
            recorder.gate("there").set()
            assert await there.result(30) == "there"
        assert first.running
        recorder.gate("here").set()
        assert await here.result(30) == "here"

    assert sorted(recorder.names()) == ["here", "there"]


async def test_the_queue_gives_its_settings_to_its_pools():
    settings = Settings(concurrency=7, poll_interval=0.5, base_retry_delay=2.0, lease=9.0)
    async with AsyncTaskQueue("memory://", settings=settings) as queue:
        assert queue.worker().stats().workers_count == 7
        assert queue.worker(concurrency=2).stats().workers_count == 2


# Claiming


async def test_the_store_never_shows_more_claims_than_slots(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    recorder.facts["storage"] = queue.storage
    handles = await queue.enqueue_many(count_claims, [()] * 100)
    await queue.worker(concurrency=5).run_until_empty()

    claims = [await handle.result(30) for handle in handles]
    assert max(claims) <= 5


@task
async def count_claims() -> int:
    storage: BaseStorage = RECORDER.facts["storage"]
    await asyncio.sleep(0)
    return len(await storage.held_by(storage.owner))


async def test_all_free_slots_are_filled_by_one_claim(store: Store, recorder: RunRecorder) -> None:
    async with FaultyStorage(store.another()) as storage:
        queue = AsyncTaskQueue(storage)
        await queue.enqueue_many(sample_tasks.hold, [("first",)] * 8 + [("second",)] * 8)
        async with queue.worker(concurrency=8, poll_interval=60):
            await until(lambda: recorder.inside == 8)
            assert storage.calls["reserve"] == 1
            recorder.gate("first").set()
            await until(lambda: recorder.names().count("second") == 8)
            recorder.open_all()


async def test_a_new_task_takes_a_free_slot_at_once_beside_a_long_one(
    memory_queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    queue = memory_queue
    async with queue.worker(concurrency=2, poll_interval=60):
        await queue.enqueue(sample_tasks.hold, "long")
        await until(lambda: recorder.inside == 1)
        for n in range(10):
            enqueued = time.monotonic()
            await (await queue.enqueue(sample_tasks.note, f"short {n}")).result(30)
            assert recorder.times(f"short {n}")[0] - enqueued < at_most(0.05)
        recorder.open_all()


async def test_a_new_task_takes_a_free_slot_on_every_backend(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    async with queue.worker(concurrency=2, poll_interval=60):
        await queue.enqueue(sample_tasks.hold, "long")
        await until(lambda: recorder.inside == 1)
        for n in range(5):
            assert await (await queue.enqueue(sample_tasks.add, n)).result(30) == n
        recorder.open_all()


async def test_a_task_enqueued_elsewhere_is_found_by_polling(store: Store) -> None:
    async with (
        AsyncTaskQueue(store.another()) as here,
        AsyncTaskQueue(store.another()) as elsewhere,
        here.worker(poll_interval=0.05),
    ):
        handle = await elsewhere.enqueue(sample_tasks.add, 1, 2)
        assert await handle.result(30) == 3


async def test_a_delayed_task_starts_when_it_is_due_and_not_a_poll_later(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    async with queue.worker(poll_interval=60):
        await until(lambda: True)
        due = time.monotonic() + 0.2
        handle = await queue.options(delay=0.2).enqueue(sample_tasks.note, "delayed")
        await handle.result(30)

    assert -0.001 <= recorder.times("delayed")[0] - due < at_most(0.15)


async def test_a_completion_is_recorded_without_another_poll() -> None:
    async with FaultyStorage(MemoryStorage()) as storage:
        queue = AsyncTaskQueue(storage)
        handle = await queue.enqueue(sample_tasks.add, 1)
        async with queue.worker(concurrency=2, poll_interval=60):
            await handle.result(30)
            await until(lambda: storage.calls["record"] == 1)
            assert storage.calls["reserve"] == 1


async def test_after_an_empty_claim_the_next_one_waits_for_the_poll_interval(
    memory_queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    """Also when a finished task led to that claim, shortly before the next poll was due."""
    polls: list[float] = []
    pool = memory_queue.worker(poll_interval=0.2)
    pool.events.subscribe(
        lambda event: polls.append(time.monotonic()) if isinstance(event, PollEmpty) else None
    )
    await memory_queue.enqueue(sample_tasks.hold, "held")
    async with pool:
        await until(lambda: recorder.inside == 1)
        await a_while(0.15)
        recorder.open_all()
        await until(lambda: len(polls) >= 3)

    assert min(later - earlier for earlier, later in pairwise(polls)) > 0.19


async def test_a_due_task_that_waits_for_a_slot_does_not_make_the_listener_spin(
    recorder: RunRecorder,
) -> None:
    class Counting(MemoryStorage):
        waits = 0

        async def wait_for_work(self, timeout: float) -> None:
            self.waits += 1
            await super().wait_for_work(timeout)

    async with Counting() as storage:
        queue = AsyncTaskQueue(storage)
        async with queue.worker():
            await queue.enqueue(sample_tasks.hold, "held")
            await until(lambda: recorder.inside == 1)
            waiting = await queue.options(delay=0.01).enqueue(sample_tasks.add, 1)
            await a_while(0.2)
            assert storage.waits < 20
            recorder.open_all()
            assert await waiting.result(30) == 1


async def test_tasks_at_a_limit_follow_each_other_without_a_poll(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    handles = await queue.enqueue_many(sample_tasks.one_at_a_time, [f"{n}" for n in range(8)])
    async with queue.worker(concurrency=4, poll_interval=60):
        for handle in handles:
            await handle.result(30)

    assert recorder.most_inside == 1


async def test_higher_priority_runs_first(queue: AsyncTaskQueue, recorder: RunRecorder) -> None:
    for name, priority in (("low", -1), ("normal", 0), ("high", 5), ("also normal", 0)):
        await queue.options(priority=priority).enqueue(sample_tasks.note, name)
    await queue.worker().run_until_empty()

    assert recorder.names() == ["high", "normal", "also normal", "low"]


async def test_a_pool_serves_only_its_queues(queue: AsyncTaskQueue, recorder: RunRecorder) -> None:
    await queue.options(queue="mine").enqueue(sample_tasks.note, "mine")
    other = await queue.options(queue="other").enqueue(sample_tasks.note, "other")
    await queue.worker(queues=["mine"]).run_until_empty()

    assert recorder.names() == ["mine"]
    assert await other.status() is TaskStatus.PENDING


# run_until_empty


async def test_run_until_empty_runs_what_is_due_and_what_that_makes_due(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    recorder.facts["queue"] = queue
    await queue.enqueue(sample_tasks.enqueue_another, "chain", 5)
    later = await queue.options(delay=60).enqueue(sample_tasks.note, "later")
    pool = queue.worker(concurrency=2, poll_interval=60)
    await pool.run_until_empty()

    assert recorder.names() == ["chain"] * 6
    assert not pool.running
    assert await later.status() is TaskStatus.PENDING


async def test_run_until_empty_on_a_pool_that_was_idle_runs_what_came_since(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    pool = queue.worker(poll_interval=60)
    empty = asyncio.Event()
    pool.events.subscribe(lambda event: empty.set() if isinstance(event, PollEmpty) else None)
    await pool.start()
    await empty.wait()
    await queue.enqueue_many(sample_tasks.note, ["a", "b", "c"])
    await pool.run_until_empty()

    assert recorder.names() == ["a", "b", "c"]


async def test_run_until_empty_does_not_mistake_an_outage_for_an_empty_queue(
    memory_store: Store, recorder: RunRecorder
) -> None:
    async with FaultyStorage(memory_store.another()) as storage:
        await AsyncTaskQueue(storage).enqueue(sample_tasks.note, "patient")
        storage.fail("reserve", times=2)
        await AsyncWorkerPool(storage).run_until_empty()

    assert recorder.names() == ["patient"]


async def test_run_until_empty_leaves_a_retry_that_is_due_later(queue: AsyncTaskQueue) -> None:
    handle = await queue.enqueue(sample_tasks.fail)
    await queue.worker(base_retry_delay=60).run_until_empty()

    assert await handle.status() is TaskStatus.RETRYING


async def test_run_until_empty_that_is_cancelled_stops_the_pool(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    handle = await queue.enqueue(sample_tasks.hold, "held")
    pool = queue.worker()
    burst = asyncio.create_task(pool.run_until_empty())
    await until(lambda: recorder.inside == 1)
    burst.cancel()
    with pytest.raises(asyncio.CancelledError):
        await burst

    assert not pool.running
    assert await handle.status() is TaskStatus.PENDING


async def test_run_until_empty_that_starts_while_a_claim_is_in_flight_ends_without_a_poll(
    store: Store,
) -> None:
    storage = FaultyStorage(store.another())
    storage.delay("reserve", seconds=0.2)
    await AsyncWorkerPool(storage, poll_interval=30).run_until_empty()


# Submitting


async def test_submit_before_the_start_waits_and_after_the_stop_is_refused(
    recorder: RunRecorder,
) -> None:
    pool = AsyncWorkerPool(MemoryStorage(max_pending=2))
    for name in "ab":
        await pool.submit(sample_tasks.note, name)
    with pytest.raises(QueueFull, match="worker pool queue full"):
        await pool.submit(sample_tasks.note, "c")
    await pool.run_until_empty()

    assert recorder.names() == ["a", "b"]
    with pytest.raises(PoolStopped, match="takes no more tasks"):
        await pool.submit(sample_tasks.note, "d")


@pytest.mark.fault("F94")
async def test_submit_never_waits_for_room(recorder: RunRecorder) -> None:
    storage = MemoryStorage(max_pending=1)
    async with AsyncWorkerPool(storage, poll_interval=60) as pool:
        await pool.submit(sample_tasks.hold, "runs")
        await until(lambda: recorder.inside == 1)
        await pool.submit(sample_tasks.note, "waits")
        began = time.monotonic()
        with pytest.raises(QueueFull):
            await pool.submit(sample_tasks.note, "has no place")
        assert time.monotonic() - began < at_most(0.05)
        recorder.open_all()


# Running


async def test_a_callable_that_returns_a_coroutine_is_awaited(queue: AsyncTaskQueue) -> None:
    async with queue.worker():
        assert (
            await (await queue.enqueue("tests.worker.sample_tasks.add_later", 1, 2)).result(30) == 3
        )


async def test_as_many_sync_tasks_run_at_once_as_there_are_slots(
    memory_queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    """More than the default executor of the event loop would run."""
    await memory_queue.enqueue_many(sample_tasks.hold_in_thread, ["held"] * 40)
    async with memory_queue.worker(concurrency=40):
        await until(lambda: recorder.inside == 40)
        recorder.open_all()


async def test_the_event_loop_stays_free_while_a_sync_task_runs(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    await queue.enqueue(sample_tasks.hold_in_thread, "held")
    async with queue.worker(concurrency=2):
        await until(lambda: recorder.inside == 1)
        assert await (await queue.enqueue(sample_tasks.add, 1)).result(30) == 1
        recorder.open_all()


async def test_a_module_is_imported_once_for_many_tasks(
    queue: AsyncTaskQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorder: RunRecorder
) -> None:
    module = "imported_once_by_a_pool"
    (tmp_path / f"{module}.py").write_text(
        "from tests.worker.recorder import RECORDER\nRECORDER.note('imported')\n"
        "async def run(n):\n    return n\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, module, raising=False)
    for n in range(3):
        await queue.enqueue(f"{module}.run", n)
    await queue.worker().run_until_empty()

    assert recorder.names() == ["imported"]


@pytest.mark.fault("F74")
async def test_a_function_that_does_not_exist_waits_without_using_an_attempt(
    queue: AsyncTaskQueue,
) -> None:
    handle = await queue.options(max_retries=0).enqueue(
        "tests.worker.sample_tasks.no_such_function"
    )

    assert await queue.worker().run_until_empty() == 1
    task = await queue.get_task(handle.id)
    assert task is not None
    assert (task.status, task.attempts) == (TaskStatus.PENDING, 0)
    assert await queue.dead.get(handle.id) is None


async def test_a_function_that_is_not_allowed_is_not_run(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    handle = await queue.enqueue(sample_tasks.note, "forbidden")
    await queue.worker(allow=["somewhere.else"]).run_until_empty()

    assert recorder.names() == []
    assert await handle.status() is not TaskStatus.SUCCESS


async def test_a_result_that_cannot_be_encoded_fails_the_task_with_that_reason(
    queue: AsyncTaskQueue,
) -> None:
    handle = await queue.enqueue(sample_tasks.unserialisable)
    await queue.worker().run_until_empty()

    result = await queue.get_result(handle.id)
    assert result is not None
    assert (result.status, result.reason) == (TaskStatus.FAILED, "unserialisable")


async def test_progress_is_stored(queue: AsyncTaskQueue, recorder: RunRecorder) -> None:
    async with queue.worker():
        handle = await queue.enqueue(sample_tasks.report, 0.5)
        await until(lambda: recorder.names())
        for _ in range(1000):
            if (progress := await handle.progress()) is not None:
                break
            await a_while(0.005)
        recorder.open_all()

    assert progress is not None
    assert (progress.fraction, progress.message) == (0.5, "on the way")


# Cancelling


@pytest.mark.fault("F30")
async def test_cancelling_a_running_async_task_stops_it(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    async with queue.worker(poll_interval=60):
        handle = await queue.enqueue(sample_tasks.hold, "held")
        await until(lambda: recorder.inside == 1)
        assert await handle.cancel()
        with pytest.raises(TaskCancelled):
            await handle.result(30)

    assert recorder.names() == ["held", "held cancelled"]


async def test_a_running_thread_sees_that_it_was_cancelled(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    async with queue.worker(poll_interval=60):
        handle = await queue.enqueue(sample_tasks.until_cancelled, "thread")
        await until(lambda: recorder.names())
        assert await queue.cancel(handle.id)
        with pytest.raises(TaskCancelled):
            await handle.result(30)
        await until(lambda: recorder.names() == ["thread", "thread cancelled"])


@pytest.mark.fault("F30")
async def test_a_cancelled_task_is_cancelled_even_if_it_returns_a_value(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    async with queue.worker(poll_interval=60):
        handle = await queue.enqueue(sample_tasks.return_anyway, "early")
        await until(lambda: recorder.inside == 1)
        assert await handle.cancel()
        with pytest.raises(TaskCancelled):
            await handle.result(30)


async def test_a_task_cancelled_elsewhere_is_stopped_at_the_next_renewal(
    store: Store, recorder: RunRecorder
) -> None:
    async with (
        AsyncTaskQueue(store.another()) as here,
        AsyncTaskQueue(store.another()) as elsewhere,
        here.worker(poll_interval=0.05, lease=0.9),
    ):
        handle = await elsewhere.enqueue(sample_tasks.hold, "held")
        await until(lambda: recorder.inside == 1)
        await elsewhere.cancel(handle.id)
        with pytest.raises(TaskCancelled):
            await handle.result(30)


async def test_a_waiting_task_that_was_cancelled_never_runs(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    handle = await queue.enqueue(sample_tasks.note, "unwanted")
    assert await handle.cancel()
    await queue.worker().run_until_empty()

    assert recorder.names() == []
    with pytest.raises(TaskCancelled):
        await handle.result(30)


# Failures


async def test_the_loop_survives_a_storage_that_fails(memory_store: Store) -> None:
    async with FaultyStorage(memory_store.another()) as storage:
        queue = AsyncTaskQueue(storage)
        storage.fail("reserve", times=3)
        storage.fail("record", times=2)
        pool = queue.worker(poll_interval=0.05)
        failures = failures_of(pool)
        async with pool:
            assert await (await queue.enqueue(sample_tasks.add, 1)).result(30) == 1
        assert len([event for event in failures if event.activity == "record and claim"]) >= 4
        assert pool.stats().completed_tasks == 1


async def test_an_outcome_whose_reply_was_lost_is_counted_once(
    store: Store, recorder: RunRecorder
) -> None:
    async with FaultyStorage(store.another()) as storage:
        queue = AsyncTaskQueue(storage)
        storage.fail("record", when="after", times=2)
        handle = await queue.enqueue(sample_tasks.note, "once")
        pool = queue.worker()
        await pool.run_until_empty()

        assert await handle.result(30) == 1
        assert recorder.names() == ["once"]
        assert (pool.stats().completed_tasks, pool.stats().stale_outcomes) == (1, 0)


async def test_a_claim_whose_reply_was_lost_is_released(
    store: Store, recorder: RunRecorder
) -> None:
    async with FaultyStorage(store.another()) as storage:
        queue = AsyncTaskQueue(storage)
        handle = await queue.enqueue(sample_tasks.note, "lost and found")
        storage.fail("reserve", when="after")
        async with queue.worker(poll_interval=0.05, lease=0.9):
            assert await handle.result(30) == 1
        task = await queue.get_task(handle.id)

    assert task is not None
    assert (task.attempts, task.crashes) == (0, 0)


async def test_an_unexpected_error_is_reported_and_the_pool_continues(memory_store: Store) -> None:
    async with FaultyStorage(memory_store.another()) as storage:
        queue = AsyncTaskQueue(storage)
        storage.fail("reserve", times=2, error=ZeroDivisionError("a bug"))
        pool = queue.worker()
        failures = failures_of(pool)
        async with pool:
            assert await (await queue.enqueue(sample_tasks.add, 1)).result(30) == 1

    assert (
        WorkerProblem(activity="record and claim", error="ZeroDivisionError('a bug')") in failures
    )


async def test_an_outcome_that_cannot_be_recorded_fails_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FaultyStorage(store.another()) as storage:
        queue = AsyncTaskQueue(storage)
        bad = await queue.enqueue(sample_tasks.add, 1)
        record_and_reserve = storage.record_and_reserve

        async def refuse(outcomes: Sequence[Outcome], *arguments: Any, **options: Any) -> Any:
            if any(isinstance(each, Succeeded) and each.task_id == bad.id for each in outcomes):
                raise TypeError("poison")
            return await record_and_reserve(outcomes, *arguments, **options)

        monkeypatch.setattr(storage, "record_and_reserve", refuse)
        async with queue.worker(lease=0.9):
            while await bad.status() is not TaskStatus.FAILED:
                good = await queue.enqueue(sample_tasks.add, 2)
                assert await good.result(20) == 2
            with pytest.raises(TaskFailed, match="poison"):
                await bad.result(30)


async def test_a_side_loop_that_fails_is_reported_and_restarted() -> None:
    class Breaking(MemoryStorage):
        to_break = 2

        async def wait_for_work(self, timeout: float) -> None:
            if self.to_break:
                self.to_break -= 1
                raise ZeroDivisionError("a bug")
            await super().wait_for_work(timeout)

    async with Breaking() as storage:
        queue = AsyncTaskQueue(storage)
        pool = queue.worker(poll_interval=60)
        failures = failures_of(pool)
        async with pool:
            await until(lambda: not storage.to_break)
            await a_while(0.15)
            assert await (await queue.enqueue(sample_tasks.add, 1)).result(30) == 1

    assert [event.activity for event in failures] == ["listen", "listen"]


async def test_an_activity_that_breaks_does_not_stop_the_others(memory_store: Store) -> None:
    async with FaultyStorage(memory_store.another()) as storage:
        storage.fail("give_back", times=None, error=ZeroDivisionError("a bug"))
        queue = AsyncTaskQueue(storage)
        pool = queue.worker(poll_interval=0.05)
        failures = failures_of(pool)
        async with pool:
            await until(lambda: len(failures) >= 3)
            assert await (await queue.enqueue(sample_tasks.add, 1)).result(30) == 1

    assert {event.activity for event in failures} == {"recover"}


async def test_a_pool_whose_storage_was_closed_ends_and_raises_the_error(store: Store) -> None:
    storage = store.another()
    await storage.open()
    pool = AsyncWorkerPool(storage, poll_interval=0.02)
    failures = failures_of(pool)
    await pool.start()
    await storage.close()
    with pytest.raises(StorageClosed):
        await pool.wait()

    assert not pool.running
    assert "pool" in {event.activity for event in failures}
    await pool.stop()


async def test_run_until_empty_raises_the_error_that_ended_the_pool(recorder: RunRecorder) -> None:
    storage = MemoryStorage()
    await storage.open()
    queue = AsyncTaskQueue(storage)
    await queue.enqueue(sample_tasks.hold, "held")
    pool = queue.worker(poll_interval=0.02)
    burst = asyncio.create_task(pool.run_until_empty())
    await until(lambda: recorder.inside == 1)
    await storage.close()
    recorder.open_all()

    with pytest.raises(StorageClosed):
        await burst


async def test_a_worker_that_cannot_renew_stops_its_runs_before_the_lease_ends(
    memory_store: Store, recorder: RunRecorder
) -> None:
    async with FaultyStorage(memory_store.another()) as storage:
        queue = AsyncTaskQueue(storage)
        handle = await queue.enqueue(sample_tasks.hold, "held")
        async with queue.worker(lease=2.0, poll_interval=60):
            await until(lambda: recorder.inside == 1)
            taken = recorder.times("held")[0]
            storage.fail("renew", times=None)
            storage.fail("reserve", "give_back", times=None)
            await until(lambda: "held cancelled" in recorder.names())
            assert recorder.times("held cancelled")[0] - taken < 2.0
            storage.heal()
            await until(lambda: recorder.names().count("held") == 2)
            recorder.open_all()
            assert await handle.result(30) == "held"
        task = await queue.get_task(handle.id)

    assert task is not None
    assert task.attempts == 0


async def test_a_fenced_worker_takes_a_new_id_and_continues(
    store: Store, recorder: RunRecorder
) -> None:
    """Its lease expires while its storage is unreachable; another worker finishes its task."""
    async with FaultyStorage(store.another()) as slow, AsyncTaskQueue(store.another()) as other:
        queue = AsyncTaskQueue(slow)
        handle = await queue.enqueue(sample_tasks.ignore_cancellation, "held")
        async with queue.worker(lease=0.5, poll_interval=0.05) as pool:
            await until(lambda: recorder.inside == 1)
            owner = slow.owner
            slow.fail("renew", "reserve", "record", "give_back", times=None)
            async with other.worker(lease=5, poll_interval=0.05):
                await until(lambda: recorder.names().count("held") == 2)
                recorder.gate("held").set()
                await handle.result(30)
            slow.heal()
            assert await (await queue.enqueue(sample_tasks.add, 1)).result(30) == 1
            assert slow.owner != owner
            # The result is in the store before the reply to the pool, which counts it then.
            await until(lambda: pool.stats().completed_tasks == 1)


async def test_a_pool_is_among_the_workers_while_it_runs(queue: AsyncTaskQueue) -> None:
    async with queue.worker(concurrency=3, queues=["mail"]):
        (worker,) = await queue.workers()
        assert (worker.concurrency, worker.queues) == (3, ("mail",))

    assert await queue.workers() == []


async def test_a_storage_with_only_future_tasks_is_not_polled_again_and_again(store: Store) -> None:
    async with FaultyStorage(store.another()) as storage:
        await AsyncTaskQueue(storage).options(delay=3600).enqueue(sample_tasks.add, 1)
        async with AsyncWorkerPool(storage, poll_interval=60):
            await until(lambda: storage.calls["reserve"] >= 1)
            await a_while()
            assert storage.calls["reserve"] <= 2


def test_a_task_is_data_and_its_function_is_found_by_its_path():
    task: Any = Task(func_path="tests.worker.sample_tasks.add", args=(1,))

    assert not callable(task)
    assert isinstance(task.func_path, str)


def events_of(pool: AsyncWorkerPool) -> list[Event]:
    failures: list[Event] = []
    pool.events.subscribe(failures.append)
    return failures
