"""Middleware around each run: stacked, with the live exception and the result; and hooks that stack."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest

from omniq import (
    AsyncTaskQueue,
    Discard,
    InvalidTask,
    InvalidValue,
    Resource,
    SettingsError,
    Snooze,
    Task,
    TaskCancelled,
    TaskContext,
    TaskError,
    TaskFailed,
    TaskQueue,
    TaskStatus,
    current_task,
)
from omniq.events import HookFailed
from omniq.tasks.options import check_options
from omniq.worker.middleware import CallNext
from tests.worker import resource_tasks, sample_tasks
from tests.worker.recorder import until

MODULE = "tests.worker.resource_tasks"


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of what the sample module notes, one line for each event."""
    path = tmp_path / "noted"
    path.touch()
    monkeypatch.setenv(resource_tasks.LOG, str(path))
    return path


def noted(log: Path) -> list[str]:
    return [line.rpartition(" pid=")[0] for line in log.read_text().splitlines()]


async def result_of(
    queue: AsyncTaskQueue, middleware: list[Any], func: Any, *args: Any, **options: Any
) -> Any:
    handle = await queue.options(**{"max_retries": 0, **options}).enqueue(func, *args)
    async with queue.worker(middleware=middleware):
        return await handle.result(30)


class Seen:
    """A middleware that remembers what it saw."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.errors: list[BaseException] = []

    async def __call__(self, ctx: TaskContext, call_next: CallNext) -> None:
        assert current_task() is ctx
        try:
            self.values.append(await call_next())
        except BaseException as error:
            self.errors.append(error)
            raise


# Around a run


async def test_the_first_middleware_is_the_outermost(queue, log):
    middleware = [resource_tasks.first, f"{MODULE}.second"]

    assert await result_of(queue, middleware, resource_tasks.double, 4) == 8
    await until(lambda: "on_success (4,) 8" in noted(log))
    assert noted(log)[:4] == [
        f"first before {MODULE}.double",
        "second before",
        "second got 8",
        "first after",
    ]


@pytest.mark.parametrize(
    "func", [sample_tasks.add, sample_tasks.add_in_thread, resource_tasks.double]
)
async def test_it_gets_the_result_of_a_run_on_the_loop_and_in_a_thread(memory_queue, func):
    seen = Seen()
    result = await result_of(memory_queue, [seen], func, 1)

    assert seen.values == [result]


async def test_it_gets_the_live_exception_of_the_loop_and_of_a_thread(memory_queue):
    for func in (resource_tasks.use_session, resource_tasks.use_session_in_a_thread):
        seen = Seen()
        with pytest.raises(TaskFailed, match="ValueError: the function failed"):
            await result_of(memory_queue, [seen], func, "fail")

        (error,) = seen.errors
        assert type(error) is ValueError
        frames = [entry.name for entry in _frames(error)]
        assert func.__name__ in frames


async def test_of_a_child_process_it_gets_what_the_child_reports(memory_queue):
    seen = Seen()
    handle = await memory_queue.options(max_retries=0).enqueue(
        resource_tasks.use_all_in_a_process, -1
    )
    good = await memory_queue.enqueue(resource_tasks.use_all_in_a_process, 3)
    async with memory_queue.worker(
        middleware=[seen], lifespan=resource_tasks.lifespan, concurrency=1
    ):
        with pytest.raises(TaskFailed):
            await handle.result(30)
        assert (await good.result(30))[0] == 3

    (error,) = seen.errors
    assert isinstance(error, TaskError)
    assert (error.error_type, error.message) == ("ValueError", "negative")
    assert seen.values[0][0] == 3


async def test_the_failure_that_is_stored_is_that_of_a_worker_without_middleware(memory_queue):
    stored = []
    for middleware in ([], [Seen()]):
        for func in (resource_tasks.use_session, resource_tasks.use_session_in_a_thread):
            handle = await memory_queue.options(max_retries=0).enqueue(func, "fail")
            async with memory_queue.worker(middleware=middleware):
                with pytest.raises(TaskFailed):
                    await handle.result(30)
            (attempt,) = await memory_queue.history(handle.id)
            stored.append((attempt.error.error_type, attempt.error.message))

    assert set(stored) == {("ValueError", "the function failed")}
    assert len(stored) == 4


async def test_a_function_that_exits_does_not_end_the_worker(memory_queue):
    async def in_another_task(ctx: TaskContext, call_next: CallNext) -> None:
        await asyncio.create_task(call_next())  # type: ignore[arg-type]

    for func in (resource_tasks.leave, resource_tasks.leave_thread):
        seen = Seen()
        with pytest.raises(TaskFailed, match="SystemExit: 7") as raised:
            await result_of(memory_queue, [seen, in_another_task], func)

        assert raised.value.error is not None
        assert raised.value.error.error_type == "SystemExit"
        (error,) = seen.errors
        assert isinstance(error, TaskError)
        assert error.error_type == "SystemExit"


async def test_context_variables_of_middleware_reach_the_function(memory_queue):
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant")
    seen: list[str] = []

    async def set_tenant(ctx: TaskContext, call_next: CallNext) -> None:
        tenant.set(f"tenant {ctx.metadata['tenant']}")
        await call_next()

    def read() -> Iterator[None]:
        seen.append(tenant.get("none"))
        yield

    resource_tasks.use_number.__annotations__["it"] = Annotated[Any, Resource(read, scope="run")]
    await result_of(memory_queue, [set_tenant], resource_tasks.use_number, metadata={"tenant": 7})

    assert seen == ["tenant 7"]


async def test_an_exception_of_middleware_fails_the_run_which_is_retried(queue):
    runs: list[int] = []

    async def broken_at_first(ctx: TaskContext, call_next: CallNext) -> None:
        runs.append(ctx.attempt)
        if ctx.attempt == 1:
            raise OSError("the middleware is broken")
        await call_next()

    handle = await queue.enqueue(resource_tasks.double, 4)
    async with queue.worker(middleware=[broken_at_first], base_retry_delay=0):
        assert await handle.result(30) == 8

    assert runs == [1, 2]
    (attempt,) = await queue.history(handle.id)
    assert attempt.error.message == "the middleware is broken"


async def test_middleware_can_end_a_run_as_the_function_can(memory_queue):
    async def discard(ctx: TaskContext, call_next: CallNext) -> None:
        raise Discard("not today")

    async def translate(ctx: TaskContext, call_next: CallNext) -> None:
        try:
            await call_next()
        except ValueError as error:
            raise Snooze(3600, reason="later") from error

    with pytest.raises(TaskCancelled, match="not today"):
        await result_of(memory_queue, [discard], resource_tasks.double, 1)
    handle = await memory_queue.enqueue(resource_tasks.use_session, "fail")
    await memory_queue.worker(middleware=[translate]).run_until_empty()
    assert (await memory_queue.get_task(handle.id)).attempts == 0
    assert (await memory_queue.get_task(handle.id)).status is TaskStatus.PENDING


async def test_middleware_that_does_not_call_on_fails_the_run_with_a_sentence(queue, log):
    with pytest.raises(TaskFailed, match=r"never_calls did not await call_next\(\)") as raised:
        await result_of(queue, [resource_tasks.never_calls], resource_tasks.double, 1)

    assert raised.value.error is not None
    assert raised.value.error.error_type == "MiddlewareError"
    assert noted(log) == ["never calls"]


async def test_middleware_that_does_not_wait_or_calls_twice_fails_the_run(memory_queue):
    started: list[Any] = []

    async def no_wait(ctx: TaskContext, call_next: CallNext) -> None:
        started.append(asyncio.ensure_future(call_next()))
        await asyncio.sleep(0)

    async def twice(ctx: TaskContext, call_next: CallNext) -> None:
        await call_next()
        await call_next()

    with pytest.raises(TaskFailed, match="so the function was not waited for"):
        await result_of(memory_queue, [no_wait], sample_tasks.add_in_thread, 1)
    with pytest.raises(TaskFailed, match=r"call_next\(\) was called twice"):
        await result_of(memory_queue, [twice], resource_tasks.double, 1)
    await asyncio.wait(started)


async def test_middleware_cannot_hide_an_exception_or_replace_a_result(memory_queue):
    async def hide(ctx: TaskContext, call_next: CallNext) -> str:
        with contextlib.suppress(Exception):
            await call_next()
        return "replaced"

    assert await result_of(memory_queue, [hide], sample_tasks.add, 1, 2) == 3
    for func in (resource_tasks.use_session, resource_tasks.use_session_in_a_thread):
        with pytest.raises(TaskFailed, match="the function failed"):
            await result_of(memory_queue, [hide], func, "fail")


async def test_a_timeout_and_a_cancellation_are_seen_and_cannot_be_hidden(memory_queue):
    seen = Seen()

    async def hide(ctx: TaskContext, call_next: CallNext) -> None:
        with contextlib.suppress(BaseException):
            await call_next()

    with pytest.raises(TaskFailed, match="TaskTimeout"):
        await result_of(memory_queue, [hide, seen], resource_tasks.use_hanging, timeout=0.1)

    assert [type(error) for error in seen.errors] == [asyncio.CancelledError]


async def test_a_resource_that_fails_is_seen_by_middleware(memory_queue):
    resource_tasks._tries.clear()
    seen = Seen()
    with pytest.raises(TaskFailed, match="not there yet"):
        await result_of(memory_queue, [seen], resource_tasks.use_late)

    assert isinstance(seen.errors[0], ConnectionError)


def test_what_is_no_middleware_is_refused():
    queue = AsyncTaskQueue("memory:")
    wrong: Any
    for wrong in (resource_tasks.make_number, 3):
        with pytest.raises(InvalidValue, match=r"expected async def around\(ctx, call_next\)"):
            queue.worker(middleware=[wrong])
    with pytest.raises(InvalidValue, match="expected a list"):
        queue.worker(middleware=f"{MODULE}.first")
    with pytest.raises(SettingsError, match=r"middleware='app\.none': it cannot be imported"):
        queue.worker(middleware=["app.none"])


class WithOptions:
    def __init__(self, name: str) -> None:
        self.names = [name]

    async def __call__(self, ctx: TaskContext, call_next: CallNext) -> None:
        await call_next()


def test_a_class_that_needs_arguments_is_refused_with_a_sentence():
    queue = AsyncTaskQueue("memory:")
    with pytest.raises(InvalidValue, match="calling the class without arguments fails"):
        queue.worker(middleware=[WithOptions])  # type: ignore[list-item]
    queue.worker(middleware=[WithOptions("mine")])


async def test_a_partial_function_is_a_middleware(memory_queue):
    seen: list[str] = []

    async def named(name: str, ctx: TaskContext, call_next: CallNext) -> None:
        seen.append(name)
        if name == "broken":
            return
        await call_next()

    middleware = [functools.partial(named, "mine")]
    assert await result_of(memory_queue, middleware, sample_tasks.add, 1, 2) == 3
    assert seen == ["mine"]
    with pytest.raises(TaskFailed, match=r"<locals>\.named did not await call_next\(\)"):
        await result_of(memory_queue, [functools.partial(named, "broken")], sample_tasks.add, 1, 2)


# Hooks of a task


async def test_on_success_is_called_with_the_result_once_it_is_recorded(queue, log):
    handle = await queue.enqueue(resource_tasks.double, 4)
    async with queue.worker():
        await until(lambda: noted(log))
        assert (await queue.get_task(handle.id)).status is TaskStatus.SUCCESS

    assert noted(log) == ["on_success (4,) 8"]


async def test_on_success_is_not_called_for_a_failure_and_its_error_changes_nothing(memory_queue):
    pool = memory_queue.worker()
    emitted: list[HookFailed] = []
    pool.events.subscribe(emitted.append, kinds=(HookFailed,))
    handle = await memory_queue.enqueue(sample_tasks.succeed_with_broken_hook, 1)
    failing = await memory_queue.options(max_retries=0).enqueue(
        sample_tasks.succeed_with_broken_hook, -1
    )
    async with pool:
        assert await handle.result(30) == 1
        with pytest.raises(TaskFailed):
            await failing.result(30)
        await until(lambda: emitted)

    assert [(each.hook, each.error_message) for each in emitted] == [
        ("on_success", "the hook is broken")
    ]


def test_a_hook_is_a_function():
    with pytest.raises(InvalidTask, match=r"on_success 3: expected a function of \(task, result\)"):
        check_options(on_success=3)


# Around an enqueue


def test_wrappers_of_an_enqueue_stack_in_the_order_of_their_addition(log):
    @contextlib.contextmanager
    def wrapper(name: str, tasks: list[Task]) -> Iterator[list[Task]]:
        resource_tasks.note(f"{name} before")
        yield [
            Task(**{**_fields(task), "metadata": {**task.metadata, name: len(task.metadata)}})
            for task in tasks
        ]
        resource_tasks.note(f"{name} after")

    with TaskQueue("memory:") as queue:
        early = queue.options(priority=1)
        queue.wrap_enqueue(lambda tasks: wrapper("one", tasks))
        queue.wrap_enqueue(lambda tasks: wrapper("two", tasks))
        handles = [
            queue.enqueue(resource_tasks.double, 1),
            queue.options(priority=2).enqueue(resource_tasks.double, 1),
            early.enqueue(resource_tasks.double, 1),
        ]
        tasks = [queue.get_task(handle.id) for handle in handles]
        stored = [task.metadata for task in tasks if task is not None]

    assert stored == [{"one": 0, "two": 1}] * 3
    assert noted(log) == ["one before", "two before", "two after", "one after"] * 3


def _fields(task: Task) -> dict[str, Any]:
    return {name: getattr(task, name) for name in task.__struct_fields__}


def _frames(error: BaseException) -> list[Any]:
    return list(traceback.extract_tb(error.__traceback__))
