"""A module that enqueues, or starts a worker, when it is imported: refused with what to do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from omniq import AsyncTaskQueue, TaskQueue, TaskStatus, UnguardedModule
from omniq.storage.memory import MemoryStorage
from omniq.tasks.import_guard import importing

pytestmark = pytest.mark.timeout(90)

TASK = """
import asyncio
from omniq import AsyncTaskQueue, TaskQueue, WorkerPool, task
from omniq.storage import open_storage

URL = "sqlite:///tasks.db"

@task(executor="process")
def crunch(n):
    return sum(range(n))
"""

BLOCKING = """
with TaskQueue(URL) as q:
    h = q.enqueue(crunch, 1000)
    with q.worker():
        print(h.result(timeout=20))
"""

ASYNC = """
async def main():
    async with AsyncTaskQueue(URL) as q:
        h = await q.options(priority=1).enqueue(crunch, 1000)
        async with q.worker():
            print(await h.result(timeout=20))

asyncio.run(main())
"""

MANY = """
with TaskQueue(URL) as q:
    q.enqueue_many(crunch, [1000])
    with q.worker() as pool:
        pool.run_until_empty()
"""

SUBMIT = """
with WorkerPool(open_storage(URL)) as pool:
    pool.submit(crunch, 1000)
    pool.run_until_empty()
"""

OPENED = """
q = TaskQueue(URL)
q.open()

if __name__ == "__main__":
    with q.worker():
        print(q.enqueue(crunch, 1000).result(timeout=20))
    q.close()
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    "top", [BLOCKING, ASYNC, MANY, SUBMIT], ids=["blocking", "async", "many", "pool"]
)
def test_a_script_without_a_guard_enqueues_once_and_its_task_fails_with_advice(tmp_path, top):
    Path(tmp_path, "one.py").write_text(TASK + top)
    run(tmp_path, "one.py")

    with TaskQueue(f"sqlite:///{tmp_path}/tasks.db") as queue:
        (task,) = queue.list_tasks()
        result = queue.get_result(task.id)
    assert result is not None
    assert result.error is not None
    assert (task.status, result.attempts) == (TaskStatus.FAILED, 1)
    assert result.error.error_type == "UnguardedModule"
    what = "starts a worker" if top is SUBMIT else "enqueues"
    assert f"module one {what} when it is imported" in result.error.message
    assert "if __name__ == '__main__'" in result.error.message


def test_a_queue_opened_in_a_module_that_the_script_imports(tmp_path):
    helper = BLOCKING.replace("with q.worker():\n        print(h.result(timeout=20))", "pass")
    Path(tmp_path, "helper.py").write_text(f"from tasks import *\n{helper}")
    Path(tmp_path, "tasks.py").write_text(TASK)
    Path(tmp_path, "one.py").write_text(
        "import helper\nfrom tasks import task\n\n@task\ndef f(): pass\n"
    )
    worker = run(tmp_path, "-m", "omniq", "worker", "one", "--url", "sqlite:///tasks.db")

    assert worker.returncode != 0
    assert "module one enqueues when it is imported" in worker.stderr
    assert "helper.py" in worker.stderr


@pytest.mark.parametrize("top", [BLOCKING, ASYNC, SUBMIT], ids=["blocking", "async", "pool"])
def test_a_worker_refuses_such_a_module(tmp_path, top):
    Path(tmp_path, "one.py").write_text(TASK + top)
    worker = run(tmp_path, "-m", "omniq", "worker", "one", "--url", "sqlite:///tasks.db")

    assert worker.returncode != 0
    assert re.search(r"module one (enqueues|starts a worker) when it is imported", worker.stderr)
    assert "one.py:" in worker.stderr


def test_a_queue_that_is_only_opened_at_import_is_no_mistake(tmp_path):
    Path(tmp_path, "one.py").write_text(TASK + OPENED)
    done = run(tmp_path, "one.py")

    assert done.stdout.strip() == "499500", done.stderr


async def test_after_the_import_the_queue_works():
    async with AsyncTaskQueue(MemoryStorage()) as queue:
        await queue.close()
        with importing("app"):
            await queue.open()
            with pytest.raises(UnguardedModule, match="module app enqueues"):
                await queue.enqueue("app.f")
            with pytest.raises(UnguardedModule, match="module app starts a worker"):
                await queue.worker().start()

        assert (await queue.enqueue("app.f")).id
