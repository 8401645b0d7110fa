"""Bugs that the state machine has found, each as a small test on every backend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from omniq.errors import LeaseLost
from omniq.models import BreakerRule, Limit, Progress, Task, TaskError, TaskResult, TaskStatus
from omniq.outcomes import Failed, Retried, Succeeded
from omniq.settings import Settings
from omniq.storage.base import BaseStorage
from omniq.storage.file import FileStorage
from omniq.storage.memory import MemoryStorage
from omniq.storage.sqlite import SQLiteStorage
from omniq.testing.clock import ManualClock

SETTINGS = Settings(lease=9.0, result_ttl=60.0, max_crashes=2, durability="os")
TEN_SECONDS = timedelta(seconds=10)
ONE_AT_A_TIME = (Limit(key="one", max_running=1),)

Open = Callable[[], Awaitable[BaseStorage]]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "sqlite", "file"])
async def open_owner(
    request: pytest.FixtureRequest, clock: ManualClock, tmp_path: Path
) -> AsyncIterator[Open]:
    """Open owners that share one store."""
    memory = MemoryStorage(clock=clock, settings=SETTINGS)
    makers: dict[str, Callable[[], BaseStorage]] = {
        "memory": memory.another,
        "sqlite": lambda: SQLiteStorage(tmp_path / "tasks.db", clock=clock, settings=SETTINGS),
        "file": lambda: FileStorage(tmp_path / "tasks", clock=clock, settings=SETTINGS),
    }
    opened: list[BaseStorage] = []

    async def open_one() -> BaseStorage:
        storage = makers[request.param]()
        await storage.open()
        opened.append(storage)
        return storage

    yield open_one
    for storage in opened:
        await storage.close()


def a_task(task_id: str, **fields: Any) -> Task:
    return Task(id=task_id, func_path="shop.pack", **fields)


def ids(tasks: list[Task]) -> list[str]:
    return [task.id for task in tasks]


async def test_delete_dead_of_a_running_task_leaves_its_checkpoint(
    open_owner: Open,
) -> None:
    storage = await open_owner()
    await storage.enqueue(a_task("a"))
    (task,) = await storage.reserve(1)
    await storage.save_checkpoint("a", task.token, b"half")

    assert not await storage.delete_dead("a")

    assert await storage.load_checkpoint("a") == b"half"


async def test_a_failure_that_is_recorded_twice_counts_once_for_a_breaker(
    open_owner: Open,
) -> None:
    storage = await open_owner()
    rule = BreakerRule(name="smtp", max_failures=2, reset_timeout=5.0)
    await storage.enqueue_many([a_task("a", breakers=(rule,)), a_task("b", breakers=(rule,))])
    (task,) = await storage.reserve(1)
    failure = Retried("a", task.token, TaskError("no answer"))

    assert await storage.record([failure, failure]) == [True, True]

    assert ids(await storage.reserve(1)) == ["b"]


async def test_a_parked_task_of_another_queue_does_not_block_a_free_slot(
    open_owner: Open,
) -> None:
    storage = await open_owner()
    for task_id, queue in (("a", "default"), ("b", "default"), ("c", "mail")):
        await storage.enqueue(a_task(task_id, queue=queue, limits=ONE_AT_A_TIME))
    (first,) = await storage.reserve(3)
    result = TaskResult(task_id="a", status=TaskStatus.SUCCESS)
    await storage.record([Succeeded("a", first.token, result)])

    assert ids(await storage.reserve(3, queues=["mail"])) == ["c"]


async def test_a_parked_task_that_is_not_due_does_not_block_a_free_slot(
    open_owner: Open, clock: ManualClock
) -> None:
    storage = await open_owner()
    later = clock.now() + TEN_SECONDS
    await storage.enqueue(a_task("a", limits=ONE_AT_A_TIME))
    await storage.enqueue(a_task("b", limits=ONE_AT_A_TIME))
    await storage.enqueue(a_task("later", priority=1, eta=later, limits=ONE_AT_A_TIME))
    (first,) = await storage.reserve(1)
    assert await storage.reserve(3, later) == []
    await storage.mark_done("a", TaskResult(task_id="a", status=TaskStatus.SUCCESS))

    assert first.id == "a"
    assert ids(await storage.reserve(3)) == ["b"]


async def test_a_task_whose_id_was_used_before_is_given_back_like_any_other(
    open_owner: Open, clock: ManualClock
) -> None:
    storage = await open_owner()
    await storage.enqueue(a_task("a"))
    await storage.reserve(1)
    await storage.mark_done("a", TaskResult(task_id="a", status=TaskStatus.SUCCESS))
    clock.advance(61)
    await storage.enqueue(a_task("a"))
    await storage.reserve(1)

    clock.advance(9)
    given_back = await storage.give_back_abandoned()

    assert [back.task_id for back in given_back] == ["a"]


async def test_the_next_run_of_a_repeating_task_starts_without_the_last_ones_progress(
    open_owner: Open,
) -> None:
    storage = await open_owner()
    await storage.enqueue(a_task("a", interval=5.0))
    (task,) = await storage.reserve(1)
    await storage.report_progress([Progress(task_id="a", token=task.token, fraction=0.9)])

    await storage.mark_done("a", TaskResult(task_id="a", status=TaskStatus.SUCCESS))

    assert await storage.get_progress("a") is None


async def test_a_late_outcome_of_an_earlier_claim_does_not_change_the_current_claim(
    open_owner: Open, clock: ManualClock
) -> None:
    storage = await open_owner()
    await storage.enqueue_many([a_task("a"), a_task("b")])
    first, _ = await storage.reserve(2)
    clock.advance(9)
    await storage.give_back_abandoned()
    with pytest.raises(LeaseLost):
        await storage.renew()
    assert ids(await storage.reserve(2)) == ["a"]

    assert await storage.record([Failed("a", first.token, TaskError("late"))]) == [False]

    assert await storage.reserve(2) == []


async def test_a_claim_with_an_earlier_now_leaves_no_task_in_a_limit_that_has_room(
    open_owner: Open, clock: ManualClock
) -> None:
    storage = await open_owner()
    rate = Limit(key="two", rate=1, per=60.0)
    await storage.enqueue_many([a_task("a", limits=ONE_AT_A_TIME), a_task("t", limits=(rate,))])
    running, _ = await storage.reserve(2)
    await storage.enqueue_many(
        [
            a_task("b", limits=(*ONE_AT_A_TIME, rate)),
            a_task("c", limits=ONE_AT_A_TIME, eta=clock.now() + TEN_SECONDS),
        ]
    )
    clock.advance(10)
    assert await storage.reserve(2) == []
    # Now b is ready. The claim parks it under the other limit, and c is not due then.
    await storage.record(
        [Succeeded("a", running.token, TaskResult(task_id="a", status=TaskStatus.SUCCESS))]
    )
    assert await storage.reserve(2, now=clock.now() - timedelta(seconds=5)) == []

    assert ids(await storage.reserve(2)) == ["c"]
