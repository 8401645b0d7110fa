"""The lifespan of a worker process: entered before the first claim, left after the last outcome."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omniq import (
    AsyncTaskQueue,
    InvalidValue,
    LifespanFailed,
    Settings,
    SettingsError,
    ShutdownTimeout,
    TaskFailed,
    TaskQueue,
    TaskStatus,
    Worker,
)
from omniq.events import StorageFailing, WorkerProblem, WorkerStarted
from omniq.integrations.asgi import lifespan as asgi_lifespan
from omniq.storage.memory import MemoryStorage
from omniq.testing.manual import AsyncManualQueue, ManualQueue
from tests.acceptance.command import WorkerCommand, wait_until
from tests.worker import resource_tasks
from tests.worker.recorder import until

ROOT = Path(__file__).parents[2]
MODULE = "tests.worker.resource_tasks"
StartWorker = Callable[..., WorkerCommand]


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of what the sample module notes, one line for each event."""
    path = tmp_path / "noted"
    path.touch()
    monkeypatch.setenv(resource_tasks.LOG, str(path))
    return path


def noted(log: Path) -> list[str]:
    return [line.rpartition(" pid=")[0] for line in log.read_text().splitlines()]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.db?durability=os"


@pytest.fixture
def start_worker(url: str, log: Path) -> Iterator[StartWorker]:
    """Start `omniq worker` for the sample module; it ends with the test."""
    commands: list[WorkerCommand] = []

    def start(*arguments: str, **environ: str) -> WorkerCommand:
        command = WorkerCommand(
            ROOT,
            *arguments,
            modules=(MODULE,),
            OMNIQ_URL=url,
            **{resource_tasks.LOG: str(log)},
            **environ,
        )
        commands.append(command)
        return command

    yield start
    for command in commands:
        command.kill()
        print(command.text)  # noqa: T201 - pytest shows it when the test has failed


# Pools


async def test_what_the_lifespan_yields_is_the_state_of_every_task(queue, log):
    one = await queue.enqueue(resource_tasks.greet, "a")
    two = await queue.enqueue(resource_tasks.greet_in_a_thread, "b")
    async with queue.worker(lifespan=resource_tasks.lifespan):
        assert [await one.result(30), await two.result(30)] == ["hello, a", "hello, b"]
        assert noted(log) == ["lifespan entered"]

    assert noted(log) == ["lifespan entered", "lifespan left"]


async def test_it_is_entered_before_the_first_claim_and_left_after_the_last_outcome(queue):
    order: list[str] = []

    class Lifespan:
        async def __aenter__(self) -> None:
            order.append(str((await queue.get_task(handle.id)).status))

        async def __aexit__(self, *details: object) -> None:
            order.append(str((await queue.get_task(handle.id)).status))

    handle = await queue.enqueue(resource_tasks.use_pool, 1)
    async with queue.worker(lifespan=Lifespan):
        await until(lambda: order)
        await handle.result(30)

    assert order == ["pending", "success"]


async def test_a_lifespan_that_raises_stops_the_start_and_nothing_is_claimed(queue, log):
    handle = await queue.enqueue(resource_tasks.greet, "a")
    pool = queue.worker(lifespan=resource_tasks.raising)
    with pytest.raises(LifespanFailed, match="ConnectionError: no database at db:5432") as raised:
        await pool.start()

    assert isinstance(raised.value.__cause__, ConnectionError)
    assert "resource_tasks.py:" in str(raised.value)
    assert "sesame" not in str(raised.value)
    assert not pool.running
    assert pool.has_ended
    assert (await queue.get_task(handle.id)).status is TaskStatus.PENDING
    assert await queue.storage.workers() == []


async def test_a_lifespan_may_raise_anything(memory_queue):
    with pytest.raises(LifespanFailed, match="SystemExit: gone"):
        await memory_queue.worker(lifespan=resource_tasks.exiting).start()
    with pytest.raises(LifespanFailed, match="expected a function with @asynccontextmanager"):
        await memory_queue.worker(lifespan=resource_tasks.not_a_lifespan).start()


async def test_a_lifespan_that_hangs_ends_at_the_start_timeout(store):
    async with store.another(start_timeout=0.2) as storage:
        pool = AsyncTaskQueue(storage).worker(lifespan=resource_tasks.hanging)
        with pytest.raises(LifespanFailed, match=r"did not start within 0.2 s"):
            await pool.start()

        assert pool.has_ended


async def test_a_pool_can_be_started_again_after_its_lifespan_failed(memory_queue):
    is_broken = [True]

    async def lifespan() -> Any:
        if is_broken:
            raise ValueError(is_broken.pop())
        yield "fine"

    pool = memory_queue.worker(lifespan=lifespan)
    with pytest.raises(LifespanFailed):
        await pool.start()
    async with pool:
        assert await (await memory_queue.enqueue(resource_tasks.read_state)).result(30) == "fine"


async def test_a_teardown_that_raises_is_reported_and_hides_nothing(memory_queue, log):
    handle = await memory_queue.enqueue(resource_tasks.read_state)
    pool = memory_queue.worker(lifespan=resource_tasks.broken_teardown)
    emitted: list[WorkerProblem] = []
    pool.events.subscribe(emitted.append, kinds=(WorkerProblem,))
    async with pool:
        assert await handle.result(30) == "fine"

    assert noted(log) == ["teardown"]
    assert [each.activity for each in emitted] == ["close lifespan"]
    assert "the teardown is broken" in emitted[0].error


@pytest.mark.parametrize(
    ("lifespan", "message"),
    [
        (resource_tasks.exiting_teardown, "exiting_teardown raised SystemExit(4)"),
        (resource_tasks.cancelled_teardown, "cancelled_teardown raised CancelledError()"),
    ],
)
async def test_a_teardown_may_raise_anything(memory_queue, log, lifespan, message):
    pool = memory_queue.worker(lifespan=lifespan)
    emitted: list[WorkerProblem] = []
    pool.events.subscribe(emitted.append, kinds=(WorkerProblem,))
    async with pool:
        pass

    assert pool.has_ended
    assert noted(log) == ["teardown"]
    assert [each.activity for each in emitted] == ["close lifespan"]
    assert message in emitted[0].error


async def test_a_pool_that_ends_by_itself_does_not_wait_for_a_hanging_teardown(log):
    emitted: list[Any] = []
    storage = MemoryStorage(settings=Settings(shutdown_timeout=0.1))
    async with AsyncTaskQueue(storage) as queue:
        pool = queue.worker(lifespan=resource_tasks.hanging_teardown)
        pool.events.subscribe(emitted.append, kinds=(WorkerProblem, StorageFailing))
        assert await pool.run_until_empty() == 0

        assert pool.has_ended
    assert noted(log) == ["teardown"]
    assert [each.activity for each in emitted] == ["close lifespan"]
    assert "cut off at the end of the shutdown timeout" in emitted[0].error


async def test_a_teardown_that_hangs_is_cut_off_and_reported(memory_queue, log):
    pool = memory_queue.worker(lifespan=resource_tasks.hanging_teardown)
    emitted: list[WorkerProblem] = []
    pool.events.subscribe(emitted.append, kinds=(WorkerProblem,))
    await pool.start()
    with pytest.raises(ShutdownTimeout):
        await pool.stop(timeout=0.1)

    assert pool.has_ended
    assert noted(log) == ["teardown"]
    (failed,) = emitted
    assert failed.activity == "close lifespan"
    assert "hanging_teardown was cut off at the end of the shutdown timeout" in failed.error


async def test_a_lifespan_that_blocked_for_too_long_does_not_start_a_worker(store, log):
    async with store.another(start_timeout=0.2) as storage:
        pool = AsyncTaskQueue(storage).worker(lifespan=resource_tasks.entered_late)
        with pytest.raises(LifespanFailed, match=r"did not start within 0.2 s"):
            await pool.start()

        assert pool.has_ended
        assert noted(log) == ["entered late", "left"]


async def test_without_a_lifespan_the_state_says_how_to_name_one(memory_queue):
    handle = await memory_queue.options(max_retries=0).enqueue(resource_tasks.greet, "a")
    async with memory_queue.worker():
        with pytest.raises(TaskFailed, match="name it with omniq worker --lifespan"):
            await handle.result(30)


async def test_a_generator_function_is_a_lifespan(memory_queue, log):
    handle = await memory_queue.enqueue(resource_tasks.read_state)
    async with memory_queue.worker(lifespan=f"{MODULE}.plain_generator"):
        assert await handle.result(30) == "from a generator"

    assert noted(log) == ["generator ended"]


async def test_enter_and_exit_are_in_one_asyncio_task(memory_queue):
    tasks: list[Any] = []

    async def lifespan() -> Any:
        tasks.append(asyncio.current_task())
        yield
        tasks.append(asyncio.current_task())

    async with memory_queue.worker(lifespan=lifespan):
        pass

    assert tasks[0] is tasks[1] is not None


async def test_a_lifespan_of_no_module_has_no_state_in_child_processes(memory_queue):
    async def local() -> Any:
        yield "here"

    handle = await memory_queue.options(max_retries=0).enqueue(
        resource_tasks.use_all_in_a_process, 1
    )
    async with memory_queue.worker(lifespan=local):
        with pytest.raises(TaskFailed, match="cannot be imported by its child processes"):
            await handle.result(30)


async def test_a_lifespan_that_fails_in_a_child_process_fails_the_run_which_is_retried(
    memory_queue, monkeypatch
):
    monkeypatch.setenv(resource_tasks.WORKER, str(os.getpid()))
    handle = await memory_queue.enqueue(resource_tasks.use_all_in_a_process, 1)
    async with memory_queue.worker(
        lifespan=resource_tasks.only_in_the_worker, base_retry_delay=0, concurrency=1
    ):
        assert (await handle.result(30))[1:3] == ["late", 2]

    (attempt,) = await memory_queue.history(handle.id)
    assert attempt.error.message == "not in a child"


async def test_the_event_of_the_start_names_lifespan_and_middleware(memory_queue):
    pool = memory_queue.worker(
        lifespan=resource_tasks.lifespan, middleware=[f"{MODULE}.first", resource_tasks.second]
    )
    emitted: list[WorkerStarted] = []
    pool.events.subscribe(emitted.append, kinds=(WorkerStarted,))
    async with pool:
        pass

    assert emitted[0].lifespan == f"{MODULE}.lifespan"
    assert emitted[0].middleware == f"{MODULE}.first, {MODULE}.second"


# Settings, and other ways to run


async def test_the_settings_name_a_lifespan_and_middleware_for_every_pool(log):
    settings = Settings(lifespan=f"{MODULE}.lifespan", middleware=(f"{MODULE}.first",))
    async with AsyncTaskQueue(MemoryStorage(settings=settings)) as queue:
        handle = await queue.enqueue(resource_tasks.greet, "a")
        async with queue.worker():
            assert await handle.result(30) == "hello, a"

    assert noted(log) == [
        "lifespan entered",
        f"first before {MODULE}.greet",
        "first after",
        "lifespan left",
    ]


def test_settings_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("OMNIQ_LIFESPAN", "app.tasks.lifespan")
    monkeypatch.setenv("OMNIQ_MIDDLEWARE", "app.mw.one, app.mw.two")
    settings = Settings.load()

    assert settings.lifespan == "app.tasks.lifespan"
    assert settings.middleware == ("app.mw.one", "app.mw.two")
    assert settings.shown()["middleware"] == "app.mw.one,app.mw.two"
    with pytest.raises(SettingsError, match="expected the path of a lifespan"):
        Settings(lifespan="not a path")


def test_a_path_without_a_lifespan_is_an_error_that_names_it():
    with pytest.raises(SettingsError, match=r"lifespan='tests\.worker\.resource_tasks\.none'"):
        AsyncTaskQueue("memory:").worker(lifespan=f"{MODULE}.none")
    with pytest.raises(InvalidValue, match="pass the function, do not call it"):
        AsyncTaskQueue("memory:").worker(lifespan=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="pass the function, do not call it"):
        AsyncTaskQueue("memory:").worker(lifespan=resource_tasks.lifespan())  # type: ignore[arg-type]


def test_a_path_in_a_module_that_raises_is_an_error_that_names_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "raising_module.py").write_text("raise KeyError('conf')\n")
    (tmp_path / "wrong_module.py").write_text("x = = 3\n")
    with pytest.raises(
        SettingsError, match=r"KeyError\('conf'\) \(.*raising_module\.py:1 in <module>\)"
    ):
        AsyncTaskQueue("memory:").worker(lifespan="raising_module.lifespan")
    with pytest.raises(SettingsError, match=r"wrong_module\.py, line 1"):
        AsyncTaskQueue("memory:").worker(middleware=["wrong_module.first"])


def test_a_path_in_the_script_that_runs_does_not_run_it_again(tmp_path):
    script = """if True:
        import asyncio
        from contextlib import asynccontextmanager
        from omniq import AsyncTaskQueue, Settings, TaskContext, task
        from omniq.storage.memory import MemoryStorage

        print("imported")

        class State:
            pass

        @asynccontextmanager
        async def lifespan():
            yield State()

        @task
        async def check(ctx: TaskContext) -> bool:
            return isinstance(ctx.state, State)

        async def main():
            storage = MemoryStorage(settings=Settings(lifespan="the_script.lifespan"))
            async with AsyncTaskQueue(storage) as queue:
                handle = await queue.enqueue(check)
                async with queue.worker():
                    print(await handle.result(10))

        if __name__ == "__main__":
            asyncio.run(main())
    """
    (tmp_path / "the_script.py").write_text(script)
    ended = subprocess.run(
        [sys.executable, "the_script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert ended.stdout.split() == ["imported", "True"]


async def test_a_lifespan_in_a_class_has_no_state_in_child_processes(memory_queue):
    handle = await memory_queue.options(max_retries=0).enqueue(
        resource_tasks.use_all_in_a_process, 1
    )
    async with memory_queue.worker(lifespan=resource_tasks.Lifespans.one):
        with pytest.raises(TaskFailed, match="cannot be imported by its child processes"):
            await handle.result(30)


def test_a_blocking_pool_and_a_worker_object_have_it_too(log):
    with TaskQueue("memory:") as queue:
        handle = queue.enqueue(resource_tasks.greet, "a")
        with queue.worker(lifespan=resource_tasks.lifespan):
            assert handle.result(30) == "hello, a"
        handle = queue.enqueue(resource_tasks.greet, "b")
        storage = queue.storage
        with Worker(storage, [MODULE], lifespan=resource_tasks.lifespan):
            assert handle.result(30) == "hello, b"

    assert noted(log) == ["lifespan entered", "lifespan left"] * 2


def test_a_worker_object_whose_lifespan_fails_raises_it():
    with pytest.raises(LifespanFailed, match="no database"):
        Worker(MemoryStorage(), [MODULE], lifespan=f"{MODULE}.raising").start()


def test_several_processes_need_a_lifespan_that_they_can_import(url):
    async def local() -> Any:
        yield

    with pytest.raises(SettingsError, match="at the top of a module"):
        Worker(url, [MODULE], processes=2, lifespan=local)


async def test_the_worker_of_a_web_application_has_it_too(log):
    class App:
        pass

    open_queue = asgi_lifespan(
        AsyncTaskQueue("memory:"), worker=[MODULE], lifespan=resource_tasks.lifespan
    )
    async with open_queue(App()) as state:
        handle = await state["queue"].enqueue(resource_tasks.greet, "a")
        assert await handle.result(30) == "hello, a"

    assert noted(log) == ["lifespan entered", "lifespan left"]


async def test_queues_for_tests_have_it_too(log):
    async with AsyncManualQueue(lifespan=resource_tasks.lifespan) as queue:
        handle = await queue.enqueue(resource_tasks.greet, "a")
        await queue.run()
        assert await handle.result(30) == "hello, a"


def test_the_fixture_for_tests_takes_a_lifespan_and_middleware(omniq_queue: ManualQueue, log):
    omniq_queue.use(lifespan=resource_tasks.lifespan, middleware=[resource_tasks.first])
    handle = omniq_queue.enqueue(resource_tasks.greet, "a")
    omniq_queue.run()

    assert handle.result(30) == "hello, a"
    assert noted(log)[:2] == ["lifespan entered", f"first before {MODULE}.greet"]


# The command


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.deep_on("1")
@pytest.mark.parametrize("processes", [1, 2])
def test_the_command_enters_it_in_each_process_and_leaves_it_after_sigterm(
    start_worker, url, log, tmp_path, processes
):
    worker = start_worker("--lifespan", f"{MODULE}.lifespan", "--processes", str(processes))
    with TaskQueue(url) as queue:
        held = queue.enqueue(resource_tasks.hold, str(tmp_path))
        child = queue.enqueue(resource_tasks.use_all_in_a_process, 1)
        assert child.result(60)[1] == "hello"
        wait_until(lambda: "hold begun" in noted(log))
        wait_until(lambda: noted(log).count("lifespan entered") == processes + 1)
        worker.send(signal.SIGTERM)
        (tmp_path / "go").touch()
        assert worker.ends() == 0
        result = held.result(30)

    assert result == "hello"
    events = noted(log)
    assert events.count("lifespan left") == events.count("lifespan entered") == processes + 1
    lines = log.read_text().splitlines()
    holder = next(line for line in lines if line.startswith("hold begun")).rpartition(" ")[2]
    own = [line.rpartition(" pid=")[0] for line in lines if line.endswith(holder)]
    assert own == ["lifespan entered", "hold begun", "hold ended", "lifespan left"]
    if processes == 1:
        assert f"lifespan={MODULE}.lifespan" in worker.text


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("options", [(), ("--processes", "2")])
def test_the_command_ends_with_the_error_of_the_lifespan_and_claims_nothing(
    start_worker, url, log, options
):
    with TaskQueue(url) as queue:
        handle = queue.enqueue(resource_tasks.greet, "a")
        worker = start_worker("--lifespan", f"{MODULE}.raising", *options)
        assert worker.ends() == 1

        assert handle.status() is TaskStatus.PENDING
    (line,) = [line for line in worker.lines if "lifespan" in line]
    assert line.startswith(
        f"omniq: the lifespan {MODULE}.raising failed: ConnectionError: no database at db:5432, postgresql"
    )
    assert "sesame" not in worker.text
    assert noted(log) == ["raising"]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["hanging", "blocking"])
def test_the_command_ends_when_the_lifespan_does_not_start_in_time(start_worker, log, name):
    worker = start_worker("--lifespan", f"{MODULE}.{name}", OMNIQ_START_TIMEOUT="0.5")

    assert worker.ends() == 1
    assert f"the lifespan {MODULE}.{name} did not start within 0.5 s" in worker.text
    assert noted(log) == [name]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_signal_ends_the_command_while_the_lifespan_starts(start_worker, log):
    worker = start_worker("--lifespan", f"{MODULE}.hanging")
    wait_until(lambda: "hanging" in noted(log))
    worker.send(signal.SIGTERM)

    assert worker.ends() == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_worker_that_is_killed_leaves_its_tasks_to_one_with_a_new_lifespan(
    start_worker, url, log, tmp_path
):
    options = ("--lifespan", f"{MODULE}.lifespan", "--lease", "1")
    worker = start_worker(*options)
    with TaskQueue(url) as queue:
        held = queue.enqueue(resource_tasks.hold, str(tmp_path))
        wait_until(lambda: "hold begun" in noted(log))
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
        (tmp_path / "go").touch()
        start_worker(*options)

        assert held.result(60) == "hello"
    assert noted(log).count("lifespan entered") == 2
    assert noted(log).count("hold begun") == 2


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_command_calls_middleware_and_closes_resources_before_it_leaves_the_lifespan(
    start_worker, url, log
):
    worker = start_worker(
        *("--middleware", f"{MODULE}.first", "--middleware", f"{MODULE}.second"),
        OMNIQ_LIFESPAN=f"{MODULE}.lifespan",
    )
    with TaskQueue(url) as queue:
        assert queue.enqueue(resource_tasks.use_session_in_a_thread, "ok").result(60)["pool"]
    worker.send(signal.SIGTERM)

    assert worker.ends() == 0
    assert noted(log) == [
        "lifespan entered",
        f"first before {MODULE}.use_session_in_a_thread",
        "second before",
        "pool made",
        "session begun",
        "session committed",
        noted(log)[6],
        "first after",
        "pool closed",
        "lifespan left",
    ]
    assert noted(log)[6].startswith("second got {")
    assert f"middleware={MODULE}.first, {MODULE}.second" in worker.text.replace("'", "").replace(
        '"', ""
    )
