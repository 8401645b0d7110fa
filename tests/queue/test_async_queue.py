"""The queue for async code."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from omniq import (
    AsyncTaskQueue,
    DuplicateTask,
    ExponentialBackoff,
    InvalidTask,
    LinearBackoff,
    QueueFull,
    ResultTimeout,
    SerializationError,
    StorageClosed,
    TaskCancelled,
    TaskError,
    TaskFailed,
    TaskNotFound,
    TaskResult,
    TaskStatus,
)
from omniq.storage.memory import MemoryStorage
from omniq.testing.clock import ManualClock
from tests.queue import sample_tasks


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def queue(clock: ManualClock) -> AsyncIterator[AsyncTaskQueue]:
    async with AsyncTaskQueue("memory://", clock=clock) as queue:
        yield queue


async def finish(queue: AsyncTaskQueue, value: Any = None) -> str:
    """Run the next task, as a worker would, with that result."""
    (task,) = await queue.storage.reserve(1)
    result = TaskResult(task_id=task.id, status=TaskStatus.SUCCESS, result=value)
    await queue.storage.mark_done(task.id, result)
    return task.id


async def test_a_task_has_the_call_and_the_options_of_the_decorator(
    queue: AsyncTaskQueue, clock: ManualClock
) -> None:
    handle = await queue.enqueue(sample_tasks.send, "a@b.c", subject="hi")

    task = await queue.get_task(handle.id)
    assert task is not None
    assert task.func_path == "tests.queue.sample_tasks.send"
    assert (task.args, task.kwargs) == (("a@b.c",), {"subject": "hi"})
    assert (task.queue, task.priority, task.max_retries, task.timeout) == ("mail", 5, 0, 30.0)
    assert task.created_at == task.eta == clock.now()


async def test_options_of_the_call_override_the_decorator_which_overrides_the_settings(
    queue: AsyncTaskQueue,
) -> None:
    with_options = await queue.options(queue="news", priority=0, max_retries=7).enqueue(
        sample_tasks.send, "x"
    )
    without = await queue.enqueue(sample_tasks.plain)

    task, other = await queue.get_task(with_options.id), await queue.get_task(without.id)
    assert task is not None
    assert other is not None
    assert (task.queue, task.priority, task.max_retries, task.timeout) == ("news", 0, 7, 30.0)
    assert (other.queue, other.priority, other.max_retries) == ("default", 0, 3)


async def test_every_option_reaches_the_task(queue: AsyncTaskQueue, clock: ManualClock) -> None:
    handle = await queue.options(
        delay=timedelta(minutes=1),
        interval=5,
        retry=ExponentialBackoff(base=2.0),
        task_id="mine.1",
        result_ttl=10,
        expires=clock.now() + timedelta(days=1),
        metadata={"a": 1},
    ).enqueue(sample_tasks.limited)

    task = await queue.get_task("mine.1")
    assert handle.id == "mine.1"
    assert task is not None
    assert task.eta == clock.now() + timedelta(minutes=1)
    assert (task.interval, task.result_ttl, task.metadata) == (5.0, 10.0, {"a": 1})
    assert task.retry == ExponentialBackoff(base=2.0)
    assert task.expires == clock.now() + timedelta(days=1)
    assert [limit.key for limit in task.limits] == ["api", "api"]
    assert [rule.name for rule in task.breakers] == ["smtp", "dns"]


async def test_policies_of_the_decorator_reach_the_task(
    queue: AsyncTaskQueue, clock: ManualClock
) -> None:
    handle = await queue.enqueue(sample_tasks.limited)

    task = await queue.get_task(handle.id)
    assert task is not None
    assert task.retry == LinearBackoff(step=2.0)
    assert task.expires == clock.now() + timedelta(seconds=60)
    assert task.metadata == {"team": "blue"}


async def test_a_cron_task_is_due_at_its_first_time(queue: AsyncTaskQueue) -> None:
    handle = await queue.enqueue(sample_tasks.nightly)

    task = await queue.get_task(handle.id)
    assert task is not None
    assert task.eta == datetime(2026, 1, 2, 11, 0, tzinfo=UTC)


async def test_a_dotted_path_can_be_enqueued(queue: AsyncTaskQueue) -> None:
    handle = await queue.enqueue("other.service.func", 1, b=2)

    task = await queue.get_task(handle.id)
    assert task is not None
    assert (task.func_path, task.args, task.kwargs) == ("other.service.func", (1,), {"b": 2})


async def test_many_calls_in_either_form_keep_their_order(queue: AsyncTaskQueue) -> None:
    first = await queue.enqueue_many(sample_tasks.plain, ["a", ("b",), ["c", "d"]])
    second = await queue.enqueue_many(
        [(sample_tasks.plain,), (sample_tasks.plain, ("e",)), ("m.f", (), {"value": "f"})]
    )

    tasks = await queue.list_tasks()
    assert [task.id for task in tasks] == [handle.id for handle in first + second]
    assert [task.args for task in tasks] == [("a",), ("b",), (["c", "d"],), (), ("e",), ()]


@pytest.mark.parametrize(
    "calls",
    [[(sample_tasks.plain, 1)], [()], [(1, 2, 3, 4)], ["text"], [(sample_tasks.plain, (), 5)]],
)
async def test_a_call_of_another_shape_is_refused(queue: AsyncTaskQueue, calls: list[Any]) -> None:
    with pytest.raises(InvalidTask):
        await queue.enqueue_many(calls)

    assert await queue.list_tasks() == []


async def test_a_function_without_its_arguments_is_refused(queue: AsyncTaskQueue) -> None:
    with pytest.raises(InvalidTask, match="arguments"):
        await queue.enqueue_many(sample_tasks.plain)  # type: ignore[call-overload]


async def test_one_id_for_several_tasks_is_refused(queue: AsyncTaskQueue) -> None:
    with pytest.raises(DuplicateTask):
        await queue.options(task_id="one").enqueue_many(sample_tasks.plain, [1, 2])

    assert await queue.list_tasks() == []


BAD_OPTIONS: list[dict[str, Any]] = [
    {"eta": datetime(2026, 1, 1)},  # noqa: DTZ001 - the point of the test
    {"delay": -1},
    {"delay": math.nan},
    {"delay": math.inf},
    {"delay": timedelta(seconds=-1)},
    {"interval": 0},
    {"interval": -5},
    {"interval": math.nan},
    {"timeout": 0},
    {"timeout": -1},
    {"timeout": math.inf},
    {"max_retries": -1},
    {"max_retries": 1.5},
    {"priority": "high"},
    {"task_id": ""},
    {"task_id": ".hidden"},
    {"task_id": "../up"},
    {"task_id": "a/b"},
    {"task_id": "x" * 129},
    {"task_id": "a\n"},
    {"queue": "no spaces"},
    {"unique": ""},
    {"result_ttl": -1},
    {"expires": datetime(2026, 1, 1)},  # noqa: DTZ001 - the point of the test
    {"cron": "not cron"},
    {"cron": "0 0 30 2 *"},
    {"cron": "* * * * *", "tz": "Nowhere/Land"},
    {"cron": "* * * * *", "interval": 5},
    {"eta": datetime(2026, 1, 1, tzinfo=UTC), "delay": 1},
    {"retry": "often"},
    {"rate": "fast"},
    {"max_running": 0},
    {"colour": "blue"},
]


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=str)
@pytest.mark.fault("F88", "F89")
async def test_bad_values_are_refused_before_anything_is_written(
    queue: AsyncTaskQueue, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidTask):
        await queue.options(**options).enqueue(sample_tasks.plain)

    assert await queue.list_tasks() == []


@pytest.mark.parametrize(
    ("func", "hint"),
    [
        (lambda: None, "lambda"),
        (print, "builtin"),
        (int, "class"),
        ("notdotted", "dotted path"),
        (["list"], "not a function"),
        (None, "not a function"),
    ],
)
async def test_an_object_that_is_not_a_function_is_refused_with_advice(
    queue: AsyncTaskQueue, func: Any, hint: str
) -> None:
    with pytest.raises(InvalidTask, match=hint):
        await queue.enqueue(func)


@pytest.mark.fault("F70")
async def test_an_argument_that_cannot_be_encoded_is_named(queue: AsyncTaskQueue) -> None:
    with pytest.raises(SerializationError, match=r"args\[0\]\['deep'\]\[1\]"):
        await queue.enqueue(sample_tasks.plain, {"deep": [1, object()]})


async def test_a_taken_id_raises_and_a_held_unique_key_returns_the_task_that_holds_it(
    queue: AsyncTaskQueue,
) -> None:
    await queue.options(task_id="a").enqueue(sample_tasks.plain)
    first = await queue.options(unique="k").enqueue(sample_tasks.plain, 1)
    second = await queue.options(unique="k").enqueue(sample_tasks.plain, 2)

    assert second.id == first.id
    with pytest.raises(DuplicateTask):
        await queue.options(task_id="a").enqueue(sample_tasks.plain)


async def test_unique_true_means_the_same_call(queue: AsyncTaskQueue) -> None:
    first = await queue.enqueue(sample_tasks.once, 1, a=2, b=3)
    same = await queue.enqueue(sample_tasks.once, 1, b=3, a=2)
    other = await queue.enqueue(sample_tasks.once, 1, a=2, b=4)

    assert same.id == first.id
    assert other.id != first.id


async def test_a_unique_key_can_be_made_of_the_arguments(queue: AsyncTaskQueue) -> None:
    first = await queue.enqueue(sample_tasks.crawl, 7, 1)
    second = await queue.enqueue(sample_tasks.crawl, 7, 2)

    assert second.id == first.id
    with pytest.raises(InvalidTask, match="unique: the function that makes the key failed"):
        await queue.enqueue(sample_tasks.visit, {"user": 7})


@pytest.mark.fault("F94")
async def test_a_full_queue_raises_queue_full() -> None:
    async with AsyncTaskQueue("memory://?max_pending=2") as queue:
        await queue.enqueue_many(sample_tasks.plain, [1, 2])

        with pytest.raises(QueueFull, match="queue full"):
            await queue.enqueue(sample_tasks.plain)


async def test_a_handle_returns_the_value(queue: AsyncTaskQueue) -> None:
    handle = await queue.enqueue(sample_tasks.fetch, "url")
    await finish(queue, 3)

    assert await handle.result() == 3
    assert await handle.status() is TaskStatus.SUCCESS
    assert not await handle.cancel()


async def test_handles_of_the_same_task_are_equal(queue: AsyncTaskQueue) -> None:
    first = await queue.options(unique="welcome").enqueue(sample_tasks.plain)
    same = await queue.options(unique="welcome").enqueue(sample_tasks.plain)
    other = await queue.enqueue(sample_tasks.plain)

    assert {first, same, queue.handle(first.id), other} == {first, other}
    assert first != other
    assert queue.flow("nightly") == queue.flow("nightly") != queue.flow("weekly")


async def test_a_handle_raises_the_stored_error(queue: AsyncTaskQueue) -> None:
    handle = await queue.enqueue(sample_tasks.plain)
    (task,) = await queue.storage.reserve(1)
    await queue.storage.mark_failed(task.id, TaskError("disk on fire"), will_retry=False)

    with pytest.raises(TaskFailed, match="disk on fire") as caught:
        await handle.result()
    assert caught.value.error is not None
    assert caught.value.error.message == "disk on fire"


async def test_the_result_of_a_cancelled_task_raises(queue: AsyncTaskQueue) -> None:
    handle = await queue.enqueue(sample_tasks.plain)

    assert await queue.cancel(handle.id)
    with pytest.raises(TaskCancelled):
        await handle.result()


async def test_waiting_ends_after_the_timeout(queue: AsyncTaskQueue) -> None:
    handle = await queue.enqueue(sample_tasks.plain)

    with pytest.raises(ResultTimeout):
        await handle.result(timeout=0)
    assert await queue.get_result(handle.id, timeout=0) is None


async def test_a_retrying_result_is_returned_at_once_but_does_not_end_a_wait(
    queue: AsyncTaskQueue,
) -> None:
    handle = await queue.enqueue(sample_tasks.plain)
    (task,) = await queue.storage.reserve(1)
    await queue.storage.mark_failed(task.id, TaskError("once more"), will_retry=True)

    shown = await queue.get_result(handle.id)
    assert shown is not None
    assert shown.status is TaskStatus.RETRYING
    assert await queue.get_result(handle.id, timeout=0) is None


async def test_an_unknown_task_is_not_found_at_once(queue: AsyncTaskQueue) -> None:
    handle = queue.handle("unknown")

    with pytest.raises(TaskNotFound):
        await handle.result()
    with pytest.raises(TaskNotFound):
        await handle.status()
    assert await queue.get_task("unknown") is None
    assert not await queue.cancel("unknown")


async def test_dead_letters_can_be_retried_with_other_arguments(queue: AsyncTaskQueue) -> None:
    handle = await queue.enqueue(sample_tasks.plain, "bad")
    (task,) = await queue.storage.reserve(1)
    await queue.storage.mark_failed(task.id, TaskError("no"), will_retry=False)

    assert [letter.task_id for letter in await queue.dead.list()] == [handle.id]
    assert await queue.dead.retry(handle.id, args=["good"])
    assert not await queue.dead.retry(handle.id)
    assert not await queue.dead.retry(handle.id, args=["again"])
    again = await queue.get_task(handle.id)
    assert again is not None
    assert (again.args, again.status, again.attempts) == (("good",), TaskStatus.PENDING, 0)


async def test_dead_letters_are_retried_deleted_and_purged_in_bulk(
    queue: AsyncTaskQueue, clock: ManualClock
) -> None:
    handles = await queue.enqueue_many(sample_tasks.plain, range(4))
    for task in await queue.storage.reserve(4):
        await queue.storage.mark_failed(task.id, TaskError("no"), will_retry=False)

    assert await queue.dead.delete(handles[0].id)
    assert await queue.dead.get(handles[0].id) is None
    assert await queue.dead.retry_all(func_path="other.func") == 0
    assert await queue.dead.retry(handles[1].id)
    clock.advance(60)
    assert await queue.dead.purge(older_than=120) == 0
    assert await queue.dead.purge(older_than=timedelta(seconds=30)) == 2
    assert (await queue.stats()).dead == 0


async def test_old_results_are_purged_by_age_or_instant(
    queue: AsyncTaskQueue, clock: ManualClock
) -> None:
    await queue.enqueue_many(sample_tasks.plain, [1, 2])
    first = await finish(queue)
    clock.advance(60)
    await finish(queue)

    assert await queue.purge_results(older_than=30) == 1
    assert await queue.get_result(first) is None
    assert await queue.purge_results(clock.now() + timedelta(seconds=1)) == 1


async def test_a_queue_that_is_not_open_raises_storage_closed() -> None:
    queue = AsyncTaskQueue(MemoryStorage())

    with pytest.raises(StorageClosed, match="async with"):
        await queue.enqueue(sample_tasks.plain)


async def test_an_enqueue_ends_the_wait_for_work(queue: AsyncTaskQueue) -> None:
    waiting = asyncio.create_task(queue.storage.wait_for_work(3600))
    await asyncio.sleep(0)
    await queue.enqueue(sample_tasks.plain)

    await waiting
