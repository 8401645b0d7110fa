"""What operators see and change through a queue: named queues, workers, breakers and limits."""

from __future__ import annotations

import pytest

from omniq import BreakerState, TaskQueue
from omniq.models import BreakerRule, Limit, Task, TaskError
from omniq.outcomes import Retried
from tests.worker import guarded_tasks

UNKNOWN = "no-such-worker"


async def test_a_paused_queue_keeps_its_tasks_until_it_is_resumed(store, queue):
    await queue.options(queue="mail").enqueue(guarded_tasks.add, 1)
    async with store.another() as worker:
        await queue.queues.pause("mail")
        while_paused = await worker.reserve(1, worker.clock.now())
        (paused,) = await queue.queues.list()
        names = await queue.queues.paused()
        await queue.queues.resume("mail")
        (open_again,) = await queue.queues.list()
        after = await worker.reserve(1, worker.clock.now())

    assert while_paused == []
    assert (paused.name, paused.waiting, paused.paused) == ("mail", 1, True)
    assert names == {"mail"}
    assert not open_again.paused
    assert len(after) == 1


async def test_workers_are_listed_found_paused_and_resumed(store, queue):
    async with store.another() as worker:
        await worker.renew(lease=30, concurrency=3)
        assert await queue.workers.pause(worker.owner)
        (paused,) = await queue.workers()
        assert await queue.workers.resume(worker.owner)
        resumed = await queue.workers.get(worker.owner)

    assert (paused.id, paused.paused) == (worker.owner, True)
    assert resumed is not None
    assert not resumed.paused
    assert await queue.workers.list() == []
    assert await queue.workers.get(UNKNOWN) is None
    assert not await queue.workers.pause(UNKNOWN)
    assert not await queue.workers.resume(UNKNOWN)


async def test_a_running_limit_shows_who_holds_it_and_how_many_wait(store, queue):
    handles = await queue.enqueue_many(guarded_tasks.one_of_three, range(5))
    before = await queue.limits.get("three")
    async with store.another() as worker:
        claimed = await worker.reserve(5, worker.clock.now())
        (limit,) = await queue.limits.list()

    assert before is not None
    assert (before.running, before.waiting, before.full) == ((), 5, False)
    assert sorted(limit.running) == sorted(task.id for task in claimed)
    assert set(limit.running) < {handle.id for handle in handles}
    assert (limit.key, limit.max_running, limit.rate) == ("three", 3, None)
    assert (len(limit.running), limit.waiting, limit.full) == (3, 2, True)
    assert limit.opens_at is None


async def test_a_rate_limit_shows_its_starts_and_when_it_has_room_again(store, storage, queue):
    limit = Limit(key="api", rate=2, per=60.0)
    for number in range(3):
        await storage.enqueue(Task(func_path="m.f", id=f"t{number}", limits=(limit,)))
    now = storage.clock.now()
    await storage.reserve(3, now)

    (found,) = await queue.limits.list()

    assert (found.key, found.rate, found.per, found.max_running) == ("api", 2, 60.0, None)
    assert (found.started, found.waiting, found.full) == (2, 1, True)
    assert found.opens_at is not None
    assert 50 < (found.opens_at - now).total_seconds() <= 61


async def test_breakers_are_listed_and_found_by_name(storage, queue):
    rule = BreakerRule(name="smtp", max_failures=1, reset_timeout=60.0)
    await storage.enqueue(Task(func_path="m.f", id="t", breakers=(rule,)))
    (claimed,) = await storage.reserve(1, storage.clock.now())
    error = TaskError("down", error_type="OSError")
    await storage.record([Retried("t", claimed.token, error=error, eta=storage.clock.now())])

    (listed,) = await queue.breakers()
    found = await queue.breakers.get("smtp")

    assert listed == found
    assert (listed.name, listed.state, listed.reason) == ("smtp", BreakerState.OPEN, "OSError")
    assert await queue.breakers.list() == [listed]
    assert await queue.breakers.get("imap") is None


@pytest.mark.timeout(60)
def test_blocking_code_has_the_same_objects(tmp_path):
    with TaskQueue(f"sqlite:///{tmp_path}/tasks.db?durability=os") as queue:
        queue.options(queue="mail").enqueue(guarded_tasks.one_of_three, 1)
        queue.queues.pause("mail")
        (mail,) = queue.queues.list()
        paused = queue.queues.paused()
        queue.queues.resume("mail")
        limit = queue.limits.get("three")
        with queue.worker() as pool:
            (worker,) = queue.workers()
            assert queue.workers.pause(worker.id)
            assert queue.workers.resume(worker.id)
            assert queue.workers.get(worker.id) is not None
            assert pool.running

        assert (mail.paused, paused) == (True, frozenset({"mail"}))
        assert limit is not None
        assert limit.waiting == 1
        assert queue.workers.list() == []
        assert queue.breakers() == queue.breakers.list() == []
