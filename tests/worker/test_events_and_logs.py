"""The events and log lines of a pool: the right level, and never arguments or results."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
from loguru import logger

from omniq import AsyncTaskQueue, AsyncWorkerPool, TaskCancelled, TaskFailed, TaskQueue, log
from omniq.errors import StorageCorrupt, StorageError
from omniq.events import (
    Dispatcher,
    Event,
    StorageBack,
    StorageFailing,
    TaskDead,
    TaskSucceeded,
    WorkerProblem,
)
from omniq.log.wording import text_of
from omniq.storage.memory import MemoryStorage
from omniq.testing.clock import ManualClock
from omniq.testing.faults import FaultyStorage
from omniq.worker.problems import ProblemReports
from tests.worker import sample_tasks
from tests.worker.conftest import Store
from tests.worker.recorder import RunRecorder, a_while, until

Lines = Callable[[], list[tuple[str, str]]]


@pytest.fixture
def records() -> Iterator[list[Any]]:
    written: list[Any] = []
    sink = logger.add(lambda message: written.append(message.record), level=0)
    log.enable("DEBUG")
    yield written
    log.disable()
    logger.remove(sink)


@pytest.fixture
def lines(records: list[Any]) -> Lines:
    """The log lines, as level and event."""
    return lambda: [(record["level"].name, record["extra"]["event"]) for record in records]


def events_of(pool: AsyncWorkerPool) -> list[Event]:
    emitted: list[Event] = []
    pool.events.subscribe(emitted.append)
    return emitted


def has_outages(emitted: list[Event], count: int) -> bool:
    """Whether that many outages have ended."""
    return kinds_of(emitted).count(StorageBack) == count


def kinds_of(emitted: list[Event]) -> list[type[Event]]:
    return [type(event) for event in emitted]


async def test_start_stop_and_the_events_of_a_task_are_logged_as_info(
    queue: AsyncTaskQueue, lines: Lines
) -> None:
    async with queue.worker(poll_interval=60):
        await (await queue.enqueue(sample_tasks.add, 1)).result(30)
        # The storage notifies this program of the result before the worker writes its line.
        await until(lambda: ("INFO", "task.succeeded") in lines())

    info = [event for level, event in lines() if level == "INFO"]
    assert info == [
        "worker.started",
        "task.started",
        "task.succeeded",
        "worker.stopping",
        "worker.stopped",
    ]


async def test_a_final_failure_is_info_and_the_dead_letter_an_error(
    queue: AsyncTaskQueue, lines: Lines
) -> None:
    await queue.options(max_retries=0).enqueue(sample_tasks.fail)
    await queue.worker().run_until_empty()

    assert ("INFO", "task.failed") in lines()
    assert ("ERROR", "task.dead") in lines()


async def test_empty_polls_are_logged_as_debug(queue: AsyncTaskQueue, lines: Lines) -> None:
    async with queue.worker(poll_interval=0.02):
        await until(lambda: lines().count(("DEBUG", "poll.empty")) >= 3)


async def test_each_retry_is_debug_with_its_attempt_and_its_time(
    queue: AsyncTaskQueue, records: list[Any], lines: Lines
) -> None:
    await queue.enqueue(sample_tasks.fail)
    await queue.worker(base_retry_delay=60).run_until_empty()

    assert ("DEBUG", "task.retried") in lines()
    (retried,) = [record for record in records if record["extra"]["event"] == "task.retried"]
    assert retried["extra"]["attempt"] == 1
    assert retried["extra"]["error"] == "ValueError"
    assert retried["extra"]["retry_at"] > queue.storage.clock.now()


async def test_claims_and_submits_are_logged_as_debug(queue: AsyncTaskQueue, lines: Lines) -> None:
    async with queue.worker() as pool:
        task_id = await pool.submit(sample_tasks.add, 1)
        await queue.handle(task_id).result(30)

    assert ("DEBUG", "task.enqueued") in lines()
    assert ("DEBUG", "task.claimed") in lines()


async def test_a_line_names_the_task_its_function_and_its_attempt(
    queue: AsyncTaskQueue, records: list[Any]
) -> None:
    handle = await queue.enqueue(sample_tasks.add, 1)
    await queue.worker().run_until_empty()

    (started,) = [record for record in records if record["extra"]["event"] == "task.started"]
    facts = started["extra"]
    assert (facts["id"], facts["attempt"]) == (handle.id, 1)
    assert facts["func_path"] == "tests.worker.sample_tasks.add"
    assert started["message"].startswith(f"task.started id={handle.id}")


async def test_arguments_and_results_are_never_logged(
    queue: AsyncTaskQueue, records: list[Any]
) -> None:
    await queue.enqueue(sample_tasks.secret_argument, "hunter2")
    await queue.options(max_retries=1).enqueue(sample_tasks.fail_without_a_word_of, "hunter2")
    await queue.worker(base_retry_delay=0).run_until_empty()

    assert len(records) > 6
    assert not [record for record in records if "hunter2" in str(record)]


async def test_a_recovery_is_logged_as_a_warning(store: Store, lines: Lines) -> None:
    crashed = store.another()
    await crashed.open()
    async with AsyncTaskQueue(store.another()) as queue:
        await queue.enqueue(sample_tasks.add, 1)
        await crashed.renew(lease=0.1)
        (task,) = await crashed.reserve(1)
        async with queue.worker(poll_interval=0.05):
            await queue.handle(task.id).result(30)
    await crashed.close()

    assert ("WARNING", "tasks.given_back") in lines()


async def test_a_failing_storage_is_logged_as_an_error(lines: Lines) -> None:
    async with FaultyStorage(MemoryStorage()) as storage:
        storage.fail("reserve")
        await AsyncWorkerPool(storage).run_until_empty()

    assert ("ERROR", "storage.failing") in lines()


async def test_a_success_is_reported_when_it_is_recorded_and_not_before(
    memory_store: Store,
) -> None:
    async with FaultyStorage(memory_store.another()) as storage:
        queue = AsyncTaskQueue(storage)
        handle = await queue.enqueue(sample_tasks.add, 1)
        pool = queue.worker()
        emitted = events_of(pool)
        storage.fail("record", times=3)
        async with pool:
            await until(lambda: storage.calls["record"] >= 2)
            assert not [event for event in emitted if isinstance(event, TaskSucceeded)]
            await handle.result(30)
            await until(lambda: [event for event in emitted if isinstance(event, TaskSucceeded)])


async def test_events_are_emitted_in_the_order_of_a_tasks_states(queue: AsyncTaskQueue) -> None:
    pool = queue.worker(base_retry_delay=0)
    emitted = events_of(pool)
    await queue.options(max_retries=1).enqueue(sample_tasks.fail)
    await pool.run_until_empty()

    assert [event.name for event in emitted if event.name.startswith("task.")] == [
        "task.enqueued",
        "task.claimed",
        "task.started",
        "task.retried",
        "task.claimed",
        "task.started",
        "task.failed",
        "task.dead",
    ]
    (dead,) = [event for event in emitted if isinstance(event, TaskDead)]
    assert (dead.reason, dead.attempt) == ("exhausted", 2)


async def test_cancelled_snoozed_and_released_tasks_emit_events(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    pool = queue.worker(concurrency=3, poll_interval=60)
    emitted = events_of(pool)
    await pool.start()
    cancelled = await queue.enqueue(sample_tasks.hold, "cancelled")
    await queue.enqueue(sample_tasks.snooze_once, "snoozed", 60)
    await queue.enqueue(sample_tasks.hold, "released")
    await until(lambda: len(recorder.names()) == 3)
    await cancelled.cancel()
    with pytest.raises(TaskCancelled):
        await cancelled.result(30)
    await pool.stop(cancel_in_flight=True)

    assert {"task.cancelled", "task.snoozed", "task.released"} <= {event.name for event in emitted}


async def test_logging_may_be_switched_on_and_off_while_a_pool_runs(
    memory_queue: AsyncTaskQueue, lines: Lines
) -> None:
    log.disable()
    async with memory_queue.worker() as pool:
        await (await memory_queue.enqueue(sample_tasks.add, 1)).result(30)
        assert (lines(), pool.events.active) == ([], False)
        log.enable()
        await (await memory_queue.enqueue(sample_tasks.add, 1)).result(30)
        await until(lambda: ("INFO", "task.succeeded") in lines())
        log.disable()
        written = len(lines())
        assert not pool.events.active
    await a_while(0.02)

    assert len(lines()) == written


async def test_a_pool_is_not_logged_twice(memory_queue: AsyncTaskQueue, lines: Lines) -> None:
    pool = memory_queue.worker()
    pool.events.subscribe(log.write)
    async with pool:
        pass

    assert lines().count(("INFO", "worker.started")) == 1


async def test_a_listener_that_raises_does_not_stop_the_pool(queue: AsyncTaskQueue) -> None:
    pool = queue.worker()

    def broken(event: Event) -> None:
        raise ZeroDivisionError

    pool.events.subscribe(broken)
    async with pool:
        assert await (await queue.enqueue(sample_tasks.add, 1)).result(30) == 1


async def test_closing_a_pool_in_memory_reports_how_many_tasks_are_lost(lines: Lines) -> None:
    pool = AsyncWorkerPool(MemoryStorage(), queues=["other"])
    emitted = events_of(pool)
    async with pool:
        for n in range(3):
            await pool.submit(sample_tasks.add, n)

    (left,) = [event for event in emitted if event.name == "tasks.left"]
    assert left.count == 3  # type: ignore[attr-defined]
    assert ("WARNING", "tasks.left") in lines()


def test_closing_a_queue_in_memory_reports_how_many_tasks_are_lost(records: list[Any]) -> None:
    with TaskQueue("memory://") as queue:
        queue.enqueue_many(sample_tasks.add, [1, 2])

    (left,) = [record for record in records if record["extra"]["event"] == "tasks.left"]
    assert (left["level"].name, left["extra"]["count"]) == ("WARNING", 2)


def test_closing_a_durable_storage_reports_no_lost_tasks(tmp_path, lines: Lines) -> None:
    with TaskQueue(f"sqlite:///{tmp_path}/q.db?durability=os") as queue:
        queue.enqueue(sample_tasks.add, 1)

    assert lines() == []


def test_nothing_is_printed_unless_logging_is_enabled():
    program = (
        "from omniq import TaskQueue\n"
        "with TaskQueue('memory://') as queue:\n"
        "    with queue.worker(base_retry_delay=0):\n"
        "        queue.enqueue('tests.worker.sample_tasks.add', 1).result(30)\n"
        "        try:\n"
        "            queue.enqueue('tests.worker.sample_tasks.fail').result(30)\n"
        "        except Exception:\n"
        "            pass\n"
        "    queue.enqueue('tests.worker.sample_tasks.add', 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )

    assert (done.stdout, done.stderr) == ("", "")


async def test_without_error_messages_a_failure_has_the_type_of_the_error_and_not_its_text(
    queue: AsyncTaskQueue, records: list[Any]
) -> None:
    """The message of an exception often contains arguments of the task."""
    log.enable("DEBUG", error_messages=False)
    handle = await queue.options(max_retries=0).enqueue(sample_tasks.fail, "a private matter")
    async with queue.worker():
        with pytest.raises(TaskFailed):
            await handle.result(30)

    (failed,) = [record for record in records if record["extra"]["event"] == "attempt.failed"]
    assert "ValueError" in failed["message"]
    assert "in fail" in failed["message"]
    assert not [record for record in records if "private" in str(record)]


async def test_every_failed_run_is_a_warning_with_its_error_its_place_and_the_next_time(
    queue: AsyncTaskQueue, records: list[Any]
) -> None:
    handle = await queue.options(max_retries=1).enqueue(sample_tasks.fail, "the disk is full")
    await queue.worker(base_retry_delay=0).run_until_empty()

    first, last = [record for record in records if record["extra"]["event"] == "attempt.failed"]
    facts = first["extra"]
    assert {record["level"].name for record in (first, last)} == {"WARNING"}
    assert (facts["id"], facts["attempt"], facts["error"]) == (handle.id, 1, "ValueError")
    assert facts["error_message"] == "the disk is full"
    assert facts["where"].startswith("tests/worker/sample_tasks.py:")
    assert facts["where"].endswith(" in fail")
    assert facts["owner"]
    assert facts["seconds"] > 0
    assert ": ValueError: the disk is full (tests/worker/sample_tasks.py:" in first["message"]
    assert re.search(r"\), again in 0(\.\d\d?)? s$", first["message"].splitlines()[0])
    assert last["message"].splitlines()[0].endswith("), failed for good (exhausted)")
    assert 'sample_tasks.py", line' in facts["traceback"]
    assert "/src/omniq/" not in facts["traceback"]


async def test_an_outage_is_one_line_and_its_end_is_another(records: list[Any]) -> None:
    async with (
        FaultyStorage(MemoryStorage()) as storage,
        AsyncWorkerPool(storage, poll_interval=0.02, lease=0.5) as pool,
    ):
        emitted = events_of(pool)
        for outages in (1, 2):
            storage.fail("reserve", "give_back", "renew", times=3)
            await until(partial(has_outages, emitted, outages))

    assert kinds_of(emitted).count(WorkerProblem) > 4
    lines = [
        (record["level"].name, record["message"])
        for record in records
        if record["extra"]["event"] in ("storage.failing", "storage.back")
    ]
    assert [level for level, _ in lines] == ["ERROR", "WARNING"] * 2
    assert "; trying again until it answers; " in lines[0][1]
    assert "omniq doctor" in lines[0][1]
    assert re.fullmatch(r"storage\.back: the storage is back after [\d.]+ s", lines[1][1])
    problems = [
        record["level"].name for record in records if record["extra"]["event"] == "worker.problem"
    ]
    assert set(problems) == {"DEBUG"}


def test_one_activity_that_fails_alone_is_no_outage_the_next_time() -> None:
    dispatcher, emitted = Dispatcher(), list[Event]()
    dispatcher.subscribe(emitted.append)
    problems = ProblemReports(dispatcher, MemoryStorage().clock)
    for _ in range(3):
        problems.report("purge", StorageError("the disk is full"))
        problems.answered()

    kinds = [type(event) for event in emitted if not isinstance(event, WorkerProblem)]
    assert kinds == [StorageFailing, StorageBack]
    assert [event.during_outage for event in emitted if isinstance(event, WorkerProblem)] == [
        True,
        False,
        False,
    ]


def test_an_outage_is_reported_again_each_minute_with_its_beginning() -> None:
    dispatcher, emitted, lines = Dispatcher(), list[Event](), list[str]()
    dispatcher.subscribe(emitted.append, kinds=(StorageFailing, StorageBack))
    dispatcher.subscribe(lambda event: lines.append(text_of(event, msgspec.structs.asdict(event))))
    clock = ManualClock()
    problems, began = ProblemReports(dispatcher, clock), clock.now()
    for _ in range(130):
        problems.report("record and claim", StorageError("away"))
        clock.advance(1)
    problems.answered()
    problems.report("renew", StorageError("away again"))

    assert emitted == [
        StorageFailing(error="away"),
        *[StorageFailing(error="away", since=began)] * 2,
        StorageBack(seconds=130),
        StorageFailing(error="away again"),
    ]
    outages = [line for line in lines if line.startswith("storage.failing")]
    assert [f"no answer since {began:%Y-%m-%d %H:%M:%S}Z; " in line for line in outages] == [
        False,
        True,
        True,
        False,
    ]


def test_a_damaged_store_is_no_outage() -> None:
    dispatcher, emitted = Dispatcher(), list[Event]()
    dispatcher.subscribe(emitted.append)
    ProblemReports(dispatcher, MemoryStorage().clock).report("purge", StorageCorrupt("a page"))

    assert emitted == [WorkerProblem(activity="purge", error="a page")]


def test_what_is_not_tried_again_is_reported_also_during_an_outage() -> None:
    dispatcher, emitted = Dispatcher(), list[Event]()
    dispatcher.subscribe(emitted.append)
    problems = ProblemReports(dispatcher, MemoryStorage().clock)
    problems.report("recover", StorageError("away"))
    problems.report_final("release tasks", StorageError("away"))

    assert kinds_of(emitted) == [StorageFailing, WorkerProblem, WorkerProblem]
    assert emitted[2] == WorkerProblem(activity="release tasks", error="away")
