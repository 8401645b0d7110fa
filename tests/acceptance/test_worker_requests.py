"""`queue.workers.stop`, `set_slots`, `ping` and `functions`: real `omniq worker` processes follow what is stored for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from omniq import AsyncTaskQueue, TaskQueue, TaskStatus, task
from omniq.events import Event, WorkerResized, WorkerStopRequested
from omniq.models import WorkerInfo
from tests.acceptance.command import PATIENCE, wait_until, worker_pids
from tests.faults.shared_stores import SHARED, url_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.deep_on("file"),
]

LEASE = ("--lease", "3")
"""A heartbeat every second."""


@pytest.fixture(params=SHARED)
def url(request: pytest.FixtureRequest, folder: Path) -> str:
    return url_of(request.param, folder, request)


MEETING: list[asyncio.Barrier] = []


@task
async def meet() -> str:
    await MEETING[0].wait()
    return "met"


def the_workers(queue: TaskQueue, count: int) -> list[WorkerInfo]:
    wait_until(lambda: len(queue.workers()) == count, f"{count} workers")
    return queue.workers()


def test_a_stopped_worker_finishes_its_task_and_exits(run_worker, queue, folder):
    worker = run_worker(*LEASE)
    (info,) = the_workers(queue, 1)
    running = queue.enqueue("tasks.wait_for", str(folder / "go"))
    wait_until(lambda: running.status() is TaskStatus.RUNNING)

    assert queue.workers.stop(info.id)
    worker.wait_for("worker.stopping")
    left = queue.enqueue("tasks.add", 1, 2)
    (folder / "go").touch()

    assert worker.ends() == 0
    assert running.result(PATIENCE) == "done"
    assert left.status() is TaskStatus.PENDING
    assert queue.workers() == []
    assert not queue.workers.stop(info.id)


def test_a_worker_whose_loop_a_task_blocks_answers_and_stops(run_worker, queue):
    worker = run_worker(*LEASE, "--shutdown-timeout", "1", "--concurrency", "1")
    (info,) = the_workers(queue, 1)
    blocking = queue.enqueue("tasks.block_the_loop")
    wait_until(lambda: blocking.status() is TaskStatus.RUNNING)

    assert queue.workers.ping(info.id) is not None
    assert queue.workers.stop(info.id)

    assert worker.ends() in (0, 1)


def test_one_of_several_processes_is_stopped_and_not_replaced(run_worker, queue):
    worker = run_worker(*LEASE, "--processes", "2")
    first, second = the_workers(queue, 2)

    assert queue.workers.stop(first.id)
    wait_until(lambda: worker_pids(queue) == {second.pid})
    assert queue.enqueue("tasks.add", 1, 2).result(PATIENCE) == 3
    assert queue.workers.stop(second.id)

    assert worker.ends() == 0
    assert "process.ended" not in worker.text


def test_a_restarted_process_is_replaced(run_worker, queue):
    run_worker(*LEASE, "--processes", "2")
    first, second = the_workers(queue, 2)

    assert queue.workers.stop(first.id, restart=True)
    wait_until(lambda: len(worker_pids(queue) - {first.pid}) == 2)

    assert second.pid in worker_pids(queue)


def test_a_worker_that_is_restarted_alone_starts_again(run_worker, queue):
    worker = run_worker(*LEASE)
    (first,) = the_workers(queue, 1)

    assert queue.workers.stop(first.id, restart=True)
    wait_until(lambda: {info.id for info in queue.workers()} - {first.id})

    assert queue.enqueue("tasks.add", 1, 2).result(PATIENCE) == 3
    assert worker.process.poll() is None


def test_a_ping_returns_how_long_it_took_and_which_functions_the_worker_has(run_worker, queue):
    run_worker(*LEASE)
    (info,) = the_workers(queue, 1)

    pong = queue.workers.ping(info.id)

    assert pong is not None
    assert 0 < pong.seconds < PATIENCE
    assert (pong.worker_id, pong.modules, pong.more) == (info.id, ("tasks",), 0)
    assert {"tasks.add", "tasks.double"} <= set(pong.functions)
    assert "tasks.system" not in pong.functions
    assert queue.workers.functions(info.id) == pong.functions
    assert queue.workers.ping("nobody-has-this-id") is None


async def test_a_worker_runs_more_tasks_at_a_time_when_an_operator_says_so(url):
    MEETING[:] = [asyncio.Barrier(3)]
    async with AsyncTaskQueue(url) as queue:
        pool = queue.worker(lease=3, concurrency=1)
        emitted: list[Any] = []
        pool.events.subscribe(emitted.append, kinds=(WorkerResized,))
        async with pool:
            (info,) = await queue.workers()
            assert await queue.workers.set_slots(info.id, 3)
            handles = [await queue.enqueue(meet) for _ in range(3)]
            # The three wait for each other, so they return only when all run at the same time.
            assert {await handle.result(PATIENCE) for handle in handles} == {"met"}
            assert [(await pool_slots(queue)), pool.stats().workers_count] == [3, 3]
    assert [(each.before, each.slots) for each in emitted] == [(1, 3)]


async def pool_slots(queue: AsyncTaskQueue) -> int:
    """The slots that the only worker reports, once it has reported new ones."""
    for _ in range(int(PATIENCE * 10)):
        (info,) = await queue.workers()
        if info.concurrency != 1:
            break
        await asyncio.sleep(0.1)
    return info.concurrency


async def test_a_pool_in_an_application_stops_as_asked(url):
    async with AsyncTaskQueue(url) as queue:
        pool = queue.worker(lease=3)
        emitted: list[Event] = []
        pool.events.subscribe(emitted.append, kinds=(WorkerStopRequested,))
        async with pool:
            (info,) = await queue.workers()
            assert await queue.workers.stop(info.id)
            await pool.wait()

            assert not pool.running
            assert await queue.workers() == []
            # The application goes on.
            await queue.enqueue("tasks.add", 1, 2)
    assert [type(event) for event in emitted] == [WorkerStopRequested]
