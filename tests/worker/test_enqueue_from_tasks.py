"""`ctx.enqueue`: a task enqueues others, each once, however often it runs and however a run ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omniq import (
    AsyncTaskQueue,
    InvalidTask,
    Settings,
    Task,
    TaskContext,
    TaskError,
    TaskFailed,
    TaskQueue,
    TaskStatus,
)
from omniq.serialization import CloudpickleSerializer
from omniq.signing import Seal, SealedSerializer
from omniq.storage.memory import MemoryStorage
from omniq.storage.sqlite import SQLiteStorage
from omniq.tasks.enqueued_ids import EnqueuedIds
from omniq.tasks.task_builder import builder_for
from omniq.tasks.task_enqueuer import NewTasks
from omniq.testing.builders import a_task
from omniq.testing.clock import ManualClock
from omniq.testing.manual import AsyncManualQueue
from tests.worker import enqueueing_tasks as tasks
from tests.worker.recorder import PATIENCE

pytestmark = [pytest.mark.timeout(120), pytest.mark.deep_on("file", "sqlite")]

LEAF, OTHER = f"{tasks.__name__}.leaf", f"{tasks.__name__}.other_leaf"

EVERYWHERE = pytest.mark.parametrize("parent", tasks.PLACES, ids=lambda func: func.__name__)
USERS = pytest.mark.parametrize("user", tasks.USERS, ids=lambda func: func.__name__)


async def run(queue: AsyncTaskQueue, func: Any, *args: Any) -> Any:
    """Run the task and those that it enqueues; returns its result."""
    handle = await queue.enqueue(func, *args)
    async with queue.worker(concurrency=4, base_retry_delay=0.001, poll_interval=0.05) as pool:
        result = await queue.get_result(handle.id, timeout=30)
        await pool.run_until_empty()
    assert result is not None
    if result.error is not None:
        raise result.error
    return result.result


async def until(read: Callable[[], Awaitable[Any]], is_met: Callable[[Any], bool]) -> Any:
    """Read until the condition is met; return what was read."""
    deadline = time.monotonic() + PATIENCE
    while not is_met(value := await read()):
        assert time.monotonic() < deadline, value
        await asyncio.sleep(0.005)
    return value


async def leaves(queue: AsyncTaskQueue, path: str = LEAF) -> list[Task]:
    found = await queue.list_tasks(func_path=path, limit=1000)
    return sorted(found, key=lambda task: str(task.args))


async def arguments(queue: AsyncTaskQueue) -> list[Any]:
    return sorted(task.args[0] for task in await leaves(queue))


@EVERYWHERE
async def test_a_task_that_runs_again_enqueues_nothing_twice(queue, parent):
    ids = await run(queue, parent, [1, 2, 3], 3)

    assert await arguments(queue) == [1, 2, 3, 1001]
    (one,) = await leaves(queue, OTHER)
    assert (one.args, one.kwargs) == ((1,), {"text": "one"})
    stored = [*await leaves(queue), one]
    assert sorted(ids) == sorted(task.id for task in stored)
    assert {task.status for task in stored} == {TaskStatus.SUCCESS}
    assert [task.priority for task in stored if task.args == (1001,)] == [3]


@USERS
async def test_a_handle_works_where_the_task_runs(queue, user):
    assert await run(queue, user) == [42, True, "cancelled", None]


@pytest.mark.parametrize("changer", tasks.CHANGERS, ids=lambda func: func.__name__)
async def test_a_handle_changes_its_task_where_the_task_runs(queue, changer):
    assert await run(queue, changer) == [5, 42, "success"]


async def test_a_wait_that_is_given_up_in_a_child_process_ends(memory_queue):
    handle = await memory_queue.enqueue(tasks.gives_up_waiting)
    async with memory_queue.worker(poll_interval=0.05):
        assert await handle.result(timeout=20) == "gave up"


async def test_a_thread_that_a_run_leaves_in_a_child_process_takes_no_message_of_the_next(
    memory_queue,
):
    async with memory_queue.worker(concurrency=1, poll_interval=0.05):
        pids = set()
        for number in range(5):
            handle = await memory_queue.enqueue(tasks.leaves_a_thread_that_waits, number)
            pids.add(await handle.result(timeout=20))

    assert len(pids) == 1


async def test_a_parent_gathers_results_without_holding_a_slot(queue):
    handle = await queue.enqueue(tasks.gathers, [1, 2, 3])
    async with queue.worker(concurrency=1, poll_interval=0.02):
        assert await handle.result(timeout=30) == [2, 4, 6]

    assert await arguments(queue) == [1, 2, 3]


async def test_another_list_in_the_next_run_leaves_no_item_out_and_repeats_none(queue):
    tasks.NUMBERS[:] = [3, 1, 2]
    await run(queue, tasks.lists, 3)

    assert sorted(set(await arguments(queue))) == await arguments(queue)
    assert await arguments(queue) == [-2, -1, 1, 2, 3]


async def test_equal_calls_are_different_tasks(queue):
    await run(queue, tasks.equal_calls, 5, 2)

    assert await arguments(queue) == [7] * 5


@pytest.mark.parametrize("stepper", tasks.STEPPERS, ids=lambda func: func.__name__)
async def test_equal_calls_in_steps_that_earlier_runs_finished_are_not_taken_for_another(
    queue, stepper
):
    await run(queue, stepper)

    assert await arguments(queue) == [7] * 3


@pytest.mark.parametrize("func", [tasks.with_a_cursor, tasks.with_a_cursor_in_thread])
async def test_equal_calls_for_items_of_a_cursor_are_different_tasks(memory_queue, func):
    tasks.NUMBERS.clear()
    await run(memory_queue, func)

    assert len(tasks.NUMBERS) == 5
    assert await arguments(memory_queue) == [7] * 5


async def test_threads_of_a_run_may_enqueue_at_the_same_time(queue):
    await run(queue, tasks.from_many_threads, 12, 2)

    assert await arguments(queue) == list(range(12))


@pytest.mark.parametrize("func", [tasks.same_name_twice, tasks.same_name_twice_in_process])
async def test_a_name_twice_in_one_run_is_invalid(memory_queue, func):
    with pytest.raises(TaskError, match=r"name='x'.*already") as caught:
        await run(memory_queue, func)

    assert caught.value.error_type == "InvalidTask"
    assert await arguments(memory_queue) == [1]


async def test_a_task_id_of_the_callers_is_kept(queue):
    assert await run(queue, tasks.with_task_id, "mine", 2) == "mine"


async def test_a_task_id_of_another_task_is_refused(queue):
    await queue.options(task_id="taken").enqueue(tasks.leaf, 5)

    with pytest.raises(TaskError, match="taken exists already") as caught:
        await run(queue, tasks.with_task_id, "taken")
    assert caught.value.error_type == "DuplicateTask"


async def test_a_unique_key_that_is_held_returns_its_holder(queue):
    holder = await queue.options(unique="key", delay=3600).enqueue(tasks.leaf, 5)

    assert await run(queue, tasks.with_unique, "key", 2) == holder.id
    assert await run(queue, tasks.with_unique, "other", 2) != holder.id
    assert await arguments(queue) == [1, 5]


async def test_the_running_task_need_not_take_its_context(memory_queue):
    await run(memory_queue, tasks.without_a_context, 4)

    assert await arguments(memory_queue) == [4]


async def test_each_occurrence_of_a_repeating_task_enqueues_again(queue):
    handle = await queue.options(interval=0.02, max_retries=5).enqueue(tasks.repeats, 1)
    async with queue.worker(base_retry_delay=0.001, poll_interval=0.01):
        await until(lambda: arguments(queue), lambda found: len(found) >= 3)
        await handle.cancel()
        await until(handle.status, lambda status: status.is_final)

    # In each occurrence one run failed, and the second enqueued nothing more.
    occurrences = {(await queue.get_task(handle.id)).occurrence}
    assert occurrences != {0}
    assert len({task.id for task in await leaves(queue)}) == len(await leaves(queue))


async def test_a_retried_occurrence_enqueues_once():
    async with AsyncManualQueue() as queue:
        await queue.options(interval=60, max_retries=5).enqueue(tasks.repeats, 2)
        await queue.run_for(seconds=200)

        runs = await queue.enqueued(tasks.leaf, 5)

    assert len(runs) == 4


@pytest.mark.parametrize(
    ("options", "found"),
    [({}, [1, 1001]), ({"from_start": True}, [1, 1, 1001, 1001]), ({"args": ([1, 2], 2)}, None)],
)
async def test_a_dead_letter_that_is_retried(queue, options, found):
    handle = await queue.options(max_retries=0).enqueue(tasks.in_loop, [1], 2)
    async with queue.worker(poll_interval=0.05) as pool:
        await queue.get_result(handle.id, timeout=20)
        assert await queue.dead.retry(handle.id, **options)
        await pool.run_until_empty()

    # An edited call is another one, and so is one from the start.
    assert await arguments(queue) == (found or [1, 1, 2, 1001, 1001])


async def test_a_task_of_the_same_id_that_is_enqueued_later_enqueues_again():
    async with AsyncManualQueue() as queue:
        for _ in range(2):
            await queue.options(task_id="daily", result_ttl=10).enqueue(tasks.in_loop, [1])
            await queue.run_for(minutes=1)

        assert len(await queue.enqueued(tasks.leaf, 1)) == 2


async def test_a_cancelled_run_enqueues_nothing(memory_queue):
    handle = await memory_queue.enqueue(tasks.ignores_its_cancellation)
    async with memory_queue.worker(poll_interval=0.05):
        await until(handle.status, lambda status: status is TaskStatus.RUNNING)
        await handle.cancel()
        await until(handle.status, lambda status: status is TaskStatus.CANCELLED)

    assert await arguments(memory_queue) == []


async def test_more_calls_than_fit_into_a_message_are_refused_with_advice(memory_queue):
    with pytest.raises(TaskError, match="enqueue fewer in one call"):
        await run(memory_queue, tasks.too_much_at_once, 500_000, 20)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_an_enqueue_whose_reply_is_lost_is_repeated_and_happens_once(when):
    async with AsyncManualQueue() as queue:
        handle = await queue.enqueue(tasks.in_loop, [1, 2])
        queue.faults.fail("enqueue", when=when, times=2)
        await queue.run()

        assert await handle.status() is TaskStatus.SUCCESS
        assert len(await queue.enqueued(tasks.leaf)) == 3


async def test_a_killed_parent_that_runs_again_enqueues_each_task_once(monkeypatch):
    async with AsyncManualQueue() as queue:
        kills = iter([queue.kill_here, queue.kill_here, lambda: None])
        monkeypatch.setattr(tasks, "fail_before", lambda *_: next(kills)())
        await queue.enqueue(tasks.in_loop, [1, 2])
        await queue.run()

        assert len(await queue.enqueued(tasks.leaf)) == 3


# In a transaction


@pytest.fixture(params=["sqlite", "postgres"])
async def transactional(request, tmp_path):
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/tasks.db"
    else:
        url = request.getfixturevalue("postgres_url")
    async with AsyncTaskQueue(url, settings=Settings(durability="os")) as queue:
        yield queue


@pytest.mark.parametrize("func", [tasks.in_transaction, tasks.in_transaction_in_thread])
@pytest.mark.parametrize("failures", [0, 2])
async def test_in_a_transaction_the_tasks_exist_once_it_is_committed(transactional, func, failures):
    await run(transactional, func, failures)

    assert await arguments(transactional) == sorted([1, 2, failures])


@pytest.mark.parametrize(
    "func", [tasks.at_once_in_transaction, tasks.at_once_in_transaction_in_thread]
)
async def test_in_a_transaction_many_may_enqueue_at_the_same_time(transactional, func):
    await run(transactional, func)

    assert await arguments(transactional) == [0, 1, 2, 3, 4]


async def test_in_a_transaction_that_is_rolled_back_nothing_is_enqueued(transactional):
    with pytest.raises(TaskError, match="rolled back"):
        await run(transactional, tasks.only_rolled_back)

    assert await arguments(transactional) == []


async def test_after_the_commit_nothing_can_be_enqueued(transactional):
    tasks.ERRORS.clear()
    await run(transactional, tasks.after_the_commit)

    assert await arguments(transactional) == []
    assert "inside ctx.transaction()" in tasks.ERRORS[0]


# Hooks and options


async def test_the_hooks_of_the_queue_are_entered_around_it(memory_queue):
    seen = []

    @contextmanager
    def hook(enqueued):
        seen.append([task.func_path for task in enqueued])
        yield [msgspec.structs.replace(task, metadata={"trace": "t"}) for task in enqueued]

    memory_queue.wrap_enqueue(hook)
    await run(memory_queue, tasks.in_loop, [1, 2])

    assert [LEAF, LEAF] in seen
    assert {task.metadata["trace"] for task in await leaves(memory_queue)} == {"t"}


def test_wrong_options_are_refused_at_once():
    context = TaskContext(a_task(), None, None)  # type: ignore[arg-type]

    with pytest.raises(InvalidTask, match="either name or task_id"):
        context.options(name="x", task_id="y")
    with pytest.raises(InvalidTask, match=r"inside ctx\.transaction"):
        context.options(connection=object())
    with pytest.raises(InvalidTask, match="name"):
        context.options(name="")


# The ids


def ids_of(parent: Task, *calls: Task, storage: Any = None, name: str | None = None) -> list[str]:
    storage = storage or MemoryStorage(clock=ManualClock())
    ids = EnqueuedIds(parent, builder_for(storage), storage.serializer)
    assigned, _ = ids.assign(NewTasks(tasks=calls, name=name))
    return [task.id for task in assigned]


def test_ids_differ_by_task_occurrence_function_arguments_and_name():
    parent, call = a_task(), a_task(args=(1,))
    others = [
        ids_of(msgspec.structs.replace(parent, id="other"), call),
        ids_of(msgspec.structs.replace(parent, occurrence=4), call),
        ids_of(parent, msgspec.structs.replace(call, func_path="m.other")),
        ids_of(parent, msgspec.structs.replace(call, args=(2,))),
        ids_of(parent, msgspec.structs.replace(call, queue="other")),
        ids_of(parent, call, name="x"),
        ids_of(parent, call, name="y"),
        ids_of(parent, call),
    ]

    assert len({ids[0] for ids in others}) == len(others)
    assert ids_of(parent, call) == ids_of(parent, call)
    assert ids_of(parent, call, name="x") == ids_of(
        parent, msgspec.structs.replace(call, args=(2,)), name="x"
    )


def test_pickled_objects_are_kept_apart_in_any_order():
    pytest.importorskip("cloudpickle")
    storage = MemoryStorage(serializer=CloudpickleSerializer("k" * 32))
    parent, one, other = a_task(), *(a_task(args=(complex(1, part),)) for part in (1, 2))

    first = ids_of(parent, one, other, storage=storage)
    assert ids_of(parent, other, one, storage=storage) == first[::-1]
    assert len(set(first)) == 2


def test_ids_look_like_others_and_sort_with_their_parents_time():
    parent = a_task()
    (made,) = ids_of(parent, a_task(args=(1,)))

    assert len(made) == 26
    assert not made.startswith(parent.id)


def test_a_call_that_was_not_stored_gets_the_same_id_again():
    storage = MemoryStorage(clock=ManualClock())
    ids = EnqueuedIds(a_task(), builder_for(storage), storage.serializer)
    new = NewTasks(tasks=[a_task(args=(1,))])
    (first,), keys = ids.assign(new)
    (second,), _ = ids.assign(new)
    ids.release(keys)

    assert ids.assign(new)[0][0].id == first.id
    assert ids.assign(new)[0][0].id not in (first.id, second.id)


def test_in_an_encrypted_store_an_id_does_not_show_the_arguments(tmp_path):
    pytest.importorskip("cryptography")
    parent, call = a_task(), a_task(args=("1234",))
    plain = ids_of(parent, call)
    one, other = (
        SQLiteStorage(tmp_path / "a.db", settings=Settings(encryption_key=key * 32))
        for key in ("a", "b")
    )

    assert ids_of(parent, call, storage=one) == ids_of(parent, call, storage=one)
    assert ids_of(parent, call, storage=one) != ids_of(parent, call, storage=other)
    assert ids_of(parent, call, storage=one) != plain


def test_a_signed_store_needs_no_key_for_ids():
    storage = MemoryStorage(clock=ManualClock())
    sealed = SealedSerializer(storage.serializer, Seal("k" * 32))
    assert EnqueuedIds(a_task(), builder_for(storage), sealed).assign(
        NewTasks(tasks=[a_task(args=(1,))])
    )


# Mistakes


async def test_a_task_that_waits_for_its_own_pool_fails_with_a_sentence(memory_queue, monkeypatch):
    async with memory_queue.worker() as pool:
        monkeypatch.setattr(tasks, "POOL", pool)
        handle = await memory_queue.enqueue(tasks.stops_its_own_pool)
        with pytest.raises(TaskFailed, match=r"pool\.stop.*wait for itself"):
            await handle.result(timeout=20)
        # It may start the stop, and end without waiting for it.
        later = await memory_queue.enqueue(tasks.stops_its_own_pool_later)
        await later.result(timeout=20)
        await pool.wait()


def test_a_thread_that_waits_for_its_own_pool_fails_with_a_sentence(monkeypatch):
    with TaskQueue(MemoryStorage()) as queue, queue.worker() as pool:
        monkeypatch.setattr(tasks, "POOL", pool)
        handle = queue.enqueue(tasks.drains_its_own_pool)
        with pytest.raises(TaskFailed, match=r"run_until_empty.*wait for itself"):
            handle.result(timeout=20)


async def test_a_child_process_does_not_open_another_storage_by_mistake(memory_queue, monkeypatch):
    monkeypatch.setenv("OMNIQ_URL", "sqlite:///elsewhere.db")

    with pytest.raises(TaskError, match=r"ctx\.enqueue") as caught:
        await run(memory_queue, tasks.opens_the_default_queue_in_process)
    assert caught.value.error_type == "SettingsError"


def test_a_queue_without_a_url_in_a_task_is_that_of_the_worker(tmp_path):
    url = f"sqlite:///{tmp_path}/other.db"
    with TaskQueue(url) as queue:
        handle = queue.enqueue(tasks.opens_the_default_queue)
        worker = [sys.executable, "-m", "omniq", "worker", tasks.__name__, "--url", url, "--burst"]
        environ = {name: value for name, value in os.environ.items() if name != "OMNIQ_URL"}
        root = str(Path(__file__).parents[2])
        subprocess.run(
            worker, cwd=tmp_path, env={**environ, "PYTHONPATH": root}, check=True, timeout=60
        )

        assert queue.handle(handle.result(timeout=30)).status() is TaskStatus.SUCCESS
