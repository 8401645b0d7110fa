"""Which fields the log lines of a pool have: the worker, the task, its function, its duration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from loguru import logger

import omniq
from omniq import (
    AsyncTaskQueue,
    AsyncWorkerPool,
    QueueFull,
    Settings,
    ShutdownTimeout,
    Task,
    TaskStatus,
    log,
)
from omniq.metrics import Metrics
from omniq.storage import BaseStorage, open_storage
from tests.worker import sample_tasks
from tests.worker.conftest import Store
from tests.worker.recorder import RunRecorder, a_while, until

Find = Callable[[str], Any]


@pytest.fixture
def find() -> Iterator[Find]:
    """Returns the level and the fields of the only log line of an event."""
    records: list[Any] = []
    sink = logger.add(lambda message: records.append(message.record), level=0)
    log.enable("DEBUG")

    def find(event: str) -> tuple[str, dict[str, Any]]:
        (record,) = [record for record in records if record["extra"]["event"] == event]
        return record["level"].name, {**record["extra"]}

    yield find
    log.disable()
    logger.remove(sink)


async def test_the_start_is_logged_with_the_worker_and_its_slots(
    queue: AsyncTaskQueue, find: Find
) -> None:
    async with queue.worker(concurrency=3):
        owner = queue.storage.owner

    level, fields = find("worker.started")
    assert level == "INFO"
    assert (fields["owner"], fields["concurrency"]) == (owner, 3)
    assert fields["version"] == omniq.__version__
    assert fields["storage"] == queue.storage.capabilities.name
    assert fields["queues"] == "all"
    assert "max_pending" not in fields


async def test_the_start_is_logged_with_the_bound_of_the_queue(find: Find) -> None:
    async with (
        AsyncTaskQueue("memory://?max_pending=100") as queue,
        queue.worker(queues=["mail", "bulk"]),
    ):
        pass

    _, fields = find("worker.started")
    assert (fields["max_pending"], fields["queues"]) == (100, "mail, bulk")


async def test_a_stop_in_time_is_logged_with_the_worker_and_nothing_released(
    queue: AsyncTaskQueue, find: Find
) -> None:
    handle = await queue.enqueue(sample_tasks.add, 1)
    async with queue.worker():
        owner = queue.storage.owner
        await handle.result(30)

    level, fields = find("worker.stopping")
    assert (level, fields["owner"]) == ("INFO", owner)
    level, fields = find("worker.stopped")
    assert level == "INFO"
    assert (fields["owner"], fields["released"], fields["timed_out"]) == (owner, 0, False)


async def test_a_stop_that_times_out_raises_and_logs_how_many_tasks_it_released(
    queue: AsyncTaskQueue, recorder: RunRecorder, find: Find
) -> None:
    pool = queue.worker(concurrency=2)
    await pool.start()
    handles = await queue.enqueue_many(sample_tasks.hold, ["one", "two"])
    await until(lambda: recorder.inside == 2)
    owner = queue.storage.owner
    with pytest.raises(ShutdownTimeout, match="worker pool shutdown timeout"):
        await pool.stop(timeout=0.05)

    level, fields = find("worker.stopping")
    assert (level, fields["owner"], fields["timeout"]) == ("INFO", owner, 0.05)
    level, fields = find("worker.stopped")
    assert level == "WARNING"
    assert (fields["owner"], fields["released"], fields["timed_out"]) == (owner, 2, True)
    assert [await handle.status() for handle in handles] == [TaskStatus.PENDING] * 2


async def test_each_run_is_logged_before_it_starts_with_its_task_and_its_worker(
    queue: AsyncTaskQueue, recorder: RunRecorder, find: Find
) -> None:
    handle = await queue.options(queue="mail").enqueue(sample_tasks.hold, "held")
    async with queue.worker(queues=["mail"]):
        await until(lambda: recorder.inside == 1)
        owner = queue.storage.owner
        claim_level, claim = find("task.claimed")
        level, fields = find("task.started")
        recorder.open_all()
        await handle.result(30)

    assert (claim_level, level) == ("DEBUG", "INFO")
    for name, value in {
        "id": handle.id,
        "func_path": "tests.worker.sample_tasks.hold",
        "queue": "mail",
        "attempt": 1,
    }.items():
        assert claim[name] == fields[name] == value
    assert claim["owner"] == fields["owner"] == owner
    assert claim["token"] == fields["token"] == 1


async def test_a_failure_is_logged_with_its_task_attempt_and_type_of_error(
    queue: AsyncTaskQueue, find: Find
) -> None:
    handle = await queue.options(max_retries=1).enqueue(sample_tasks.fail)
    pool = queue.worker(base_retry_delay=0)
    await pool.run_until_empty()

    _, started = find("worker.started")
    level, failed = find("task.failed")
    dead_level, dead = find("task.dead")
    assert (level, dead_level) == ("INFO", "ERROR")
    for fields in (failed, dead):
        assert (fields["id"], fields["attempt"]) == (handle.id, 2)
        assert fields["func_path"] == "tests.worker.sample_tasks.fail"
    assert (failed["error"], dead["reason"]) == ("ValueError", "exhausted")
    assert (failed["owner"], failed["error_message"]) == (started["owner"], "boom")
    assert 0 < failed["seconds"] < 5
    assert pool.stats().failed_tasks == 1


async def test_a_success_is_logged_with_its_task_and_its_duration(
    queue: AsyncTaskQueue, recorder: RunRecorder, find: Find
) -> None:
    handle = await queue.enqueue(sample_tasks.hold, "held")
    async with queue.worker() as pool:
        await until(lambda: recorder.inside == 1)
        await a_while(0.1)
        recorder.open_all()
        await handle.result(30)
        await until(lambda: pool.stats().completed_tasks == 1)

    level, fields = find("task.succeeded")
    assert level == "INFO"
    assert (fields["id"], fields["attempt"]) == (handle.id, 1)
    assert fields["owner"] == find("worker.started")[1]["owner"]
    assert fields["func_path"] == "tests.worker.sample_tasks.hold"
    assert 0.1 <= fields["seconds"] < 5


async def test_the_retry_of_a_dead_letter_is_logged_with_its_task(
    queue: AsyncTaskQueue, find: Find
) -> None:
    handle = await queue.options(max_retries=0).enqueue(sample_tasks.fail)
    await queue.worker().run_until_empty()
    assert await queue.dead.retry(handle.id)
    assert not await queue.dead.retry(handle.id)

    level, fields = find("dead.retried")
    assert (level, fields["id"]) == ("INFO", handle.id)


# Beyond the log: what else a pool shows about its tasks


async def test_a_task_runs_the_function_that_its_path_names_and_has_an_id_and_a_type(
    queue: AsyncTaskQueue, find: Find
) -> None:
    task = Task(id="sum", func_path="tests.worker.sample_tasks.add", args=(1,), kwargs={"b": 2})
    await queue.storage.enqueue(task)
    await queue.worker().run_until_empty()

    result = await queue.get_result("sum")
    assert result is not None
    assert (result.status, result.result) == (TaskStatus.SUCCESS, 3)
    _, fields = find("task.succeeded")
    assert (fields["id"], fields["func_path"]) == ("sum", "tests.worker.sample_tasks.add")


async def test_metrics_of_a_pool_count_its_tasks_and_hold_the_highest_queue(
    memory_queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    metrics = Metrics()
    pool = memory_queue.worker(concurrency=2)
    pool.events.subscribe(metrics.observe)
    for name in ("a", "b", "c", "d", "e"):
        await pool.submit(sample_tasks.hold, name)
    await memory_queue.options(max_retries=0).enqueue(sample_tasks.fail)
    async with pool:
        recorder.open_all()
        for name in ("a", "b", "c", "d", "e"):
            recorder.gate(name).set()
        await until(lambda: pool.stats().completed_tasks == 5 and pool.stats().failed_tasks == 1)

    numbers = metrics.get_metrics()
    assert (numbers["total_submitted"], numbers["total_completed"]) == (6, 5)
    assert numbers["total_failed"] == 1
    assert numbers["queue_high_water"] == pool.stats().queue_high_water == 6


async def test_metrics_count_what_a_queue_enqueues_on_the_storage_of_the_pool(
    storage: BaseStorage, queue: AsyncTaskQueue
) -> None:
    metrics = Metrics()
    pool = AsyncWorkerPool(storage, concurrency=2)
    pool.events.subscribe(metrics.observe)
    await queue.enqueue_many(sample_tasks.add, range(20))
    for number in range(5):
        await pool.submit(sample_tasks.add, number)
    await queue.options(unique="one").enqueue(sample_tasks.add, 1)
    await queue.options(unique="one").enqueue(sample_tasks.add, 1)
    assert await pool.run_until_empty() == 0

    numbers = metrics.get_metrics()
    assert (numbers["total_submitted"], numbers["total_completed"]) == (26, 26)
    assert numbers["queue_high_water"] == 26
    assert pool.stats().queued_tasks == 0


async def test_the_highest_queue_has_what_other_processes_enqueued(
    store: Store, storage: BaseStorage, recorder: RunRecorder
) -> None:
    metrics = Metrics()
    async with store.another() as other:
        await AsyncTaskQueue(other).enqueue_many(sample_tasks.hold, ["held"] * 10)
        pool = AsyncWorkerPool(storage, concurrency=1)
        pool.events.subscribe(metrics.observe)
        async with pool:
            await until(lambda: metrics.get_metrics()["queue_high_water"] == 9)
            recorder.open_all()
            recorder.gate("held").set()
            await until(lambda: pool.stats().completed_tasks == 10)

    assert metrics.get_metrics()["total_submitted"] == 0
    assert pool.stats().queue_high_water == 9


async def test_the_recommended_settings_bound_slots_queue_and_times(recorder: RunRecorder) -> None:
    """Three workers, a hundred waiting tasks, five minutes for a run, thirty seconds for a stop."""
    settings = Settings()
    assert (settings.default_timeout, settings.shutdown_timeout) == (300.0, 30.0)
    storage = open_storage("memory://?max_pending=100", settings=settings)
    async with AsyncWorkerPool(storage, concurrency=3) as pool:
        for _ in range(3):
            await pool.submit(sample_tasks.hold, "held")
        await until(lambda: recorder.inside == 3)
        for _ in range(100):
            await pool.submit(sample_tasks.hold, "held")
        with pytest.raises(QueueFull, match="worker pool queue full"):
            await pool.submit(sample_tasks.hold, "held")
        assert (recorder.inside, pool.stats().active_workers) == (3, 3)
        recorder.open_all()
        await until(lambda: pool.stats().completed_tasks == 103)

    assert recorder.most_inside == 3
