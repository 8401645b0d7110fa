"""Parameters that a worker fills in: made once for each worker or for each run, closed in reverse order."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any

import pytest

from omniq import (
    INJECTED,
    AsyncTaskQueue,
    InvalidTask,
    Resource,
    ShutdownTimeout,
    Task,
    TaskFailed,
    TaskStatus,
)
from omniq.events import WorkerProblem
from omniq.tasks.arguments import FunctionTypes
from omniq.tasks.secret_parameters import secret_parameters
from tests.worker import resource_tasks
from tests.worker.recorder import until


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of what the sample module notes, one line for each event."""
    path = tmp_path / "noted"
    path.touch()
    monkeypatch.setenv(resource_tasks.LOG, str(path))
    resource_tasks._tries.clear()
    return path


def noted(log: Path) -> list[str]:
    return [line.rpartition(" pid=")[0] for line in log.read_text().splitlines()]


async def run(queue: AsyncTaskQueue, func: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of one task, run by a new worker, without retries."""
    handle = await queue.options(max_retries=0).enqueue(func, *args, **kwargs)
    await queue.worker(concurrency=4).run_until_empty()
    return await handle.result(30)


# Of the worker


async def test_two_tasks_share_a_resource_that_is_made_once_and_closed_at_the_end(queue, log):
    first = await queue.enqueue(resource_tasks.use_pool, 1)
    second = await queue.enqueue(resource_tasks.use_pool_too, 2)
    third = await queue.enqueue(resource_tasks.use_pool_in_a_thread, 1, 2)
    async with queue.worker(concurrency=4):
        results = [await handle.result(30) for handle in (first, second, third)]
        before = noted(log)

    assert [result[0] for result in results] == [1, 2, 3]
    assert len({result[1] for result in results}) == 1
    assert before == ["pool made"]
    assert noted(log) == ["pool made", "pool closed"]


async def test_a_worker_makes_nothing_that_no_task_needs(memory_queue, log):
    await memory_queue.enqueue(resource_tasks.double, 1)
    await memory_queue.worker().run_until_empty()

    assert noted(log) == ["on_success (1,) 2"]


async def test_what_is_made_first_is_closed_last(memory_queue, log):
    result = await run(memory_queue, resource_tasks.use_everything, 1, b=2, more=3)

    assert result == [1, 2, True, True, 7, 8, {"more": 3}]
    assert noted(log) == [
        "pool made",
        "client entered",
        "number made",
        "client left, pool open: True",
        "pool closed",
    ]


async def test_the_next_worker_makes_it_again(memory_queue, log):
    one = await run(memory_queue, resource_tasks.use_pool, 1)
    two = await run(memory_queue, resource_tasks.use_pool, 1)

    assert one[2] is two[2] is True
    assert noted(log) == ["pool made", "pool closed"] * 2


async def test_a_resource_that_fails_fails_the_run_which_is_retried(queue):
    handle = await queue.enqueue(resource_tasks.use_late)
    async with queue.worker(base_retry_delay=0):
        assert await handle.result(30) == "made"

    (attempt,) = await queue.history(handle.id)
    assert attempt.error.error_type == "ConnectionError"
    assert "not there yet" in attempt.error.message


async def test_a_resource_that_hangs_ends_with_the_timeout_of_the_run(memory_queue):
    handle = await memory_queue.options(timeout=0.2, max_retries=0).enqueue(
        resource_tasks.use_hanging
    )
    pool = memory_queue.worker()
    async with pool:
        with pytest.raises(TaskFailed, match="TaskTimeout"):
            await handle.result(30)
        assert await (await memory_queue.enqueue(resource_tasks.use_pool, 1)).result(30)

    assert pool.has_ended


async def test_a_resource_that_hangs_is_made_again_by_a_later_run(store):
    tries: list[int] = []

    async def hang_once() -> str:
        tries.append(1)
        if len(tries) == 1:
            await asyncio.sleep(3600)
        return "made"

    resource_tasks.use_number.__annotations__["it"] = Annotated[str, Resource(hang_once)]
    async with store.another(start_timeout=0.3) as storage:
        queue = AsyncTaskQueue(storage)
        handle = await queue.options(timeout=10).enqueue(resource_tasks.use_number)
        async with queue.worker(base_retry_delay=0):
            assert await handle.result(30) == "made"
        (attempt,) = await queue.history(handle.id)

    assert attempt.error is not None
    assert attempt.error.error_type == "TimeoutError"
    assert attempt.error.message == (
        "the resource test_a_resource_that_hangs_is_made_again_by_a_later_run.<locals>.hang_once was not "
        "made within 0.3 s (setting start_timeout)"
    )


async def test_a_teardown_that_raises_is_reported_and_the_others_are_closed(memory_queue, log):
    def make_broken() -> Any:
        yield "broken"
        raise RuntimeError("the teardown is broken")

    emitted: list[WorkerProblem] = []
    pool = memory_queue.worker()
    pool.events.subscribe(emitted.append, kinds=(WorkerProblem,))
    await memory_queue.enqueue(resource_tasks.use_pool, 1)
    resource = Resource(make_broken)
    resource_tasks.use_number.__annotations__["it"] = Annotated[str, resource]
    handle = await memory_queue.enqueue(resource_tasks.use_number)
    async with pool:
        assert await handle.result(30) == "broken"

    assert [(each.activity, each.error) for each in emitted] == [
        ("close resource " + resource.name, "RuntimeError('the teardown is broken')")
    ]
    assert noted(log) == ["pool made", "pool closed"]


# Of the run


@pytest.mark.parametrize(
    "func", [resource_tasks.use_session, resource_tasks.use_session_in_a_thread]
)
async def test_a_resource_of_the_run_is_made_for_each_run_and_sees_how_it_ends(queue, log, func):
    assert (await run(queue, func, "ok"))["attempt"] == 1
    with pytest.raises(TaskFailed, match="ValueError: the function failed"):
        await run(queue, func, "fail")
    with pytest.raises(TaskFailed, match="RuntimeError: the commit failed"):
        await run(queue, func, "break")

    assert [line for line in noted(log) if "session" in line] == [
        "session begun",
        "session committed",
        "session begun",
        "session rolled back: ValueError('the function failed')",
        "session begun",
    ]


async def test_in_a_thread_it_is_made_in_the_thread_of_the_function(memory_queue):
    result = await run(memory_queue, resource_tasks.use_session_in_a_thread, "ok")

    assert result["thread"] == result["here"] == "omniq-task"


async def test_async_resources_work_in_tasks_of_threads(memory_queue):
    assert await run(memory_queue, resource_tasks.use_async_client_in_a_thread) is True
    assert await run(memory_queue, resource_tasks.use_async_client_in_plain_code) is True


@pytest.mark.parametrize(
    "func",
    [
        resource_tasks.check_on_the_loop,
        resource_tasks.check_in_a_thread,
        resource_tasks.check_in_a_process,
    ],
)
async def test_one_asyncio_task_enters_and_leaves_an_async_resource(memory_queue, func):
    assert await run(memory_queue, func, False) == "entered"
    with pytest.raises(TaskFailed, match="ValueError: the function failed"):
        await run(memory_queue, func, True)


async def test_async_code_of_a_resource_that_exits_does_not_end_the_worker(memory_queue):
    with pytest.raises(TaskFailed, match="SystemExit: 3"):
        await run(memory_queue, resource_tasks.exit_before)
    with pytest.raises(TaskFailed, match="SystemExit: 4"):
        await run(memory_queue, resource_tasks.exit_after)


async def test_a_resource_cannot_hide_the_exception_of_the_function(memory_queue):
    with pytest.raises(TaskFailed, match="not hidden by swallowing"):
        await run(memory_queue, resource_tasks.use_swallowing)


# Child processes


@pytest.mark.timeout(60)
async def test_each_child_process_has_a_lifespan_and_resources_and_closes_them(queue, log):
    one = await queue.enqueue(resource_tasks.use_all_in_a_process, 1)
    two = await queue.enqueue(resource_tasks.use_all_async_in_a_process, 2)
    bad = await queue.options(max_retries=0).enqueue(resource_tasks.use_all_in_a_process, -1)
    async with queue.worker(lifespan=resource_tasks.lifespan, concurrency=1):
        results = [await one.result(30), await two.result(30)]
        with pytest.raises(TaskFailed, match="ValueError: negative"):
            await bad.result(30)

    assert [result[:4] for result in results] == [[1, "hello", 1, True], [2, "hello", 1, True]]
    (child,) = {result[4] for result in results}
    lines = [line for line in log.read_text().splitlines() if line.endswith(f"pid={child}")]
    events = [line.rpartition(" pid=")[0] for line in lines]
    assert events[:2] == ["lifespan entered", "pool made"]
    assert events[-3:] == ["client left, pool open: True", "pool closed", "lifespan left"]
    assert "session rolled back: ValueError('negative')" in events


@pytest.mark.timeout(60)
async def test_what_a_child_process_keeps_belongs_to_none_of_its_tasks(memory_queue):
    resource = await run(memory_queue, resource_tasks.use_owner_in_a_process)

    assert resource == "no task"


async def test_a_resource_that_hangs_in_a_child_process_ends_too(store):
    async with store.another(start_timeout=0.3) as storage:
        queue = AsyncTaskQueue(storage)
        handle = await queue.options(max_retries=0).enqueue(resource_tasks.hang_in_a_process)
        async with queue.worker():
            with pytest.raises(TaskFailed, match=r"the resource hang was not made within 0\.3 s"):
                await handle.result(30)


async def test_a_child_process_that_does_not_close_is_killed_with_the_time_of_the_stop(
    memory_queue, log
):
    handle = await memory_queue.enqueue(resource_tasks.use_stubborn)
    pool = memory_queue.worker()
    await pool.start()
    child = await handle.result(30)
    with pytest.raises(ShutdownTimeout):
        await pool.stop(timeout=1)

    assert noted(log) == ["stubborn closes"]
    await until(lambda: not _is_alive(child))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# What callers may pass


async def test_a_resource_is_not_part_of_the_callers_signature(memory_queue):
    with pytest.raises(InvalidTask, match="pool is a resource, which the worker makes"):
        await memory_queue.enqueue(resource_tasks.use_pool, 1, pool="mine")
    with pytest.raises(InvalidTask, match=r"too many positional arguments; it takes \(number\)"):
        await memory_queue.enqueue(resource_tasks.use_pool_too, 1, 2)
    with pytest.raises(InvalidTask, match="semaphore is a resource"):
        await memory_queue.enqueue(resource_tasks.use_everything, 1, semaphore=2)


async def test_a_record_cannot_pass_a_value_for_a_resource(queue):
    for func, args, kwargs in (
        (resource_tasks.use_pool, (1,), {"pool": "forged"}),
        (resource_tasks.use_everything, (1,), {"semaphore": "forged"}),
    ):
        path = f"{func.__module__}.{func.__name__}"
        forged = Task(func_path=path, args=args, kwargs=kwargs)
        await queue.storage.enqueue(forged)
        await queue.enqueue(func, 1)
        await queue.worker().run_until_empty()

        letter = await queue.dead.get(forged.id)
        assert "is a resource, which the worker makes" in letter.error_details
        assert letter.failure_reason == "permanent"


async def test_arguments_of_a_record_never_take_the_place_of_a_resource(queue):
    path = "tests.worker.resource_tasks.use_pool_in_a_thread"
    forged = Task(func_path=path, args=(5, 6, 7))
    await queue.storage.enqueue(forged)
    await queue.enqueue(resource_tasks.use_pool_in_a_thread)
    await queue.worker().run_until_empty()

    result = await queue.get_result(forged.id)
    assert (result.status, result.result[0]) == (TaskStatus.SUCCESS, 18)


def test_a_resource_that_may_be_none_is_a_resource():
    for hint in (
        Annotated[int, Resource(resource_tasks.make_number)] | None,
        "None | Annotated[int, Resource(resource_tasks.make_number)]",
    ):

        def func(a: int, number: Any = None) -> None: ...

        func.__annotations__["number"] = hint
        types = FunctionTypes(func, "x.func")

        assert [each.name for each in types.resources] == ["number"]
        assert not types.accepts((1, 2), {})


async def test_callable_objects_and_functions_that_return_generators_make_resources(memory_queue):
    for make in (
        resource_tasks.MakeReport(),
        lambda: resource_tasks.make_report("plain"),
        lambda: resource_tasks.make_report_async("async"),
    ):
        resource_tasks.use_number.__annotations__["it"] = Annotated[str, Resource(make)]
        made = await run(memory_queue, resource_tasks.use_number)

        assert made in ("report of 7", "report of plain", "report of async")


def test_a_name_for_type_checkers_only_does_not_hide_a_resource():
    types = FunctionTypes(resource_tasks.for_type_checkers, "x.f")

    assert [each.name for each in types.resources] == ["it"]
    assert types.accepts((3,), {})


def test_positions_of_secrets_are_those_of_the_callers_arguments():
    def send(pool: Annotated[int, Resource(int)], to: str, password: str) -> None: ...

    assert secret_parameters(send) == (1, "password")


# Mistakes


@pytest.mark.parametrize(
    ("func", "message"),
    [
        (resource_tasks.use_circle, "need each other in a circle: need_itself needs need_itself"),
        (resource_tasks.use_mixed, "worker_needs_run is made once for a worker, and cannot need"),
        (resource_tasks.use_needy, "needs_text has a parameter 'dsn': give it a default"),
    ],
)
async def test_resources_that_cannot_be_made_are_a_permanent_error(memory_queue, func, message):
    handle = await memory_queue.enqueue(func)
    async with memory_queue.worker():
        with pytest.raises(TaskFailed, match=message):
            await handle.result(30)

    assert (await memory_queue.dead.get(handle.id)).failure_reason == "permanent"


def test_a_resource_is_made_of_a_function():
    with pytest.raises(InvalidTask, match="pass the function, do not call it"):
        Resource(resource_tasks.make_number())  # type: ignore[arg-type]
    with pytest.raises(InvalidTask, match="expected 'worker' or 'run'"):
        Resource(resource_tasks.make_number, scope="task")  # type: ignore[arg-type]

    def unmade(pool: Annotated[int, Resource]) -> None: ...

    with pytest.raises(InvalidTask, match=r"as in Resource\(make_pool\)"):
        FunctionTypes(unmade, "x.unmade")

    def make_here() -> int:
        return 1

    def unknown(pool: Annotated[int, Resource(make_here)] = INJECTED) -> None: ...

    with pytest.raises(InvalidTask, match="its names do not exist in the module"):
        FunctionTypes(unknown, "x.unknown")

    def hidden(pool: Annotated[int | None, Resource(make_here)] = None) -> None: ...

    with pytest.raises(InvalidTask, match="its names do not exist in the module"):
        FunctionTypes(hidden, "x.hidden")

    def misspelt(pool: Annotated[int | None, Resource(int, scope="task")] = None) -> None: ...

    with pytest.raises(InvalidTask, match="expected 'worker' or 'run'"):
        FunctionTypes(misspelt, "x.misspelt")
    with pytest.raises(InvalidTask, match="this object has no hash; pass a function"):
        Resource(resource_tasks.Unhashable())

    def positional(pool: Annotated[int, Resource(int)], /) -> None: ...

    with pytest.raises(InvalidTask, match="a parameter that can be passed by name"):
        FunctionTypes(positional, "x.positional")


def test_a_function_that_is_called_directly_says_what_is_missing():
    with pytest.raises(AttributeError, match="pass a value when you call the function yourself"):
        asyncio.run(resource_tasks.use_pool(1))
    assert repr(INJECTED) == "INJECTED"
    assert asyncio.run(resource_tasks.use_pool(1, pool=resource_tasks.Pool()))[2] is True


async def test_a_run_that_is_cancelled_while_a_resource_is_made_leaves_it_to_the_others(
    memory_queue,
):
    gate = asyncio.Event()
    made: list[str] = []

    async def make_slowly() -> str:
        await gate.wait()
        made.append("made")
        return "slow"

    resource_tasks.use_number.__annotations__["it"] = Annotated[str, Resource(make_slowly)]
    first = await memory_queue.enqueue(resource_tasks.use_number)
    pool = memory_queue.worker(concurrency=2)
    async with pool:
        await until(lambda: pool.stats().active_workers == 1)
        second = await memory_queue.enqueue(resource_tasks.use_number, task_context=1)
        await first.cancel()
        await until(lambda: pool.stats().active_workers == 1)
        gate.set()
        assert await second.result(30) == "slow"

    assert made == ["made"]


def test_resources_of_the_same_function_are_the_same():
    one, other = Resource(resource_tasks.make_number), Resource(resource_tasks.make_number)

    assert one == other
    assert hash(one) == hash(other)
    assert one != Resource(resource_tasks.make_number, scope="run")
