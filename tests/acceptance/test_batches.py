"""Batches of a real `omniq worker` that is killed in the middle of a call."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from omniq import TaskStatus
from tests.acceptance.command import PATIENCE, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

BATCHES = """
import time
from pathlib import Path

from omniq import batched, task


def called(folder, numbers):
    with open(Path(folder) / "called", "a") as file:
        file.write(f"{len(numbers)}\\n")


@task
@batched(size=20, wait=0.1)
def hold(items: list[tuple[str, int]]) -> list[int | BaseException]:
    folder = items[0][0]
    called(folder, items)
    while not (Path(folder) / "go").exists():
        time.sleep(0.01)
    return [ValueError("seven") if number == 7 else number for _, number in items]
"""


@pytest.mark.parametrize("executor", ["thread", pytest.param("process", marks=pytest.mark.deep)])
def test_every_item_of_a_killed_batch_runs_again_and_none_is_lost(
    run_worker, queue, folder, executor
):
    text = BATCHES.replace("@task", f'@task(executor="{executor}")')
    (folder / "batches.py").write_text(text)
    options = ("--lease", "1", "--poll-interval", "0.2", "-c", "1")
    once = queue.options(max_retries=0)
    first = run_worker(*options, modules=("batches",))
    handles = [once.enqueue("batches.hold", (str(folder), number)) for number in range(30)]
    wait_until(lambda: (folder / "called").exists(), "the batch is called")
    running = [task.id for task in queue.list_tasks(status=TaskStatus.RUNNING)]
    first.send(signal.SIGKILL)
    first.ends()
    (folder / "go").touch()
    second = run_worker(*options, modules=("batches",))
    results = [handle.result(PATIENCE) for number, handle in enumerate(handles) if number != 7]

    assert results == [number for number in range(30) if number != 7]
    wait_until(lambda: queue.get_task(handles[7].id).status is TaskStatus.FAILED, "seven is dead")
    (dead,) = queue.dead.list()
    assert dead.task_id == handles[7].id
    assert len(running) > 1
    crashes = {handle.id for handle in handles if queue.get_task(handle.id).crashes}
    assert crashes == set(running)
    second.send(signal.SIGTERM)
    assert second.ends() == 0
    sizes = [int(line) for line in Path(folder / "called").read_text().split()]
    assert sum(sizes) == 30 + len(running)
