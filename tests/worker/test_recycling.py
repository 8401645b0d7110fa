"""Processes are replaced when they have run enough tasks, or use too much memory: between two tasks."""

from __future__ import annotations

import os
from typing import Annotated, Any

import pytest

from omniq import INJECTED, AsyncTaskQueue, Resource, Settings, SettingsError, task
from omniq.storage.memory import MemoryStorage
from omniq.worker.recycling import ProcessLimits, memory_of

CLOSED = "OMNIQ_TEST_CLOSED"


def make_file():
    yield "open"
    with open(os.environ[CLOSED], "a") as file:
        file.write(f"{os.getpid()}\n")


@task(executor="process")
def own_pid() -> int:
    return os.getpid()


@task(executor="process")
def pid_with_resource(file: Annotated[str, Resource(make_file)] = INJECTED) -> int:
    return os.getpid()


@task
async def double(number: int) -> int:
    return number * 2


async def run_in_turn(func: Any, count: int, **limits: int) -> list[int]:
    """The results of that many tasks, one after the other."""
    storage = MemoryStorage(settings=Settings(**limits))  # type: ignore[arg-type]
    async with AsyncTaskQueue(storage) as queue, queue.worker(concurrency=1):
        return [await (await queue.enqueue(func)).result(60) for _ in range(count)]


async def test_a_child_process_is_replaced_after_as_many_tasks_as_it_may_run() -> None:
    first, again, second = await run_in_turn(own_pid, 3, max_tasks_per_child=2)

    assert first == again
    assert second != first


@pytest.mark.deep
async def test_a_child_process_above_its_memory_is_replaced_after_its_task() -> None:
    pids = await run_in_turn(own_pid, 2, max_memory_per_child=1)

    assert len(set(pids)) == 2


@pytest.mark.deep
async def test_a_child_process_below_its_limits_stays() -> None:
    pids = await run_in_turn(own_pid, 3, max_memory_per_child=10**12, max_tasks_per_child=4)

    assert len(set(pids)) == 1


@pytest.mark.deep
async def test_a_child_process_closes_its_resources_before_it_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    path = tmp_path / "closed"
    monkeypatch.setenv(CLOSED, str(path))
    pids = await run_in_turn(pid_with_resource, 2, max_tasks_per_child=1)

    # The pool waits for those that close.
    assert sorted(map(int, path.read_text().split())) == sorted(pids)
    assert len(set(pids)) == 2


async def test_a_pool_in_a_program_ignores_the_limits_of_its_process() -> None:
    storage = MemoryStorage(settings=Settings(max_tasks_per_child=1, max_memory_per_child=1))
    async with AsyncTaskQueue(storage) as queue, queue.worker(concurrency=1) as pool:
        handles = [await queue.enqueue(double, number) for number in range(5)]

        assert [await handle.result(30) for handle in handles] == [0, 2, 4, 6, 8]
        assert not pool.recycle_requested


def test_the_first_limit_that_is_reached_is_named() -> None:
    limits = ProcessLimits(Settings(max_tasks_per_child=10, max_memory_per_child=10**12))
    pid = os.getpid()

    assert [limits.exceeded(count, pid) for count in (0, 9, 10, 11)] == ["", "", "tasks", "tasks"]
    small = ProcessLimits(Settings(max_memory_per_child=1))
    # A process that has run no task is not replaced: the next one would be as large.
    assert [small.exceeded(count, pid) for count in (0, 1)] == ["", "memory"]
    assert ProcessLimits(Settings()).exceeded(10**9, pid) == ""
    assert memory_of(2**31 - 1) is None


@pytest.mark.parametrize("name", ["max_tasks_per_child", "max_memory_per_child"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "many", True])
def test_limits_that_cannot_be_are_refused(name: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=name):
        Settings(**{name: value})
