"""Connections are cut before and after every message of every verb, and no task is lost or doubled.

A call that ends in `StorageError` may have been carried out or not. Whoever made it repeats it, with
the same nonce, claim id or token; that must be enough.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar, get_args

import pytest

from omniq import AsyncTaskHandle, AsyncTaskQueue, AsyncWorkerPool
from omniq.clock import SYSTEM_CLOCK
from omniq.errors import StorageError, StorageRefused
from omniq.models import Task, TaskStatus
from omniq.outcomes import Outcome, Released, Retried, Succeeded
from omniq.storage import BaseStorage, open_storage
from omniq.testing.builders import a_result, an_error
from omniq.testing.fault_proxy import Cut, FaultProxy
from tests.fleet import fleet_tasks as tasks

T = TypeVar("T")

PLACES: tuple[Cut, ...] = get_args(Cut)
MOST_REPEATS = 30
MOST_MESSAGES = 40


class Stand:
    """One store, seen by two: one through the proxy, and one who checks without it."""

    def __init__(self, proxy: FaultProxy, through: BaseStorage, direct: BaseStorage) -> None:
        self.proxy = proxy
        self.through = through
        self.direct = direct
        self._arm: Callable[[], None] = lambda: None
        self._patience: float | None = None

    async def under_cuts(
        self, verb: Callable[[Stand], Awaitable[None]], place: Cut, at: int
    ) -> bool:
        """Do it with cuts at that message; whether any came to it."""
        before = self.proxy.counts.cuts
        self._arm = lambda: self.proxy.cut(place, at, times=random.choice((1, 1, 3)))
        await verb(self)
        return self.proxy.counts.cuts > before

    async def given_up(self, verb: Callable[[Stand], Awaitable[None]]) -> None:
        """Do it with every reply lost, until its caller has no more patience and begins anew."""
        self._arm = lambda: self.proxy.cut("before_reply", times=1_000)
        self._patience = 0.2
        await verb(self)
        assert self._patience is None, f"{verb.__name__}: was done without a reply"

    async def insist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make the call while connections are cut, and repeat it until it says that it is done."""
        self._arm()
        try:
            for _ in range(MOST_REPEATS):
                try:
                    async with asyncio.timeout(self._patience):
                        return await call()
                except StorageRefused:
                    raise
                except StorageError:
                    continue
                except TimeoutError:
                    # Given up by its caller, in the midst of a storage's own attempts.
                    self._patience = None
                    self.proxy.disarm()
        finally:
            self.proxy.disarm()
        raise AssertionError(f"not done after {MOST_REPEATS} attempts")

    # What each of them begins and ends with, without cuts

    async def enqueued(self, count: int = 3) -> tuple[list[str], str]:
        """Fresh tasks in a queue of their own."""
        tasks = some_tasks(count)
        return await self.direct.enqueue_many(tasks), tasks[0].queue

    async def claimed(self, count: int = 3) -> tuple[list[Task], str]:
        _, queue = await self.enqueued(count)
        return await self.through.reserve(count, queues=[queue]), queue

    async def check(self, ids: list[str], status: TaskStatus, attempts: int, token: int) -> None:
        for task_id in ids:
            task = await self.direct.get_task(task_id)
            assert task is not None, f"{task_id} is lost"
            assert (task.status, task.attempts, task.token) == (status, attempts, token)

    async def check_runs_once_more(self, ids: list[str], queue: str) -> None:
        """Each of them is claimable exactly once."""
        again = await self.direct.reserve(10, SYSTEM_CLOCK.now(), queues=[queue])
        assert sorted(task.id for task in again) == sorted(ids)
        assert await self.direct.record([success(task) for task in again]) == [True] * len(ids)


def some_tasks(count: int) -> list[Task]:
    queue = f"q-{SYSTEM_CLOCK.new_id()}"
    return [Task(func_path="m.f", args=(number,), queue=queue) for number in range(count)]


def success(task: Task) -> Outcome:
    return Succeeded(task.id, task.token, a_result(task, attempts=task.attempts + 1))


async def enqueue(stand: Stand) -> None:
    tasks, nonce = some_tasks(3), SYSTEM_CLOCK.new_id()
    ids = [task.id for task in tasks]

    assert await stand.insist(lambda: stand.through.enqueue_many(tasks, nonce=nonce)) == ids
    await stand.check(ids, TaskStatus.PENDING, 0, 0)
    await stand.check_runs_once_more(ids, tasks[0].queue)


async def claim(stand: Stand) -> None:
    ids, queue = await stand.enqueued()
    claim_id = SYSTEM_CLOCK.new_id()
    claimed = await stand.insist(
        lambda: stand.through.reserve(3, queues=[queue], claim_id=claim_id)
    )

    assert {task.id: task.token for task in claimed} == dict.fromkeys(ids, 1)
    held = await stand.direct.held_by(stand.through.owner)
    assert held == dict.fromkeys(ids, 1)
    assert await stand.through.record([success(task) for task in claimed]) == [True] * 3


async def record(stand: Stand) -> None:
    claimed, _ = await stand.claimed()
    outcomes = [success(task) for task in claimed]

    assert await stand.insist(lambda: stand.through.record(outcomes)) == [True] * 3
    await stand.check([task.id for task in claimed], TaskStatus.SUCCESS, 0, 1)


async def record_and_claim(stand: Stand) -> None:
    claimed, queue = await stand.claimed()
    more = [Task(func_path="m.f", queue=queue) for _ in range(3)]
    ids = await stand.direct.enqueue_many(more)
    claim_id = SYSTEM_CLOCK.new_id()
    outcomes = [success(task) for task in claimed]
    recorded, fresh = await stand.insist(
        lambda: stand.through.record_and_reserve(outcomes, 3, queues=[queue], claim_id=claim_id)
    )

    assert recorded == [True] * 3
    assert {task.id: task.token for task in fresh} == dict.fromkeys(ids, 1)
    assert await stand.direct.held_by(stand.through.owner) == dict.fromkeys(ids, 1)
    assert await stand.through.record([success(task) for task in fresh]) == [True] * 3


async def fail_and_retry(stand: Stand) -> None:
    claimed, queue = await stand.claimed()
    now = SYSTEM_CLOCK.now()
    outcomes = [Retried(task.id, task.token, an_error(), now) for task in claimed]

    assert await stand.insist(lambda: stand.through.record(outcomes)) == [True] * 3
    ids = [task.id for task in claimed]
    await stand.check(ids, TaskStatus.RETRYING, 1, 1)
    await stand.check_runs_once_more(ids, queue)


async def release(stand: Stand) -> None:
    claimed, queue = await stand.claimed()
    outcomes = [Released(task.id, task.token) for task in claimed]

    assert await stand.insist(lambda: stand.through.record(outcomes)) == [True] * 3
    ids = [task.id for task in claimed]
    await stand.check(ids, TaskStatus.PENDING, 0, 1)
    await stand.check_runs_once_more(ids, queue)


async def renew(stand: Stand) -> None:
    claimed, _ = await stand.claimed()
    owner = stand.through.owner
    renewal = await stand.insist(stand.through.renew)

    assert renewal.held == {task.id: task.token for task in claimed}
    assert (stand.through.owner, stand.through.lease_remaining > 0) == (owner, True)
    assert await stand.through.record([success(task) for task in claimed]) == [True] * 3


VERBS = [enqueue, claim, record, record_and_claim, fail_and_retry, release, renew]


@pytest.fixture
async def stand(place_on_server: str) -> AsyncIterator[Stand]:
    async with (
        FaultProxy(place_on_server) as proxy,
        open_storage(place_on_server) as direct,
        open_storage(proxy.url) as through,
    ):
        yield Stand(proxy, through, direct)


async def sweep(stand: Stand) -> None:
    """Cut at every message of every verb, in each of the three places."""
    for verb in VERBS:
        for place in PLACES:
            for at in range(1, MOST_MESSAGES):
                if not await stand.under_cuts(verb, place, at):
                    break
            assert at > 1, f"{verb.__name__}: nothing was cut {place}"
        await stand.given_up(verb)


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.fault("F03", "F36")
async def test_a_cut_at_any_message_of_any_verb_neither_loses_nor_doubles_a_task(stand):
    await sweep(stand)


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.fault("F35")
async def test_a_pool_whose_connections_are_cut_runs_each_task_once(place_on_server):
    tasks.counts.clear()
    names = [str(number) for number in range(2_000)]
    handles: list[AsyncTaskHandle[None]] = []
    async with (
        FaultProxy(place_on_server) as proxy,
        AsyncTaskQueue(place_on_server) as queue,
        AsyncWorkerPool(open_storage(proxy.url), 5, 0.1),
    ):
        while proxy.counts.cuts < 30:
            more = names[len(handles) : len(handles) + 10]
            handles += await queue.enqueue_many(tasks.count, [(name,) for name in more])
            proxy.cut(random.choice(PLACES), random.randint(1, 8))
            await asyncio.sleep(random.uniform(0, 0.05))
        await proxy.heal()
        for handle in handles:
            await handle.result(timeout=20)

    assert tasks.counts == dict.fromkeys(names[: len(handles)], 1)


@pytest.mark.deep
@pytest.mark.timeout(300)
@pytest.mark.fault("F36")
async def test_500_cuts_neither_lose_nor_double_a_task(stand):
    while stand.proxy.counts.cuts < 500:
        await sweep(stand)

    # Nothing of all this is left over, neither waiting nor held.
    stats = await stand.direct.stats()
    assert {status for status, count in stats.by_status.items() if count} == {TaskStatus.SUCCESS}
