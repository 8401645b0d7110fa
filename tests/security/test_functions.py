"""An attacker who can write to the store can run registered functions, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from omniq import AsyncTaskQueue
from omniq.errors import ForbiddenFunction, FunctionNotFound, InvalidTask, OmniqError
from omniq.models import TaskStatus
from omniq.storage.memory import MemoryStorage
from omniq.tasks.functions import FunctionCache
from omniq.testing.builders import a_task

ROOT = Path(__file__).parents[2]

EVIL = [
    "os.system", "posix.system", "builtins.eval", "builtins.exec", "builtins.__import__",
    "subprocess.Popen", "subprocess.run", "subprocess:Popen", "importlib.import_module",
    "pickle.loads", "marshal.loads", "ctypes.CDLL", "shutil.rmtree", "code.interact", "pty.spawn",
    "webbrowser.open", "runpy.run_path", "timeit.timeit", "pdb.run", "sys.exit", "_pytest.main",
    "pip.main", "setuptools.setup", "pip._internal.main", "asyncio.create_subprocess_shell",
    "tests.security.sample_tasks.__class__", "tests.security.sample_tasks.good.__globals__",
    "tests.security.sample_tasks.good.__code__.replace", "tests.security.sample_tasks.__builtins__.eval",
    "tests.security.sample_tasks.os.system", "tests.security.sample_tasks.system",
    "tests.security.sample_tasks.run_anything", "tests.security.sample_tasks.Tool",
    "tests.security.sample_tasks.Tool.method", "tests.security.sample_tasks.Tool.__init__",
    "tests.security.sample_tasks.TOOL.method", "tests.security.sample_tasks.partial_system",
    "tests.security.sample_tasks.generator", "tests.security.sample_tasks.magic",
    "ｏs.system", "os․system", "оs.system", "os.sуstem", "ﬁle.open", "os.system\0", "os.system\n",
    "os. system", " os.system", "os..system", ".os.system", "os.system.", "../os.system", "os/system",
    "os.system;x", "click.termui.edit", "click.edit", "omniq.testing.server_process._start",
    "omniq.testing.builders.a_task", "omniq.cli.main", "omniq.settings.Settings.load", "pytest.main", "a.b" + "c" * 10_000, "__main__.anything", "", "os", "𝐨𝐬.system", "os.ｓystem",
]  # fmt: skip


@pytest.mark.security("S02")
@pytest.mark.parametrize("path", EVIL, ids=range(len(EVIL)))
@pytest.mark.parametrize("allow", [None, ["tests.security.sample_tasks"]], ids=["any", "allowed"])
def test_a_path_that_names_no_function_of_the_user_is_refused(path, allow):
    with pytest.raises(FunctionNotFound):
        FunctionCache(allow).resolve(path)


def test_a_function_of_the_user_is_found():
    from tests.security import sample_tasks

    for allow in (None, ["tests.security.sample_tasks"]):
        found = FunctionCache(allow).resolve("tests.security.sample_tasks.good")
        assert found is sample_tasks.good
    with pytest.raises(ForbiddenFunction):
        FunctionCache(["tests.security.sample"]).resolve("tests.security.sample_tasks.good")


@pytest.mark.security("S02")
@pytest.mark.parametrize("path", EVIL, ids=range(len(EVIL)))
async def test_a_path_that_must_not_run_ends_as_a_dead_letter_or_is_refused_at_once(path):
    async with AsyncTaskQueue(MemoryStorage()) as queue:
        try:
            task_id = await queue.storage.enqueue(a_task(func_path=path, max_retries=0))
        except InvalidTask:
            return
        async with queue.worker(allow=["tests.security.sample_tasks"]) as pool:
            await pool.run_until_empty()
        task = await queue.get_task(task_id)

    assert task is not None
    # One of a module that this worker does not have is left to others; nothing has run it.
    assert task.status in (TaskStatus.FAILED, TaskStatus.PENDING)
    assert task.attempts in (0, 1)


SCRIPT = """
import asyncio, sys
sys.path.insert(0, {root!r})
import omniq.worker.pool, omniq.worker.executors.execution, omniq.tasks.functions
from tests.security import sample_tasks
from omniq import AsyncTaskQueue
from omniq.storage.memory import MemoryStorage
from omniq.testing.builders import a_task
from omniq.errors import InvalidTask

events = []
armed = False
DANGER = ("os.exec", "os.system", "os.fork", "os.posix_spawn", "subprocess.Popen", "pickle.find_class",
          "ctypes.dlopen", "shutil.", "code.__new__", "exec", "socket.connect", "import")

def hook(event, arguments):
    if armed and event.startswith(DANGER):
        events.append((event, repr(arguments)[:300]))

async def main():
    global armed
    async with AsyncTaskQueue(MemoryStorage()) as queue:
        good = await queue.enqueue(sample_tasks.good, 1)
        async with queue.worker(allow={allow!r}) as pool:
            await pool.run_until_empty()
        sys.addaudithook(hook)
        for path in {evil!r}:
            try:
                await queue.storage.enqueue(a_task(func_path=path, args=("touch {mark}",), max_retries=0))
            except InvalidTask:
                pass
        armed = True
        async with queue.worker(allow={allow!r}) as pool:
            await pool.run_until_empty()
        armed = False
        print("ran", await good.result())
    for event in events:
        print("EVENT", *event)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.security("S03")
@pytest.mark.parametrize("allow", [None, ["tests.security.sample_tasks"]], ids=["none", "module"])
def test_no_record_makes_a_worker_start_a_program_or_import_a_module(tmp_path, allow):
    code = SCRIPT.format(root=str(ROOT), evil=EVIL, mark=tmp_path / "mark", allow=allow)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["ran 2"]
    assert not (tmp_path / "mark").exists()


@pytest.mark.security("S03")
@pytest.mark.parametrize(
    "name", ["antigravity", "this", "idlelib.idle", "turtle", "tests.security.absent"]
)
def test_a_module_that_is_not_allowed_is_not_even_imported(name):
    before = set(sys.modules)

    with pytest.raises(OmniqError):
        FunctionCache(["tests.security.sample_tasks"]).resolve(f"{name}.main")
    assert name not in set(sys.modules) - before
