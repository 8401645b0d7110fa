"""Connections are cut at every message of every call, and no task is lost or duplicated.

A call that ends in `StorageError` may or may not have taken effect. The caller repeats it with the
same nonce, claim id or token, which must be enough.
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
from tests.worker.recorder import until

T = TypeVar("T")

PLACES: tuple[Cut, ...] = get_args(Cut)
MOST_REPEATS = 30
MOST_MESSAGES = 40


class StoreUnderCuts:
    """One store with two storages: one uses it through the proxy, one checks it directly."""

    def __init__(self, proxy: FaultProxy, through: BaseStorage, direct: BaseStorage) -> None:
        self.proxy = proxy
        self.through = through
        self.direct = direct
        self._arm: Callable[[], None] = lambda: None
        self._timeout: float | None = None

    async def with_cuts(
        self, verb: Callable[[StoreUnderCuts], Awaitable[None]], place: Cut, at: int
    ) -> bool:
        """Make the call with cuts at that message; return whether a cut happened."""
        before = self.proxy.counts.cuts
        self._arm = lambda: self.proxy.cut(place, at, times=random.choice((1, 1, 3)))
        await verb(self)
        return self.proxy.counts.cuts > before

    async def with_lost_replies(self, verb: Callable[[StoreUnderCuts], Awaitable[None]]) -> None:
        """Make the call with every reply lost until the caller times out and repeats it."""
        self._arm = lambda: self.proxy.cut("before_reply", times=1_000)
        self._timeout = 0.2
        await verb(self)
        assert self._timeout is None, f"{verb.__name__}: succeeded without a reply"

    async def repeat_until_done(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make the call while connections are cut, and repeat it until it succeeds."""
        self._arm()
        began = SYSTEM_CLOCK.monotonic()
        try:
            for _ in range(MOST_REPEATS):
                try:
                    async with asyncio.timeout(self._timeout):
                        return await call()
                except StorageRefused:
                    raise
                except StorageError:
                    # NATS is not tried again within a call.
                    await asyncio.sleep(0.02)
                    if self._timeout is None or SYSTEM_CLOCK.monotonic() < began + self._timeout:
                        continue
                except TimeoutError:
                    pass
                # The caller times out while the storage still repeats its attempts, or the caller does.
                self._timeout = None
                self.proxy.cancel_cuts()
        finally:
            self.proxy.cancel_cuts()
        raise AssertionError(f"the call failed {MOST_REPEATS} times")

    # How each call starts and how it is checked, without cuts

    async def enqueue_new(self, count: int = 3) -> tuple[list[str], str]:
        """Enqueue new tasks in a separate queue."""
        tasks = some_tasks(count)
        return await self.direct.enqueue_many(tasks), tasks[0].queue

    async def claim_new(self, count: int = 3) -> tuple[list[Task], str]:
        _, queue = await self.enqueue_new(count)
        return await self.through.reserve(count, queues=[queue]), queue

    async def check(self, ids: list[str], status: TaskStatus, attempts: int, token: int) -> None:
        for task_id in ids:
            task = await self.direct.get_task(task_id)
            assert task is not None, f"{task_id} is lost"
            assert (task.status, task.attempts, task.token) == (status, attempts, token)

    async def check_claimable_once(self, ids: list[str], queue: str) -> None:
        """Assert that each of these tasks can be claimed exactly once more."""
        again = await self.direct.reserve(10, SYSTEM_CLOCK.now(), queues=[queue])
        assert sorted(task.id for task in again) == sorted(ids)
        assert await self.direct.record([success(task) for task in again]) == [True] * len(ids)


def some_tasks(count: int) -> list[Task]:
    queue = f"q-{SYSTEM_CLOCK.new_id()}"
    return [Task(func_path="m.f", args=(number,), queue=queue) for number in range(count)]


def success(task: Task) -> Outcome:
    return Succeeded(task.id, task.token, a_result(task, attempts=task.attempts + 1))


async def enqueue(store: StoreUnderCuts) -> None:
    tasks, nonce = some_tasks(3), SYSTEM_CLOCK.new_id()
    ids = [task.id for task in tasks]

    assert (
        await store.repeat_until_done(lambda: store.through.enqueue_many(tasks, nonce=nonce)) == ids
    )
    await store.check(ids, TaskStatus.PENDING, 0, 0)
    await store.check_claimable_once(ids, tasks[0].queue)


async def claim(store: StoreUnderCuts) -> None:
    ids, queue = await store.enqueue_new()
    claim_id = SYSTEM_CLOCK.new_id()
    claimed = await store.repeat_until_done(
        lambda: store.through.reserve(3, queues=[queue], claim_id=claim_id)
    )

    assert {task.id: task.token for task in claimed} == dict.fromkeys(ids, 1)
    held = await store.direct.held_by(store.through.owner)
    assert held == dict.fromkeys(ids, 1)
    assert await store.through.record([success(task) for task in claimed]) == [True] * 3


async def record(store: StoreUnderCuts) -> None:
    claimed, _ = await store.claim_new()
    outcomes = [success(task) for task in claimed]

    assert await store.repeat_until_done(lambda: store.through.record(outcomes)) == [True] * 3
    await store.check([task.id for task in claimed], TaskStatus.SUCCESS, 0, 1)


async def record_and_claim(store: StoreUnderCuts) -> None:
    claimed, queue = await store.claim_new()
    more = [Task(func_path="m.f", queue=queue) for _ in range(3)]
    ids = await store.direct.enqueue_many(more)
    claim_id = SYSTEM_CLOCK.new_id()
    outcomes = [success(task) for task in claimed]
    recorded, fresh = await store.repeat_until_done(
        lambda: store.through.record_and_reserve(outcomes, 3, queues=[queue], claim_id=claim_id)
    )

    assert recorded == [True] * 3
    assert {task.id: task.token for task in fresh} == dict.fromkeys(ids, 1)
    assert await store.direct.held_by(store.through.owner) == dict.fromkeys(ids, 1)
    assert await store.through.record([success(task) for task in fresh]) == [True] * 3


async def fail_and_retry(store: StoreUnderCuts) -> None:
    claimed, queue = await store.claim_new()
    now = SYSTEM_CLOCK.now()
    outcomes = [Retried(task.id, task.token, an_error(), now) for task in claimed]

    assert await store.repeat_until_done(lambda: store.through.record(outcomes)) == [True] * 3
    ids = [task.id for task in claimed]
    await store.check(ids, TaskStatus.RETRYING, 1, 1)
    await store.check_claimable_once(ids, queue)


async def release(store: StoreUnderCuts) -> None:
    claimed, queue = await store.claim_new()
    outcomes = [Released(task.id, task.token) for task in claimed]

    assert await store.repeat_until_done(lambda: store.through.record(outcomes)) == [True] * 3
    ids = [task.id for task in claimed]
    await store.check(ids, TaskStatus.PENDING, 0, 1)
    await store.check_claimable_once(ids, queue)


async def renew(store: StoreUnderCuts) -> None:
    claimed, _ = await store.claim_new()
    owner = store.through.owner
    renewal = await store.repeat_until_done(store.through.renew)

    assert renewal.held == {task.id: task.token for task in claimed}
    assert (store.through.owner, store.through.lease_remaining > 0) == (owner, True)
    assert await store.through.record([success(task) for task in claimed]) == [True] * 3


VERBS = [enqueue, claim, record, record_and_claim, fail_and_retry, release, renew]


@pytest.fixture
async def store(place_on_server: str) -> AsyncIterator[StoreUnderCuts]:
    async with (
        FaultProxy(place_on_server) as proxy,
        open_storage(place_on_server) as direct,
        open_storage(proxy.url) as through,
    ):
        yield StoreUnderCuts(proxy, through, direct)


async def sweep(store: StoreUnderCuts) -> None:
    """Cut at every message of every call, in each of the three places."""
    for verb in VERBS:
        for place in PLACES:
            for at in range(1, MOST_MESSAGES):
                if not await store.with_cuts(verb, place, at):
                    break
            assert at > 1, f"{verb.__name__}: no connection was cut {place}"
        await store.with_lost_replies(verb)


@pytest.mark.slow
@pytest.mark.deep_on("nats")
@pytest.mark.timeout(240)
@pytest.mark.fault("F03", "F36")
async def test_a_connection_cut_at_any_message_neither_loses_nor_duplicates_a_task(store):
    await sweep(store)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_an_opening_that_is_cancelled_at_any_reply_leaves_no_connection(place_on_server):
    async with open_storage(place_on_server):
        pass  # installs what later openings find
    async with FaultProxy(place_on_server) as proxy:
        # Replies that take longer than a millisecond have the opening read the time again.
        proxy.delay(0.01)
        for replies in range(1, MOST_MESSAGES):
            storage = open_storage(proxy.url)
            opening = asyncio.create_task(storage.open())
            last = proxy.counts.replies + replies
            await until(lambda: proxy.counts.replies >= last or opening.done())  # noqa: B023
            if opening.done():
                await storage.close()
                break
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            await until(lambda: not proxy._connections)
    assert replies > 3


@pytest.mark.slow
@pytest.mark.deep_on("nats")
@pytest.mark.timeout(120)
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
async def test_500_connection_cuts_neither_lose_nor_duplicate_a_task(store):
    while store.proxy.counts.cuts < 500:
        await sweep(store)

    # No task remains, neither waiting nor claimed.
    stats = await store.direct.stats()
    assert {status for status, count in stats.by_status.items() if count} == {TaskStatus.SUCCESS}
