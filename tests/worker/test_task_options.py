"""What options of a task do when it runs: timeout, retry, reschedule_on_failure and task_type."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest

from omniq import (
    AsyncTaskQueue,
    ExponentialBackoff,
    InvalidTask,
    LinearBackoff,
    Settings,
    Task,
    TaskError,
    TaskFailed,
    TaskResult,
    TaskStatus,
)
from omniq.events import AttemptFailed, Event, TaskDead, TaskFailure, TaskStarted
from omniq.metrics import Metrics
from omniq.models import NO_TIMEOUT, DeadLetter, StoredLetter
from omniq.operations.bulk_actions import all_tasks, dead_ids
from omniq.operations.explain import explain
from omniq.operations.health import stuck_from
from omniq.operations.newest import newest_dead, newest_tasks
from omniq.operations.task_detail import task_detail
from omniq.outcomes import Released
from omniq.serialization import MsgspecSerializer
from omniq.storage.memory import MemoryStorage
from omniq.storage.row_rules import row_of
from omniq.storage.row_seals import row_seals
from omniq.text.to_json import plain
from tests.timing import at_most
from tests.worker import option_tasks as tasks
from tests.worker.conftest import Store
from tests.worker.recorder import RunRecorder, until


async def stored(queue: AsyncTaskQueue, task_id: str) -> Task:
    task = await queue.get_task(task_id)
    assert task is not None
    return task


# Timeout


async def test_a_timeout_of_none_is_no_limit(store: Store) -> None:
    async with AsyncTaskQueue(store.another(default_timeout=0.05)) as queue:
        handle = await queue.options(timeout=None).enqueue(tasks.limits_of, 0.2)
        marked = await queue.enqueue(tasks.without_limit)
        limited = await queue.options(max_retries=0).enqueue(tasks.limits_of, 5.0)
        await queue.worker().run_until_empty()

        assert await handle.result(30) == (None, True)
        assert await marked.result(30) is None
        with pytest.raises(TaskFailed, match="TaskTimeout"):
            await limited.result(30)
        assert (await stored(queue, limited.id)).timeout is None


async def test_a_child_process_has_no_limit_either(memory_queue: AsyncTaskQueue) -> None:
    handle = await memory_queue.enqueue(tasks.without_limit_in_a_process)
    await memory_queue.worker().run_until_empty()

    assert await handle.result(30) is None


async def test_a_call_may_have_a_limit_that_its_function_has_not(
    memory_queue: AsyncTaskQueue,
) -> None:
    handle = await memory_queue.options(timeout=7).enqueue(tasks.without_limit)
    await memory_queue.worker().run_until_empty()

    assert await handle.result(30) == 7.0


async def test_no_limit_is_stored_as_a_timeout_that_older_workers_accept(
    memory_queue: AsyncTaskQueue,
) -> None:
    handle = await memory_queue.enqueue(tasks.without_limit)
    task = await stored(memory_queue, handle.id)

    # Older releases refuse more than 100 years, and add the timeout to the time of the start.
    assert task.timeout == NO_TIMEOUT == 100 * 366 * 86_400
    schedule = await memory_queue.schedules.add(
        "s", tasks.limits_of, args=(), interval=60, timeout=None
    )
    assert schedule.task.timeout == NO_TIMEOUT


async def test_a_task_without_limit_is_stuck_after_the_time_for_endless_ones(
    memory_queue: AsyncTaskQueue,
) -> None:
    await memory_queue.enqueue(tasks.without_limit)
    (task,) = await memory_queue.storage.reserve(1)
    assert task.started_at is not None

    settings = Settings(default_timeout=300, endless_after=1_000)
    assert stuck_from(task, settings) == task.started_at + timedelta(seconds=1_000)
    explanation = await explain(memory_queue.storage, task.id)
    assert explanation.reasons[0].until is None


# Retry


async def test_retries_wait_as_long_as_the_list_says(queue: AsyncTaskQueue) -> None:
    handle = await queue.enqueue(tasks.fail_twice)
    delays = []
    for _ in range(2):
        await queue.worker().run_until_empty()
        task, result = await stored(queue, handle.id), await queue.get_result(handle.id)
        assert task.eta is not None
        assert result is not None
        assert result.finished_at is not None
        delays.append((task.eta - result.finished_at).total_seconds())
        assert await queue.storage.dequeue(task.eta) is not None
        await queue.storage.reschedule(handle.id, queue.storage.clock.now())
    await queue.worker().run_until_empty()

    assert delays == [pytest.approx(100, abs=2), pytest.approx(300, abs=2)]
    task, letter = await stored(queue, handle.id), await queue.dead.get(handle.id)
    assert letter is not None
    assert (task.max_retries, task.retry_delays, task.failures) == (2, (100.0, 300.0), 3)
    assert (letter.failure_reason, letter.attempt_count) == ("exhausted", 3)


async def test_the_call_comes_before_the_function_the_queue_and_the_settings() -> None:
    settings = Settings(
        retry=[7, 7, 7, 7],
        queues={"mail": {"retry": "linear(step=5)"}, "web": {"max_retries": 9}},
    )

    async with AsyncTaskQueue(MemoryStorage(settings=settings)) as queue:

        async def policy(func: object, **options: object) -> tuple[object, int]:
            handle = await queue.options(**options).enqueue(func)  # type: ignore[arg-type, call-overload]
            task = await stored(queue, handle.id)
            return task.retry or task.retry_delays, task.max_retries

        plain_handle = await queue.enqueue(tasks.limits_of)
        plain_task = await stored(queue, plain_handle.id)
        assert (plain_task.retry_delays, plain_task.max_retries) == ((7.0,) * 4, 4)
        assert await policy(tasks.limits_of, queue="mail") == (LinearBackoff(5.0), 4)
        assert await policy(tasks.limits_of, queue="web") == ((7.0,) * 4, 9)
        assert await policy(tasks.fail_twice, queue="mail") == ((100.0, 300.0), 2)
        assert await policy(tasks.fail_twice, max_retries=5) == ((100.0, 300.0), 5)
        assert await policy(tasks.fail_twice, retry=[1]) == ((1.0,), 1)
        assert await policy(tasks.fail_twice, retry=ExponentialBackoff(3)) == (
            ExponentialBackoff(3),
            2,
        )


def test_a_task_with_listed_delays_is_read_by_older_releases() -> None:
    class OlderTask(msgspec.Struct):
        func_path: str
        max_retries: int = 3
        retry: LinearBackoff | ExponentialBackoff | None = None

    task = Task(func_path="m.f", max_retries=2, retry_delays=(1.0, 2.0), task_type="x")
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(task), type=OlderTask)

    assert (read.max_retries, read.retry) == (2, None)


# Reschedule on failure


async def test_a_repeating_task_goes_on_after_a_failure_if_it_is_asked_to(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    tasks.died.clear()
    events: list[Event] = []
    handle = await queue.options(interval=0.05).enqueue(tasks.poll, "good", (3,))
    pool = queue.worker(poll_interval=0.02)
    pool.events.subscribe(events.append)
    async with pool:
        await until(lambda: recorder.names().count("good") >= 2)
        first = await queue.get_result(handle.id)
        await until(lambda: recorder.names().count("good") >= 5)
    history = await queue.history(handle.id)
    task = await stored(queue, handle.id)

    assert first is not None
    assert (first.status, first.reason, first.attempts) == (TaskStatus.FAILED, "permanent", 1)
    assert (task.status, task.failures) == (TaskStatus.PENDING, 0)
    # Run 3 succeeded.
    assert history[0].error is not None
    assert history[0].error.message == "run 4"
    assert {each.number for each in history} == {1}
    assert (tasks.died, await queue.dead.list()) == ([], [])
    kinds = {type(event) for event in events}
    assert TaskFailure in kinds
    assert TaskDead not in kinds
    failed = next(event for event in events if isinstance(event, AttemptFailed))
    assert failed.retry_in is not None
    assert 0 < failed.retry_in < at_most(0.1)


async def test_a_repeating_task_ends_with_its_first_failure_by_default(
    memory_queue: AsyncTaskQueue,
) -> None:
    tasks.died.clear()
    call = memory_queue.options(interval=60, reschedule_on_failure=False)
    handle = await call.enqueue(tasks.poll, "bad")
    await memory_queue.worker().run_until_empty()

    assert await handle.status() is TaskStatus.FAILED
    assert [letter.task_id for letter in await memory_queue.dead.list()] == [handle.id]
    assert tasks.died == [handle.id]


async def test_only_a_repeating_task_can_go_on(memory_queue: AsyncTaskQueue) -> None:
    with pytest.raises(InvalidTask, match="give interval or cron as well"):
        await memory_queue.options(reschedule_on_failure=True).enqueue(tasks.fail)
    once = await memory_queue.enqueue(tasks.poll, "once")
    schedule = await memory_queue.schedules.add("s", tasks.poll, args=("x",), interval=60)

    assert not (await stored(memory_queue, once.id)).reschedule_on_failure
    assert not schedule.task.reschedule_on_failure


async def test_the_timeline_of_a_task_that_goes_on_has_no_death(
    memory_queue: AsyncTaskQueue,
) -> None:
    handle = await memory_queue.options(interval=600).enqueue(tasks.poll, "bad")
    await memory_queue.worker().run_until_empty()
    detail = await task_detail(memory_queue.storage, handle.id)

    assert [entry.what for entry in detail.timeline] == ["enqueued", "started", "failed", "due"]


# Task type


async def test_a_task_type_is_in_dead_letters_and_their_filters(queue: AsyncTaskQueue) -> None:
    call = queue.options(max_retries=0, task_type="summarize")
    typed = await call.enqueue(tasks.fail)
    other = await queue.options(max_retries=0).enqueue(tasks.fail)
    await queue.worker().run_until_empty()
    path = "tests.worker.option_tasks.fail"

    letter, plain_letter = await queue.dead.get(typed.id), await queue.dead.get(other.id)
    assert letter is not None
    assert plain_letter is not None
    assert (letter.task_type, letter.func_path) == ("summarize", path)
    assert plain_letter.task_type == path
    assert await ids_of(queue, "summarize") == [typed.id]
    assert await ids_of(queue, path) == [other.id]
    assert await dead_ids(queue.storage, task_type="summarize") == [typed.id]
    newest = await newest_dead(queue.storage, 10, task_type=path)
    assert [each.task_id for each in newest] == [other.id]
    assert await queue.dead.retry_all(task_type="summarize") == 1
    assert await ids_of(queue, "summarize") == []
    await queue.worker().run_until_empty()
    assert await ids_of(queue, "summarize") == [typed.id]


async def ids_of(queue: AsyncTaskQueue, task_type: str) -> list[str]:
    return [letter.task_id for letter in await queue.dead.list(task_type=task_type)]


async def test_tasks_are_listed_by_type(memory_queue: AsyncTaskQueue) -> None:
    handle = await memory_queue.enqueue(tasks.typed)
    plain_handle = await memory_queue.enqueue(tasks.limits_of)
    storage = memory_queue.storage

    assert [task.id for task in await newest_tasks(storage, 5, task_type="report")] == [handle.id]
    path = "tests.worker.option_tasks.limits_of"
    assert [task.id async for task in all_tasks(storage, task_type=path)] == [plain_handle.id]


async def test_a_call_may_name_another_type_than_its_function(
    memory_queue: AsyncTaskQueue,
) -> None:
    metrics, events = Metrics(), list[Event]()
    typed = await memory_queue.enqueue(tasks.typed)
    other = await memory_queue.options(task_type="invoice").enqueue(tasks.typed)
    plain_handle = await memory_queue.enqueue(tasks.type_of)
    pool = memory_queue.worker()
    pool.events.subscribe(events.append)
    pool.events.subscribe(metrics.observe)
    await pool.run_until_empty()

    assert [await each.result(30) for each in (typed, other, plain_handle)] == [
        "report",
        "invoice",
        "tests.worker.option_tasks.type_of",
    ]
    started = {event.id: event.task_type for event in events if isinstance(event, TaskStarted)}
    assert started == {typed.id: "report", other.id: "invoice", plain_handle.id: ""}
    assert set(metrics.get_metrics()["task_durations"]) == {
        "report",
        "invoice",
        "tests.worker.option_tasks.type_of",
    }


async def test_json_has_the_words_of_the_glossary(memory_queue: AsyncTaskQueue) -> None:
    handle = await memory_queue.options(max_retries=0, task_type="x").enqueue(tasks.fail)
    await memory_queue.worker().run_until_empty()
    task, letter = await stored(memory_queue, handle.id), await memory_queue.dead.get(handle.id)
    assert isinstance(letter, DeadLetter)

    shown = plain(letter)
    assert (shown["id"], shown["task_id"]) == (handle.id, handle.id)
    assert (shown["func_path"], shown["task_type"]) == (task.func_path, "x")
    assert "own_type" not in shown
    assert plain(task)["failures"] == plain(task)["attempts"] == task.as_dict()["failures"] == 1


# What is shown


async def test_a_task_that_was_only_given_back_is_at_its_first_attempt(
    memory_queue: AsyncTaskQueue,
) -> None:
    handle = await memory_queue.enqueue(tasks.limits_of)
    for _ in range(4):
        (task,) = await memory_queue.storage.reserve(1)
        await memory_queue.storage.record([Released(task.id, task.token)])
    waiting = await task_detail(memory_queue.storage, handle.id)
    await memory_queue.worker().run_until_empty()
    ended = await task_detail(memory_queue.storage, handle.id)

    assert "attempt 1, given back" in [entry.detail for entry in waiting.timeline]
    assert "attempt 1" in [entry.detail for entry in ended.timeline]


# Records


async def test_the_type_of_a_signed_dead_letter_is_that_of_its_call() -> None:
    settings = Settings(signing_key="a secret of 24 bytes....")
    async with AsyncTaskQueue(MemoryStorage(settings=settings)) as queue:
        call = queue.options(max_retries=0)
        typed = await call.enqueue(tasks.fail)
        await queue.worker().run_until_empty()
        letter = await queue.dead.get(typed.id)
        assert letter is not None
        seals = row_seals(queue.storage.serializer)
        assert seals is not None
        task = await queue.dead.get_task(typed.id)
        assert task is not None
        row = row_of(
            task, queue.storage.serializer.encode_task(task), now=0, default_ttl=0, nonce="n"
        )

    facts = {name: getattr(letter, name) for name in DeadLetter.__struct_fields__}
    forged = StoredLetter(**{**facts, "own_type": "forged"})
    sealed = seals.sealed_letter(row, row.body, forged)
    renamed = msgspec.structs.replace(sealed, own_type="forged")

    assert letter.is_verified
    assert (sealed.own_type, seals.opened_letter(sealed).is_verified) == (None, True)
    assert not seals.opened_letter(renamed).is_verified


def test_older_releases_read_an_unclassified_error_as_a_permanent_one() -> None:
    class OlderRecord(msgspec.Struct):
        message: str = ""
        category: str = "transient"

    error = TaskError("what is this?", category="unclassified")
    result = TaskResult(task_id="a", status=TaskStatus.FAILED, error=error)
    data = MsgspecSerializer().encode_result(result)
    read = MsgspecSerializer().decode_result(data)
    older = msgspec.convert(msgspec.msgpack.decode(data)["error"], OlderRecord)

    assert (older.message, older.category) == ("what is this?", "permanent")
    assert read.error == error
    assert plain(read)["error"]["category"] == "unclassified"
