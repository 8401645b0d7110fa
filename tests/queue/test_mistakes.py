"""Mistakes that people make get a sentence that says what to write instead."""

from __future__ import annotations

import asyncio
import pickle
import socket
from pathlib import Path
from typing import Any

import pytest

from omniq import AsyncTaskQueue, TaskContext, TaskQueue, Worker, WorkerPool, task
from omniq.errors import (
    InvalidTask,
    InvalidValue,
    RemoteTraceback,
    ResultTimeout,
    SettingsError,
    StorageClosed,
    StorageError,
    TaskFailed,
)
from omniq.integrations.asgi import lifespan


@task
def add(a, b=2):
    return a + b


def test_a_queue_that_is_not_open_says_how_to_open_it():
    with pytest.raises(StorageClosed, match=r"'with TaskQueue\(…\) as queue:'.*or call open\(\)"):
        TaskQueue("memory://").enqueue(add, 1)


async def test_an_async_queue_that_is_not_open_says_how_to_open_it():
    with pytest.raises(StorageClosed, match=r"'async with AsyncTaskQueue\(…\) as queue:'"):
        await AsyncTaskQueue("memory://").enqueue(add, 1)


@pytest.mark.parametrize("given", ["abc", b"abc", {"a": 1}, 5])
def test_arguments_of_many_calls_that_are_no_list_are_refused(given: Any):
    with (
        TaskQueue("memory://") as queue,
        pytest.raises(InvalidTask, match=f"expected a list .* not {type(given).__name__}"),
    ):
        queue.enqueue_many(add, given)


@pytest.mark.parametrize("given", [5, {"a": 1}])
def test_many_calls_that_are_no_list_are_refused(given: Any):
    with TaskQueue("memory://") as queue, pytest.raises(InvalidTask, match="list of calls, not"):
        queue.enqueue_many(given)


@pytest.mark.parametrize("given", [5, Path("tasks.db")])
def test_a_url_that_is_no_text_is_refused(given: Any):
    with pytest.raises(SettingsError, match="storage URL: expected text such as 'sqlite:"):
        TaskQueue(given).open()


def test_space_around_a_url_does_not_count(tmp_path):
    with TaskQueue(f" sqlite:///{tmp_path}/tasks.db\n") as queue:
        queue.enqueue(add, 1)

    assert (tmp_path / "tasks.db").exists()


def test_a_queue_that_is_passed_to_another_process_says_what_to_do():
    with TaskQueue("memory://") as queue:
        for given in (queue, queue.enqueue(add, 1), AsyncTaskQueue("memory://")):
            with pytest.raises(TypeError, match="a queue cannot be pickled, nor a handle"):
                pickle.dumps(given)


@pytest.mark.parametrize("name", ["queues", "allow"])
def test_text_in_place_of_a_list_is_refused_by_a_pool(name):
    options: Any = {name: "mail"}
    with (
        TaskQueue("memory://") as queue,
        pytest.raises(InvalidValue, match=rf"{name}='mail': expected a list, such as \['mail'\]"),
    ):
        queue.worker(**options)


@pytest.mark.parametrize("given", ["sqlite:///tasks.db", TaskQueue("memory://")])
def test_a_pool_of_something_else_than_a_storage_says_what_to_write(given: Any):
    with pytest.raises(InvalidValue, match=r"write queue\.worker\(…\)"):
        WorkerPool(given)


@pytest.mark.parametrize("name", ["modules", "queues", "listeners"])
def test_text_in_place_of_a_list_is_refused_by_a_worker(name):
    options: Any = {"modules": ["tests"], name: "mail"}
    with pytest.raises(InvalidValue, match=f"{name}='mail': expected a list"):
        Worker("memory://", **options)


def test_text_in_place_of_a_list_is_refused_by_a_lifespan():
    with pytest.raises(InvalidValue, match="worker='app': expected a list"):
        lifespan("memory://", worker="app")


async def test_text_in_place_of_a_list_is_refused_by_a_storage():
    async with AsyncTaskQueue("memory://") as queue:
        with pytest.raises(InvalidValue, match="queues='mail': expected a list"):
            await queue.storage.reserve(1, queues="mail")


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("dely", "delay"),
        ("countdown", "delay"),
        ("_defer_by", "delay"),
        ("_defer_until", "eta"),
        ("job_timeout", "timeout"),
        ("retries", "max_retries"),
        ("rate_limit", "rate"),
    ],
)
def test_an_unknown_option_names_the_one_that_was_meant(option, meant):
    expected = rf"^options\(…\): there is no option '{option}'; did you mean {meant}\?$"
    options: Any = {option: 5}
    with TaskQueue("memory://") as queue, pytest.raises(InvalidTask, match=expected):
        queue.options(**options)


def test_an_unknown_option_lists_those_that_can_be_given_there():
    with TaskQueue("memory://") as queue, pytest.raises(InvalidTask) as refusal:
        queue.options(bind=True)  # type: ignore[call-arg]
    text = str(refusal.value)
    assert all(name in text for name in ("delay", "eta", "task_id", "connection"))
    assert not any(name in text for name in ("executor", "on_dead", "errors"))


def test_an_option_of_the_decorator_is_refused_for_a_call():
    expected = r"executor is an option of @task, not of options\(…\)"
    with TaskQueue("memory://") as queue, pytest.raises(InvalidTask, match=expected):
        queue.options(executor="thread")  # type: ignore[call-arg]


def test_an_option_of_a_call_is_refused_for_the_decorator():
    with pytest.raises(InvalidTask, match=r"delay is an option of options\(…\), not of @task"):
        task(delay=5)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["delay", "dely", "countdown"])
def test_the_decorator_names_the_place_for_an_option_of_a_call(name):
    given: Any = {name: 5}
    with pytest.raises(InvalidTask, match=r"queue\.options\(delay=…\)"):
        task(**given)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("concurency", r"did you mean concurrency\?"), ("bind", "the options are concurrency, ")],
)
def test_an_unknown_option_of_a_worker_gets_a_sentence(name, hint):
    expected = rf"queue\.worker\(…\): there is no option '{name}'; {hint}"
    given: Any = {name: 3}
    with TaskQueue("memory://") as queue, pytest.raises(InvalidValue, match=expected):
        queue.worker(**given)


@pytest.mark.parametrize("scheme", ["redis", "postgresql"])
def test_a_server_that_does_not_answer_gets_advice(scheme):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"{scheme}://127.0.0.1:{free.getsockname()[1]}/0"
        with pytest.raises(StorageError, match=r"nothing listens there: is the server running"):
            asyncio.run(_open(url))


@pytest.mark.parametrize("scheme", ["redis", "postgresql"])
def test_an_unknown_host_gets_advice(scheme):
    with pytest.raises(StorageError, match=r"is the name of the host right\?"):
        asyncio.run(_open(f"{scheme}://no-such-host.invalid/0"))


async def _open(url: str) -> None:
    async with AsyncTaskQueue(url) as queue:
        await queue.stats()


def test_a_result_that_does_not_come_says_why():
    with TaskQueue("memory://") as queue:
        handle = queue.enqueue(add, 1)
        with pytest.raises(
            ResultTimeout, match=r"no result within 0.01 s: No worker is alive; start"
        ):
            handle.result(timeout=0.01)


def test_a_failed_result_has_the_traceback_of_the_run_as_its_cause():
    with TaskQueue("memory://") as queue:
        handle = queue.options(max_retries=0).enqueue(add, 1, "2")
        with queue.worker(), pytest.raises(TaskFailed) as failure:
            handle.result(timeout=20)
    assert isinstance(failure.value.__cause__, RemoteTraceback)
    shown = str(failure.value.__cause__)
    assert "return a + b" in shown
    assert shown.count("  File ") == 1, "a frame of omniq is shown"


@task
def context_last(region: str, ctx: TaskContext) -> None: ...


async def test_a_context_that_is_not_the_first_parameter_is_named():
    async with AsyncTaskQueue("memory://") as queue:
        with pytest.raises(InvalidTask, match="must be the first parameter, and ctx is not"):
            await queue.enqueue(context_last, "eu")  # type: ignore[call-overload]
