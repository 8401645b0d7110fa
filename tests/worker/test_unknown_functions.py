"""Workers claim only what they can run: all other tasks wait for a worker that has their function."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from omniq import (
    AsyncTaskQueue,
    AsyncWorkerPool,
    Runnable,
    TaskStatus,
    UnmarkedFunctionWarning,
    events,
)
from omniq.events import Event
from omniq.models import Task, WorkerInfo
from omniq.storage.base import BaseStorage
from omniq.storage.memory import MemoryStorage
from omniq.tasks.functions import MAX_EXCLUDED, FunctionCache
from omniq.testing.builders import a_task
from tests.worker import service_a, service_b
from tests.worker.recorder import until

A, B = service_a.__name__, service_b.__name__
MISSING = f"{A}.added_later"
COUNT = 200


async def enqueue_both(storage: BaseStorage, count: int = COUNT) -> tuple[list[str], list[str]]:
    """Enqueue that many tasks of each service, in turn; returns their ids."""
    tasks = [
        a_task(func_path=f"{service}.work", args=(number,))
        for number in range(count)
        for service in (B, A)
    ]
    ids = await storage.enqueue_many(tasks)
    return ids[1::2], ids[0::2]


def recorded(pool: AsyncWorkerPool) -> list[Event]:
    emitted: list[Event] = []
    pool.events.subscribe(emitted.append)
    return emitted


async def tasks_of(storage: BaseStorage, ids: list[str]) -> list[Task]:
    found = [await storage.get_task(task_id) for task_id in ids]
    return [task for task in found if task is not None]


async def all_succeeded(storage: BaseStorage, ids: list[str]) -> bool:
    return {task.status for task in await tasks_of(storage, ids)} == {TaskStatus.SUCCESS}


async def until_excluded(storage: BaseStorage) -> WorkerInfo:
    """The only worker, once it has reported a function that it does not have."""
    while True:
        (worker,) = await storage.workers()
        if worker.runnable is not None and worker.runnable.excluded:
            return worker
        await asyncio.sleep(0.01)


# Two services on one queue


async def test_a_stopped_service_does_not_hold_up_the_other_and_loses_nothing(store):
    async with store.another() as first, store.another() as second:
        of_a, of_b = await enqueue_both(first)
        untouched = await tasks_of(first, of_b)
        pool = AsyncWorkerPool(first, 20, poll_interval=60, allow=[A])
        emitted = recorded(pool)

        assert await asyncio.wait_for(pool.run_until_empty(), 60) == COUNT
        assert await all_succeeded(first, of_a)
        assert await tasks_of(first, of_b) == untouched
        assert {event.func_path for event in emitted if isinstance(event, events.TaskEvent)} == {
            f"{A}.work"
        }

        back = AsyncWorkerPool(second, 20, poll_interval=60, allow=[B])
        assert await asyncio.wait_for(back.run_until_empty(), 60) == 0
        assert await all_succeeded(first, of_b)
        assert (await first.stats()).dead == 0


async def test_two_services_run_beside_each_other_without_waiting_for_a_poll(store):
    async with store.another() as first, store.another() as second:
        of_a, of_b = await enqueue_both(first)
        async with (
            AsyncWorkerPool(first, 10, poll_interval=60, allow=[A]),
            AsyncWorkerPool(second, 10, poll_interval=60, allow=[B]),
        ):
            for task_id in (of_a[-1], of_b[-1]):
                assert await first.wait_for_result(task_id, 50) is not None
        results = [await first.get_result(task_id) for task_id in (*of_a, *of_b)]

    assert {(result.status, result.attempts) for result in results} == {(TaskStatus.SUCCESS, 1)}


async def test_a_service_that_cannot_run_what_waits_does_not_keep_asking(store):
    async with store.another() as storage:
        await enqueue_both(storage, 10)
        pool = AsyncWorkerPool(storage, 5, poll_interval=60, allow=[A])
        emitted = recorded(pool)
        async with pool:
            await until(lambda: pool.stats().completed_tasks == 10)
            await asyncio.sleep(0.3)

    assert sum(isinstance(event, events.PollEmpty) for event in emitted) <= 5


# Rolling deploys


async def test_a_new_function_waits_for_a_worker_that_has_it(store, monkeypatch):
    async with store.another() as first, store.another() as second:
        old = AsyncWorkerPool(first, 10, poll_interval=60, allow=[A])
        emitted = recorded(old)
        async with old:
            ids = await first.enqueue_many(
                [a_task(func_path=MISSING, args=(number,)) for number in range(200)]
            )
            known = await first.enqueue(a_task(func_path=f"{A}.work", args=(1,)))
            await first.wait_for_result(known, 30)
            await until(lambda: any(isinstance(each, events.FunctionMissing) for each in emitted))
            waiting = await tasks_of(first, ids)
            assert {(task.status, task.attempts, task.crashes) for task in waiting} == {
                (TaskStatus.PENDING, 0, 0)
            }

            # The new version is deployed beside the old one, and has the function.
            monkeypatch.setattr(service_a, "added_later", service_a.work, raising=False)
            async with AsyncWorkerPool(second, 10, poll_interval=60, allow=[A]):
                for task_id in ids:
                    result = await first.wait_for_result(task_id, 30)
                    assert (result.status, result.attempts) == (TaskStatus.SUCCESS, 1)
        assert (await first.stats()).dead == 0

    started = [event for event in emitted if isinstance(event, events.TaskStarted)]
    assert [event.func_path for event in started] == [f"{A}.work"]
    (missing,) = [event for event in emitted if isinstance(event, events.FunctionMissing)]
    assert (missing.func_path, missing.reason) == (MISSING, f"{A} has no added_later")
    assert all(
        event.reason == "unknown function"
        for event in emitted
        if isinstance(event, events.TaskReleased)
    )


@pytest.mark.parametrize(
    "allow", [None, ["tests.worker", "broken_service", "os"]], ids=["any", "allowed"]
)
@pytest.mark.parametrize(
    "path",
    [
        MISSING,
        "tests.worker.no_such_module.f",
        "broken_service.f",
        "tests.worker.hostile_tasks.OwnBase",
        "os.system",
    ],
)
async def test_whatever_a_worker_cannot_run_waits_uncharged(
    memory_store, path, allow, tmp_path, monkeypatch
):
    (tmp_path / "broken_service.py").write_text("raise KeyboardInterrupt('at the top')")
    monkeypatch.syspath_prepend(tmp_path)
    async with memory_store.another() as storage:
        task_id = await storage.enqueue(a_task(func_path=path, max_retries=0))
        before = await storage.get_task(task_id)
        pool = AsyncWorkerPool(storage, allow=allow)
        emitted = recorded(pool)
        left = await asyncio.wait_for(pool.run_until_empty(), 20)
        task = await storage.get_task(task_id)
        assert (await storage.stats()).dead == 0

    assert (left, task.status, task.attempts) == (1, TaskStatus.PENDING, 0)
    assert task.eta == before.eta
    assert not any(isinstance(event, events.TaskStarted) for event in emitted)


async def test_a_worker_reports_what_it_can_run(memory_store):
    async with memory_store.another() as storage, memory_store.another() as other:
        async with AsyncWorkerPool(storage, allow=[A], lease=0.3):
            await other.enqueue(a_task(func_path=MISSING))
            worker = await until_excluded(other)
        async with AsyncWorkerPool(storage):
            (unnamed,) = await other.workers()

    assert worker.runnable == Runnable(
        modules=(A,), names=frozenset({A}), excluded=frozenset({MISSING})
    )
    assert [worker.can_run(path) for path in (f"{A}.work", MISSING, f"{B}.work")] == [
        True,
        False,
        False,
    ]
    assert [unnamed.can_run(path) for path in (f"{A}.work", f"{A}.helper", f"{B}.work")] == [
        True,
        False,
        True,
    ]


# A storage that does not restrict claims


class Unrestricted(MemoryStorage):
    """Ignores which functions a claim may take."""

    async def record_and_reserve(self, *args: Any, **options: Any) -> Any:
        options["runnable"] = None
        return await super().record_and_reserve(*args, **options)


async def test_what_a_storage_returns_all_the_same_is_released_for_a_while():
    async with Unrestricted() as storage:
        of_a, of_b = await enqueue_both(storage, 30)
        missing = await storage.enqueue(a_task(func_path=MISSING))
        pool = AsyncWorkerPool(storage, 10, allow=[A])
        emitted = recorded(pool)
        left = await asyncio.wait_for(pool.run_until_empty(), 20)
        others = await tasks_of(storage, [*of_b, missing])

        assert left == len(others) == 31
        assert await all_succeeded(storage, of_a)
        assert (await storage.stats()).dead == 0
        started = [event for event in emitted if isinstance(event, events.TaskStarted)]
        assert {event.func_path for event in started} == {f"{A}.work"}
        for task in others:
            assert (task.status, task.attempts) == (TaskStatus.PENDING, 0)
            assert task.eta is not None
            assert task.eta > storage.clock.now()


# run_until_empty


async def test_run_until_empty_says_how_many_tasks_are_left(store):
    async with store.another() as storage:
        queue = AsyncTaskQueue(storage)
        await queue.enqueue(service_a.work, 1)
        await queue.options(delay=60).enqueue(service_a.work, 2)
        await queue.enqueue(service_b.work, 3)
        pool = queue.worker(allow=[A])
        emitted = recorded(pool)

        assert await pool.run_until_empty() == 2
        assert [event.left for event in emitted if isinstance(event, events.WorkerDrained)] == [2]


async def test_run_until_empty_of_everything_leaves_nothing_to_report(memory_store):
    async with memory_store.another() as storage:
        queue = AsyncTaskQueue(storage)
        await queue.enqueue(service_a.work, 1)
        pool = queue.worker()
        emitted = recorded(pool)

        assert await pool.run_until_empty() == 0
        assert not any(isinstance(event, events.WorkerDrained) for event in emitted)


# The setting


async def test_with_a_timeout_a_task_that_nobody_has_becomes_a_dead_letter(store):
    async with store.another(unknown_function_timeout=0) as storage:
        queue = AsyncTaskQueue(storage)
        handle = await queue.options(queue="graves").enqueue(MISSING)
        known = await queue.enqueue(service_a.work, 1)
        pool = queue.worker()
        emitted = recorded(pool)

        assert await asyncio.wait_for(pool.run_until_empty(), 20) == 0
        letter = await queue.dead.get(handle.id)
        assert letter is not None
        assert (letter.func_path, letter.queue) == (MISSING, "graves")
        assert (letter.failure_reason, letter.attempt_count) == ("unknown function", 1)
        assert "no live worker has been able to run it" in letter.error_details
        assert await known.result(30) == 1
    names = [event.name for event in emitted if getattr(event, "id", None) == handle.id]
    assert "task.started" not in names
    assert "task.dead" in names


async def test_a_running_worker_ends_them_by_itself(memory_store):
    async with memory_store.another(unknown_function_timeout=0.05) as storage:
        task_id = await storage.enqueue(a_task(func_path=MISSING))
        async with AsyncWorkerPool(storage):
            result = await storage.wait_for_result(task_id, 30)

    assert (result.status, result.reason) == (TaskStatus.FAILED, "unknown function")


async def test_a_task_is_not_ended_early_nor_while_another_live_worker_has_it(memory_store):
    async with (
        memory_store.another(unknown_function_timeout=3600) as patient,
        memory_store.another(unknown_function_timeout=0) as hasty,
        memory_store.another() as able,
    ):
        await patient.enqueue(a_task(func_path=f"{B}.work", args=(1,)))
        assert await AsyncWorkerPool(patient, allow=[A]).run_until_empty() == 1
        await able.renew(concurrency=1, runnable=Runnable(modules=(B,)))
        assert await AsyncWorkerPool(hasty, allow=[A]).run_until_empty() == 1
        assert (await able.stats()).dead == 0
        await able.retire()
        assert await AsyncWorkerPool(hasty, allow=[A]).run_until_empty() == 0
        assert (await able.stats()).dead == 1


# The names that are excluded


def test_a_worker_excludes_a_bounded_number_of_functions():
    functions = FunctionCache(["shop"])
    names = [f"shop.f{number}" for number in range(MAX_EXCLUDED + 1)]
    excluded = [functions.exclude(name, "gone") for name in names]

    assert excluded == [True] * MAX_EXCLUDED + [False]
    assert functions.runnable is not None
    assert functions.runnable.excluded == frozenset(names[:-1])
    assert functions.exclude(names[0], "gone")
    assert not FunctionCache().exclude("not a path", "gone")


def test_a_prefix_may_be_the_path_of_one_function():
    runnable = FunctionCache([f"{A}.work"]).runnable

    assert runnable is not None
    assert runnable.accepts(f"{A}.work")
    assert not runnable.accepts(f"{A}.other")


def test_without_modules_all_marked_functions_are_claimed_by_name():
    runnable = FunctionCache().runnable

    assert runnable.modules == ()
    assert {f"{A}.work", f"{B}.work"} <= runnable.names


# What a pool without modules leaves


async def test_a_pool_that_runs_claims_what_its_process_enqueues_without_waiting_for_a_poll(store):
    async with store.another() as storage:
        queue = AsyncTaskQueue(storage)
        async with queue.worker(poll_interval=60):
            await asyncio.sleep(0.2)
            with pytest.warns(UnmarkedFunctionWarning):
                handle = await queue.enqueue(_unmarked_function_of(store))
            assert await handle.result(20) == "ran"


def _unmarked_function_of(store: Any) -> Any:
    """A function that no test has enqueued before: it counts as passed for the rest of the process."""
    name = f"unmarked_{id(store)}"

    def run() -> str:
        return "ran"

    run.__name__ = run.__qualname__ = name
    run.__module__ = service_a.__name__
    setattr(service_a, name, run)
    return run


async def test_it_reports_what_waits_and_what_to_write_and_each_function_once(memory_store):
    async with memory_store.another() as storage:
        paths = [f"{A}.{name}" for name in ("helper", "helper", "_private", "gone")]
        await storage.enqueue_many([a_task(func_path=path) for path in paths])
        pool = AsyncWorkerPool(storage)
        emitted = recorded(pool)
        assert await pool.run_until_empty() == len(paths)
        assert await pool.run_until_empty() == len(paths)

    reasons = [
        (event.func_path, event.reason)
        for event in emitted
        if isinstance(event, events.FunctionMissing)
    ]
    assert len(reasons) == 6
    assert {path for path, _ in reasons[:3]} == set(paths)
    assert "mark it, or name its module" in dict(reasons)[f"{A}.helper"]


async def test_it_says_what_it_runs_when_it_starts(memory_store):
    async with memory_store.another() as storage:
        for allow, expected in ((None, "marked with @task"), ([A], f"{A} ({service_a.__file__})")):
            pool = AsyncWorkerPool(storage, allow=allow)
            emitted = recorded(pool)
            await pool.run_until_empty()
            (started,) = [event for event in emitted if isinstance(event, events.WorkerStarted)]
            assert expected in started.runs
