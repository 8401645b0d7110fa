"""While workers are killed, readers see no task twice and only possible states."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from omniq.storage import open_storage
from omniq.testing.builders import a_task

ROOT = Path(__file__).parents[2]

WORKER = """
import asyncio, sys
from omniq import AsyncTaskQueue, Settings

async def main():
    settings = Settings(lease=1.0, poll_interval=0.05, durability="os", max_crashes=100)
    async with AsyncTaskQueue(sys.argv[1], settings=settings) as queue:
        async with queue.worker(concurrency=4, allow=["tests.faults.fault_tasks"]):
            print("ready", flush=True)
            await asyncio.sleep(60)

asyncio.run(main())
"""


def start_worker(url: str) -> subprocess.Popen[bytes]:
    worker = subprocess.Popen([sys.executable, "-c", WORKER, url], cwd=ROOT, stdout=subprocess.PIPE)
    assert worker.stdout is not None
    worker.stdout.readline()
    return worker


def kill(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()
    assert worker.stdout is not None
    worker.stdout.close()


@pytest.mark.deep_on("file")
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.fault("F100")
@pytest.mark.parametrize("backend", ["file", "sqlite"])
async def test_readers_see_no_task_twice_and_no_impossible_state_while_workers_are_killed(
    backend, tmp_path
):
    url = {
        "file": f"file://{tmp_path}/store?durability=os",
        "sqlite": f"sqlite:///{tmp_path}/store.db?durability=os",
    }[backend]
    runs, kills, readings = tmp_path / "runs", 0, 0
    async with open_storage(url) as storage:
        await storage.enqueue_many(
            [
                a_task(f"t{n:03}", func_path="tests.faults.fault_tasks.append", args=(str(runs), n))
                for n in range(200)
            ]
        )
        for _ in range(4):
            worker = start_worker(url)
            # On a busy machine, all readings would be over before the first worker has run a task.
            while not runs.exists():  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
            for _ in range(10):
                counted = await storage.stats()
                listed = await storage.list_tasks(limit=1000)
                readings += 1
                ids = [task.id for task in listed]
                assert ids == sorted(set(ids))
                assert (len(ids), sum(counted.by_status.values())) == (200, 200)
                assert all(
                    (task.owner is not None) == (task.status == "running") for task in listed
                )
            kill(worker)
            kills += 1

    assert (kills, readings) == (4, 40)
    assert runs.exists()
