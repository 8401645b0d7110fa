"""Stored arguments of an older version are upcast before the call; those of a newer version are left to others."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from omniq import (
    Args,
    AsyncTaskQueue,
    AsyncWorkerPool,
    Flow,
    InvalidTask,
    MsgspecSerializer,
    TaskStatus,
    events,
    task,
)
from omniq.models import Task
from omniq.tasks.options import check_options
from omniq.testing.builders import a_task
from tests.worker import versioned_tasks
from tests.worker.recorder import until

MODULE = versioned_tasks.__name__


def stored(name: str, *args: Any, version: int = 1, **kwargs: Any) -> Task:
    """A task as code with that version has enqueued it."""
    return a_task(func_path=f"{MODULE}.{name}", args=args, kwargs=kwargs, version=version)


async def run_all(storage: Any) -> AsyncWorkerPool:
    pool = AsyncWorkerPool(storage, 10, allow=[MODULE])
    await asyncio.wait_for(pool.run_until_empty(), 50)
    return pool


async def result_of(queue: AsyncTaskQueue, task: Task) -> Any:
    await queue.storage.enqueue(task)
    await run_all(queue.storage)
    result = await queue.get_result(task.id)
    assert result is not None
    assert result.status is TaskStatus.SUCCESS, result.error
    return result.result


async def failure_of(queue: AsyncTaskQueue, task: Task) -> tuple[str, str]:
    """The reason and the message of a task that fails for good in its first run."""
    await queue.storage.enqueue(task)
    await run_all(queue.storage)
    letter = await queue.dead.get(task.id)
    assert letter is not None
    assert letter.attempt_count == 1
    return letter.failure_reason, letter.error_details


# Upcasting


async def test_arguments_pass_through_each_version_and_get_their_types_then(queue):
    old = stored("send", "a@b.c", subject="hello")

    assert await result_of(queue, old) == ["Address", "a@b.c", "unknown", "hello"]


async def test_arguments_of_a_version_in_between_skip_the_earlier_upcasters(memory_queue):
    old = stored("send", "a@b.c", "hello", version=2)

    assert await result_of(memory_queue, old) == ["Address", "a@b.c", "unknown", "hello"]


async def test_arguments_of_the_version_of_the_code_are_not_changed(memory_queue):
    handle = await memory_queue.enqueue(
        versioned_tasks.send, versioned_tasks.Address("x@y.z", "X"), "now"
    )
    await run_all(memory_queue.storage)

    assert await handle.result() == ["Address", "x@y.z", "X", "now"]
    stored_task = await memory_queue.get_task(handle.id)
    assert stored_task is not None
    assert stored_task.version == 3


@pytest.mark.parametrize(("name", "value"), [("add", 15), ("add_in_a_process", 105)])
async def test_threads_and_child_processes_get_the_new_arguments(memory_queue, name, value):
    assert await result_of(memory_queue, stored(name, 5)) == value


async def test_a_version_without_a_change_of_the_arguments_runs_as_it_is(memory_queue):
    assert await result_of(memory_queue, stored("unchanged", 4)) == 8


async def test_a_path_alone_stands_for_version_1_unless_the_call_names_another(memory_queue):
    first = await memory_queue.enqueue(f"{MODULE}.add", 1)
    second = await memory_queue.options(version=2).enqueue(f"{MODULE}.add", 1, 1)
    await run_all(memory_queue.storage)

    assert (await first.result(), await second.result()) == (11, 2)


async def test_a_retried_dead_letter_is_upcast(memory_queue):
    old = stored("in_steps", 3)
    old = await _dead(memory_queue, old)
    assert await memory_queue.dead.retry(old.id)
    await run_all(memory_queue.storage)

    result = await memory_queue.get_result(old.id)
    assert result is not None
    assert result.result == "6 new"


async def _dead(queue: AsyncTaskQueue, old: Task) -> Task:
    from omniq.models import TaskError
    from omniq.outcomes import Failed

    await queue.storage.enqueue(old)
    (claimed,) = await queue.storage.reserve(1)
    failed = Failed(claimed.id, claimed.token, TaskError("down"), "exhausted")
    assert await queue.storage.record([failed]) == [True]
    return old


async def test_a_task_with_a_checkpoint_goes_on_after_its_steps_with_the_new_arguments(
    memory_queue,
):
    versioned_tasks.RUNS.clear()
    old = stored("in_steps", 3)
    await result_of(memory_queue, old)
    again = await memory_queue.storage.get_task(old.id)

    assert again is not None
    assert (again.version, again.args) == (1, (3,))
    assert versioned_tasks.RUNS == ["step"]


async def test_a_schedule_keeps_the_version_that_it_was_stored_with(queue):
    await queue.schedules.add(
        "old", f"{MODULE}.add", args=[7], interval=timedelta(hours=1), version=1
    )
    handle = await queue.schedules.trigger("old")
    await run_all(queue.storage)

    assert await handle.result() == 17
    new = await queue.schedules.add("new", versioned_tasks.add, args=(7, 1), interval=60)
    assert new.task.version == 2


async def test_a_repeating_task_is_upcast_in_every_run(memory_queue):
    old = a_task(func_path=f"{MODULE}.add", args=(1,), interval=0.05)
    await memory_queue.storage.enqueue(old)
    pool = AsyncWorkerPool(memory_queue.storage, 2, allow=[MODULE], poll_interval=0.05)
    async with pool:
        await until(lambda: pool.stats().completed_tasks >= 3)

    assert pool.stats().failed_tasks == 0


async def test_the_result_of_a_node_is_in_the_arguments_before_they_are_upcast(queue):
    flow = Flow("old")
    first = flow.add("first", versioned_tasks.unchanged, 2)
    flow.options(version=1).add("second", f"{MODULE}.add", first)
    handle = await queue.start(flow)
    await run_all(queue.storage)

    assert await handle.result() == 14


async def test_what_no_upcaster_can_change_fails_once_and_says_why(queue):
    reason, why = await failure_of(queue, stored("without_the_first", 1))

    assert reason == "signature"
    assert "version 1" in why
    assert "from version 1 to 2" in why


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("with_a_broken_upcaster", "upcaster from version 1 raised ValueError: no such number"),
        ("with_an_upcaster_of_another_type", "returned tuple, and not Args"),
        ("with_an_upcaster_that_does_not_fit", "too many positional arguments"),
    ],
)
async def test_an_upcaster_that_fails_ends_the_task_once_and_says_why(memory_queue, name, words):
    reason, why = await failure_of(memory_queue, stored(name, 1))

    assert reason == "signature"
    assert words in why


# Newer versions


async def test_a_newer_version_is_left_uncharged_and_reported_once(store):
    newer = stored("add", 1, 2, 3, version=9)
    async with store.another() as storage:
        await storage.enqueue(newer)
        pool = AsyncWorkerPool(storage, 5, allow=[MODULE], poll_interval=0.05)
        emitted: list[Any] = []
        pool.events.subscribe(emitted.append)
        async with pool:
            await until(lambda: [each for each in emitted if type(each) is events.FunctionMissing])
            other = stored("send", "a@b.c")
            await storage.enqueue(other)
            assert await storage.wait_for_result(other.id, 50) is not None
        left = await storage.get_task(newer.id)

    missing = [each for each in emitted if type(each) is events.FunctionMissing]
    assert len(missing) == 1
    assert "version 9" in missing[0].reason
    assert "version 2" in missing[0].reason
    assert (left.status, left.attempts, left.crashes) == (TaskStatus.PENDING, 0, 0)


async def test_a_worker_with_the_newer_version_runs_what_the_other_has_left(store, monkeypatch):
    newer, older = stored("unchanged", 1, 3, version=2), stored("unchanged", 2)
    async with store.another() as first, store.another() as second:
        await first.enqueue_many([newer, older])
        with monkeypatch.context() as code:
            code.setattr(versioned_tasks.unchanged, "__omniq__", check_options(), raising=True)
            await run_all(first)
        assert await first.get_result(newer.id) is None
        await run_all(second)
        results = [await second.get_result(each.id) for each in (newer, older)]

    assert [result.result for result in results] == [3, 4]


# What the code says


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"version": 2}, "give upcasters as well"),
        ({"version": 4, "upcasters": {1: None, 3: None}}, "none from version 2 to 3"),
        ({"version": 4, "upcasters": {1: None, 2: None}}, "none from version 3 to 4"),
        ({"version": 2, "upcasters": {2: None}}, "from version 2, but version=2"),
        ({"upcasters": {1: None}}, "from version 1, but version=1"),
        ({"version": 2, "upcasters": {0: None}}, "0 is no version"),
        ({"version": 2, "upcasters": {"1": None}}, "'1' is no version"),
        ({"version": 2, "upcasters": {1: 5}}, "expected a function"),
        ({"version": 2, "upcasters": [None]}, "expected a dictionary"),
        ({"version": 0}, "version"),
        ({"version": "2"}, "version"),
    ],
)
def test_a_gap_between_versions_is_named_when_the_module_is_imported(options, words):
    with pytest.raises(InvalidTask, match=words):
        task(**options)


def test_an_upcaster_must_be_a_plain_function():
    async def later() -> Args:
        return Args()

    with pytest.raises(InvalidTask, match="plain function"):
        task(version=2, upcasters={1: later})  # type: ignore[dict-item]


def test_the_version_is_stored_and_costs_nothing_without_one():
    codec = MsgspecSerializer()
    plain, versioned = a_task(func_path="m.f"), a_task(func_path="m.f", version=2)

    assert b"version" not in codec.encode_task(plain)
    assert codec.decode_task(codec.encode_task(versioned)).version == 2


async def test_a_task_with_a_wrong_version_is_refused_before_it_is_stored(memory_queue):
    with pytest.raises(InvalidTask, match="version"):
        await memory_queue.storage.enqueue(stored("add", 1, version=-1))
    with pytest.raises(InvalidTask, match="version"):
        memory_queue.options(version=0)
