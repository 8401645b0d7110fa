"""Runs that wait for nothing share an asyncio task. What they do, and what is done to them, is as without that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextvars import ContextVar

import pytest

from omniq import AsyncTaskQueue, TaskCancelled, current_task, task
from omniq.storage.memory import MemoryStorage
from tests.worker.recorder import RECORDER, RunRecorder, until

_LEFT_BEHIND: ContextVar[str] = ContextVar("left_behind", default="nothing")
_JOBS: list[asyncio.Task[object] | None] = []


@task
async def leave_behind(name: str) -> tuple[str, str, str]:
    """Return what an earlier run left in the context, in this run and after a wait if it is named so."""
    before = _LEFT_BEHIND.get()
    _LEFT_BEHIND.set(name)
    _JOBS.append(asyncio.current_task())
    if "waits" in name:
        await asyncio.sleep(0)
    return before, _LEFT_BEHIND.get(), current_task().task_id


@task
async def wait_for_gate(name: str) -> tuple[str, str]:
    RECORDER.note(name)
    await until(RECORDER.gate(name).is_set)
    return name, current_task().task_id


@task
async def refuse(number: int) -> None:
    raise ValueError(number)


@pytest.fixture
async def queue() -> AsyncIterator[AsyncTaskQueue]:
    async with AsyncTaskQueue(MemoryStorage()) as queue:
        _JOBS.clear()
        yield queue


async def test_runs_that_wait_for_nothing_share_one_asyncio_task(queue):
    handles = await queue.enqueue_many(leave_behind, [(f"{number}",) for number in range(20)])
    async with queue.worker(concurrency=20) as pool:
        await pool.run_until_empty()

    results = [await handle.result() for handle in handles]
    assert len(set(_JOBS)) == 1
    # Each had its own context: nothing was left by the run before.
    assert results == [("nothing", f"{number}", handle.id) for number, handle in enumerate(handles)]


async def test_a_run_that_waits_keeps_its_asyncio_task_and_its_context(queue):
    names = ["a", "b waits", "c", "d waits", "e"]
    handles = await queue.enqueue_many(leave_behind, [(name,) for name in names])
    async with queue.worker(concurrency=5) as pool:
        await pool.run_until_empty()

    results = [await handle.result() for handle in handles]
    assert results == [
        ("nothing", name, handle.id) for name, handle in zip(names, handles, strict=True)
    ]
    # The first two share one. Now the function is known to wait, and each of its runs gets its own.
    assert _JOBS[0] is _JOBS[1]
    assert len(set(_JOBS)) == 4


async def test_a_run_that_waits_does_not_hold_up_the_others_and_is_stopped_alone(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    names = ["first", "second", "third"]
    async with queue.worker(concurrency=3):
        first, second, third = await queue.enqueue_many(wait_for_gate, [(name,) for name in names])
        await until(lambda: recorder.names() == names)
        assert await first.cancel()
        with pytest.raises(TaskCancelled):
            await first.result(timeout=30)
        recorder.gate("third").set()
        assert await third.result(timeout=30) == ("third", third.id)
        recorder.gate("second").set()
        assert await second.result(timeout=30) == ("second", second.id)


async def test_an_exception_of_one_run_is_that_run_s_alone(queue: AsyncTaskQueue) -> None:
    failing = queue.options(max_retries=0)
    before = await queue.enqueue(leave_behind, "before")
    failed = await failing.enqueue(refuse, 1)
    after = await queue.enqueue(leave_behind, "after")
    async with queue.worker(concurrency=3) as pool:
        await pool.run_until_empty()

    assert (await before.result())[0] == (await after.result())[0] == "nothing"
    letter = await queue.dead.get(failed.id)
    assert letter is not None
    assert "ValueError" in letter.error_details
