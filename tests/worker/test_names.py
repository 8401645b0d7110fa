"""`@task(name=…, aliases=…)`: tasks are stored under a name that stays when the function moves."""

from __future__ import annotations

import asyncio
import os
import sys
from types import FunctionType, ModuleType
from typing import Any

import pytest

from omniq import (
    AsyncTaskQueue,
    AsyncWorkerPool,
    InvalidTask,
    SettingsError,
    TaskQueue,
    TaskStatus,
    UnmarkedFunctionWarning,
    task,
)
from omniq.errors import ForbiddenFunction, FunctionNotFound
from omniq.storage.memory import MemoryStorage
from omniq.tasks.function_lookup import MARKED
from omniq.tasks.functions import FunctionCache, path_of
from omniq.tasks.passed_functions import PassedFunctions
from omniq.testing.builders import a_task
from tests.worker import named_tasks

HERE = named_tasks.__name__
NAMES = ("mail.send", "old_shop.mails.send_mail", f"{HERE}.send")


@pytest.mark.parametrize("allow", [None, [HERE], ["tests.worker"]], ids=str)
async def test_a_task_runs_under_the_name_each_alias_and_the_path(store, allow):
    async with store.another() as storage:
        await storage.enqueue_many(
            [
                a_task(f"t{number}", func_path=name, args=(name,))
                for number, name in enumerate(NAMES)
            ]
        )
        await AsyncWorkerPool(storage, allow=allow).run_until_empty()
        results = [await storage.get_result(f"t{number}") for number in range(len(NAMES))]

    assert [result and result.result for result in results] == [f"sent to {name}" for name in NAMES]


async def test_the_name_is_stored_and_shown_wherever_the_function_is(store):
    async with AsyncTaskQueue(store.another()) as queue:
        handle = await queue.enqueue(named_tasks.write_report)
        stored = await queue.get_task(handle.id)
        await queue.worker(concurrency=1).run_until_empty()
        (letter,) = await queue.dead.list()
        found = await queue.list_tasks(func_path="mail.report")

    assert stored is not None
    assert stored.func_path == "mail.report"
    assert letter.task_type == "mail.report"
    assert [each.id for each in found] == [handle.id]


async def test_a_task_can_be_enqueued_by_its_name(store):
    async with AsyncTaskQueue(store.another()) as queue:
        handle = await queue.enqueue("mail.send", "a")
        async with queue.worker():
            assert await handle.result(timeout=20) == "sent to a"


@pytest.mark.timeout(60)
async def test_a_child_process_finds_a_function_by_its_name(store):
    async with AsyncTaskQueue(store.another()) as queue:
        handle = await queue.enqueue(named_tasks.archive, 5)
        async with queue.worker():
            func_path, number, pid = await handle.result(timeout=40)

    assert (func_path, number) == ("mail.archive", 5)
    assert pid != os.getpid()


def test_a_worker_of_other_modules_does_not_claim_a_name(tmp_path):
    with TaskQueue(MemoryStorage()) as queue:
        handle = queue.enqueue("mail.send", "a")
        left = queue.worker(allow=["tests.worker.service_a"]).run_until_empty()

        assert left == 1
        assert handle.status() is TaskStatus.PENDING
    with pytest.raises(ForbiddenFunction):
        FunctionCache(["tests.worker.service_a"]).resolve("mail.send")


# Names that are refused


@pytest.mark.security("S06")
@pytest.mark.parametrize(
    "bad",
    ["", "send", "mail.", ".mail", "mail..send", "mail send.x", "mail/send.x", "mail.send;", "mäil.send",
     "mail.1", "mail:send", "mail.send\n", "mail.\u202esend", "mail._send", "mail.__class__.x",
     "os.system", "subprocess.run", "omniq.x", "a." + "b" * 600, 5, None.__class__],
)  # fmt: skip
def test_a_name_that_is_no_name_is_refused(bad):
    with pytest.raises(InvalidTask, match="name"):
        task(name=bad)


def test_aliases_are_a_list_of_names():
    with pytest.raises(InvalidTask, match="list"):
        task(aliases="old.path")
    with pytest.raises(InvalidTask, match="such as"):
        task(aliases=["old"])


@pytest.fixture
def module(monkeypatch):
    """Adds loaded modules with marked functions: `module("a", send={"name": "x.y"})`."""

    def make(module_name: str, **functions: dict[str, Any] | None) -> ModuleType:
        made = ModuleType(module_name)
        monkeypatch.setitem(sys.modules, module_name, made)
        for function_name, options in functions.items():

            def body() -> str:
                return "ran"

            func = FunctionType(body.__code__, vars(made), function_name)
            func.__module__, func.__qualname__ = module_name, function_name
            setattr(made, function_name, func if options is None else task(**options)(func))
        return made

    yield make
    monkeypatch.undo()
    MARKED.search()


async def test_two_functions_of_one_name_are_an_error_that_names_both(module):
    first = module("first_tasks", send={"name": "twice.send"})
    module("second_tasks", post={"aliases": ["twice.send"]})
    both = r"first_tasks\.send.*second_tasks\.post"
    async with AsyncTaskQueue(MemoryStorage()) as queue:
        with pytest.raises(SettingsError, match=both):
            await queue.enqueue(first.send)
        with pytest.raises(SettingsError, match=both):
            await queue.worker().start()
        with pytest.raises(SettingsError, match=both):
            await queue.worker(allow=["first_tasks", "second_tasks"]).start()
        # Only one of them is a function of this worker.
        await queue.worker(allow=["first_tasks"]).run_until_empty()


@pytest.mark.security("S06")
def test_a_name_that_a_later_import_makes_ambiguous_is_not_taken_for_a_path(module):
    first = module("first_tasks", send={"name": "twice.send"})
    resolved, other = FunctionCache(), FunctionCache(passed=PassedFunctions())
    assert resolved.resolve("twice.send") is first.send
    module("second_tasks", post={"name": "twice.send"})
    for cache in (resolved, other):
        cache.refresh()

    assert "twice.send" not in other.runnable.names
    with pytest.raises(FunctionNotFound, match=r"first_tasks\.send and second_tasks\.post"):
        other.resolve("twice.send")
    # What was resolved stays what it is: a child process gets the same function.
    assert resolved.resolve("twice.send") is first.send
    assert resolved.own_path("twice.send") == "first_tasks.send"


@pytest.mark.security("S06")
async def test_an_enqueued_function_does_not_open_another_one_that_has_its_name_as_path(module):
    private = module("first_tasks", _send={"name": "other_place.send"})
    async with AsyncTaskQueue(MemoryStorage()) as queue:
        with pytest.warns(UnmarkedFunctionWarning, match="leading underscore"):
            handle = await queue.enqueue(private._send)
        module("other_place", send=None)
        await queue.worker().run_until_empty()

        assert await handle.status() is TaskStatus.PENDING


@pytest.mark.parametrize("options", [None, {}], ids=["plain", "marked"])
async def test_a_name_cannot_be_the_path_of_another_function(module, options):
    named = module("first_tasks", send={"name": "real_tasks.send"})
    module("real_tasks", send=options)
    async with AsyncTaskQueue(MemoryStorage()) as queue:
        with pytest.raises(SettingsError, match="the path of another function"):
            await queue.enqueue(named.send)
        with pytest.raises(SettingsError, match="the path of another function"):
            await queue.worker(allow=["first_tasks"]).start()


async def test_an_alias_may_be_a_place_that_still_imports_the_function(module):
    moved = module("new_place", send={"aliases": ["old_place.send"]})
    module("old_place").send = moved.send
    async with AsyncTaskQueue(MemoryStorage()) as queue:
        handle = await queue.enqueue("old_place.send")
        await queue.worker().run_until_empty()

        assert await handle.result(timeout=30) == "ran"


async def test_a_static_method_may_have_a_name(monkeypatch):
    made = ModuleType("classy_tasks")
    monkeypatch.setitem(sys.modules, "classy_tasks", made)
    source = "class Mail:\n @staticmethod\n @task(name='classy.send')\n def send(): return 'ran'"
    exec(f"from omniq import task\n{source}", vars(made))
    async with AsyncTaskQueue(MemoryStorage()) as queue:
        handle = await queue.enqueue(made.Mail.send)
        await queue.worker(allow=["classy_tasks"]).run_until_empty()
        task_of_it = await queue.get_task(handle.id)

        assert await handle.result(timeout=30) == "ran"
    assert task_of_it is not None
    assert task_of_it.func_path == "classy.send"
    monkeypatch.undo()
    MARKED.search()


async def test_a_name_that_is_imported_later_is_claimed(module):
    async with AsyncTaskQueue(MemoryStorage()) as queue, queue.worker(poll_interval=0.05):
        await queue.storage.enqueue(a_task("t", func_path="later.send"))
        await asyncio.sleep(0)
        module("later_tasks", send={"name": "later.send"})

        assert await queue.handle("t").result(timeout=20) == "ran"


def test_the_decorator_registers_nothing():
    MARKED.search()
    before = dict(MARKED.named)
    scope: dict[str, Any] = {"task": task, "__name__": "nowhere"}
    exec("@task(name='never.registered')\ndef send(): ...", scope)
    MARKED.search()

    assert dict(MARKED.named) == before


def test_the_path_of_a_named_function_is_its_name():
    assert path_of(named_tasks.send) == "mail.send"
    assert FunctionCache([HERE]).own_path("mail.send") == f"{HERE}.send"
