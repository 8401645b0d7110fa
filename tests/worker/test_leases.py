"""A worker renews its lease whatever its tasks do, and stops them before another worker may start them."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omniq import (
    AsyncTaskQueue,
    AsyncWorkerPool,
    LeaseLost,
    StaleClaim,
    TaskResult,
    TaskStatus,
    WorkerPool,
)
from omniq.events import Event, LeaseLoss, StoreRestored, TasksGivenBack, WorkerProblem
from omniq.storage.base import BaseStorage
from omniq.storage.memory import MemoryStorage
from omniq.storage.row_rules import first_token
from omniq.testing.builders import a_task
from omniq.testing.clock import ManualClock
from omniq.testing.contract.claim import UNDECODABLE_ARGS, FailingSerializer
from omniq.testing.faults import FaultyStorage
from tests.worker import hostile_tasks as tasks
from tests.worker.recorder import until

LEASE = 1.2

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def nothing_has_started():
    tasks.starts.clear()
    tasks.stopped.clear()


class Two:
    """Two workers of one store. The first can be disconnected from it."""

    def __init__(self) -> None:
        memory = MemoryStorage()
        self.storage = FaultyStorage(memory)
        self.other = memory.another()
        self.queue = AsyncTaskQueue(memory.another())
        self.pool = AsyncWorkerPool(self.storage, 1, 0.05, 0.01, lease=LEASE)
        self.successor = AsyncWorkerPool(self.other, 1, 0.05, 0.01, lease=LEASE)
        self.emitted: list[Event] = []
        self.pool.events.subscribe(self.emitted.append)

    def disconnect(self) -> None:
        """From now on no call of the first worker reaches the store."""
        self.storage.fail("renew", "record", "reserve", "give_back", times=None)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.queue, self.storage, self.other:
            try:
                yield
            finally:
                self.storage.heal()
                await self.successor.stop(cancel_in_flight=True)
                await self.pool.stop(cancel_in_flight=True)


class SlowToAnswer(FaultyStorage):
    """Delays the reply to a claim that returned tasks until the test allows it."""

    def __init__(self, inner: BaseStorage, reply: asyncio.Event) -> None:
        super().__init__(inner)
        self._reply = reply
        self.has_claimed = asyncio.Event()

    async def _do(self, verbs: Any, step: Any) -> Any:
        reply = await super()._do(verbs, step)
        if "reserve" in verbs and reply[1].rows:
            self.has_claimed.set()
            await self._reply.wait()
        return reply


@pytest.mark.fault("F18")
def test_a_blocked_event_loop_keeps_its_lease_and_no_other_worker_starts_the_task():
    """F18: the loop is blocked for five leases, and the heartbeat has a separate thread."""
    memory = MemoryStorage()
    blocked = WorkerPool(memory.another(), 1, 0.05, lease=LEASE)
    other = WorkerPool(memory.another(), 1, 0.05, lease=LEASE)
    with blocked:
        task_id = blocked.submit(tasks.blocks_the_loop, 5 * LEASE)
        asyncio.run(until(lambda: tasks.starts))
        with other:
            result = asyncio.run(_result(memory, task_id))

    assert (result.status, result.attempts, tasks.starts) == (TaskStatus.SUCCESS, 1, [1])


@pytest.mark.fault("F20")
async def test_a_heartbeat_that_fails_for_some_time_does_not_lose_the_lease():
    """F20."""
    two = Two()
    async with two.running():
        await two.pool.start()
        handle = await two.queue.enqueue(tasks.waits_for_cancel)
        await until(lambda: tasks.starts)
        await two.successor.start()
        owner = two.storage.owner
        two.storage.fail("renew", times=3)
        failed = two.storage.calls["renew"] + 3
        await until(lambda: two.storage.calls["renew"] > failed + 1)

        assert await handle.status() is TaskStatus.RUNNING
        assert (tasks.starts, two.storage.owner) == ([1], owner)
    assert sum(isinstance(event, WorkerProblem) for event in two.emitted) == 1


@pytest.mark.fault("F21")
async def test_an_async_run_is_stopped_before_its_lease_expires_when_the_storage_is_unreachable():
    """F21."""
    two = Two()
    async with two.running():
        await two.pool.start()
        handle = await two.queue.enqueue(tasks.waits_for_cancel)
        await until(lambda: tasks.starts)
        await two.successor.start()
        two.disconnect()
        await until(tasks.stopped.is_set)
        remaining, starts = two.storage.lease_remaining, list(tasks.starts)

        assert await handle.result(timeout=30) == "second"
    assert remaining > 0
    assert starts == [1]
    assert tasks.starts == [1, 2]


@pytest.mark.fault("F21")
async def test_a_process_run_is_stopped_before_its_lease_expires_when_the_storage_is_unreachable(
    tmp_path: Path,
):
    two = Two()
    async with two.running():
        await two.pool.start()
        handle = await two.queue.enqueue(tasks.waits_in_a_process, str(tmp_path))
        await until((tmp_path / "1.started").exists)
        two.disconnect()
        await until(lambda: two.pool.stats().active_workers == 0)
        (tmp_path / "alive").unlink()
        await two.successor.start()

        assert await handle.result(timeout=15) == "second"
    assert not (tmp_path / "alive").exists()


async def test_a_fenced_worker_continues_under_a_new_id():
    two = Two()
    async with two.running():
        await two.pool.start()
        owner = two.storage.owner
        await two.queue.enqueue(tasks.waits_for_cancel)
        await until(lambda: tasks.starts)
        held = await two.queue.storage.held_by(owner)
        two.disconnect()
        await two.successor.start()
        await until(lambda: tasks.starts == [1, 2])
        await two.successor.stop()
        two.storage.heal()
        next_one = await two.queue.enqueue(tasks.good_in_the_loop, 7)

        assert await next_one.result(timeout=30) == 7
    assert two.storage.owner != owner
    assert not held.items() & two.storage.claims.items()
    assert any(isinstance(event, LeaseLoss) for event in two.emitted)


async def test_a_worker_says_that_its_store_went_back_and_continues():
    two = Two()
    async with two.running():
        await two.pool.start()
        owner = two.storage.owner
        # The worker remembers more renewals than the store: as if the store had lost some.
        two.storage._identity.beat += 1_000
        await until(lambda: two.storage.owner != owner)
        handle = await two.queue.enqueue(tasks.good_in_the_loop, 7)

        assert await handle.result(timeout=30) == 7
        task = await two.queue.get_task(handle.id)
    (event,) = [event for event in two.emitted if isinstance(event, StoreRestored)]
    assert (event.owner, event.repeated) == (owner, False)
    assert task is not None
    assert task.token == first_token(event.epoch)


async def test_a_claim_whose_reply_was_lost_is_released_and_runs():
    """Rule 4: the storage counts the task as this worker's, and the worker does not know it."""
    two = Two()
    async with two.running():
        handle = await two.queue.enqueue(tasks.good_in_the_loop, 7)
        await two.storage.renew(lease=LEASE)
        two.storage.fail("reserve", when="after")
        await two.pool.start()

        assert await handle.result(timeout=30) == 7
        result = await two.queue.get_result(handle.id)
    assert result is not None
    assert result.attempts == 1


async def test_an_outcome_whose_reply_was_lost_is_recorded_once():
    two = Two()
    async with two.running():
        await two.pool.start()
        two.storage.fail("record", when="after", times=2)
        handle = await two.queue.enqueue(tasks.good_in_the_loop, 7)

        assert await handle.result(timeout=30) == 7
        await until(lambda: two.pool.stats().completed_tasks == 1)
    assert two.pool.stats().stale_outcomes == 0


@pytest.mark.fault("F17")
async def test_a_task_whose_claim_took_longer_than_the_lease_is_not_started():
    """F17, inside one process: the reply to the claim arrives after the lease has expired."""

    memory, reply = MemoryStorage(), asyncio.Event()
    storage, other = SlowToAnswer(memory, reply), memory.another()
    async with AsyncTaskQueue(memory.another()) as queue, storage, other:
        handle = await queue.enqueue(tasks.waits_for_cancel)
        pool = AsyncWorkerPool(storage, 1, 0.05, 0.01, lease=LEASE)
        await pool.start()
        storage.fail("renew", times=None)
        await storage.has_claimed.wait()
        await until(lambda: storage.lease_remaining < 0)
        reply.set()
        async with AsyncWorkerPool(other, 1, 0.05, lease=LEASE):
            assert await handle.result(timeout=30) == "second"
        storage.heal()
        await pool.stop(cancel_in_flight=True)

    assert tasks.starts == [2]


async def test_a_claim_whose_reply_is_late_but_in_time_is_run_once():
    memory, reply = MemoryStorage(), asyncio.Event()
    storage = SlowToAnswer(memory, reply)
    async with AsyncTaskQueue(memory.another()) as queue, storage:
        handle = await queue.enqueue(tasks.waits_for_cancel)
        async with AsyncWorkerPool(storage, 1, 0.05, lease=LEASE) as pool:
            await storage.has_claimed.wait()
            renewed = storage.calls["renew"]
            await until(lambda: storage.calls["renew"] > renewed + 3)
            reply.set()
            await until(lambda: tasks.starts)
            renewed = storage.calls["renew"]
            await until(lambda: storage.calls["renew"] > renewed + 2)

            assert await handle.status() is TaskStatus.RUNNING
            await pool.stop(cancel_in_flight=True)
    assert tasks.starts == [1]


async def test_two_pools_on_one_storage_leave_each_others_tasks_alone():
    storage = FaultyStorage(MemoryStorage())
    queue = AsyncTaskQueue(storage)
    async with queue, queue.worker(lease=LEASE, queues=["a"]) as first:
        handle = await queue.options(queue="a").enqueue(tasks.waits_for_cancel)
        await until(lambda: tasks.starts)
        async with queue.worker(lease=LEASE, queues=["b"]):
            renewed = storage.calls["renew"]
            await until(lambda: storage.calls["renew"] > renewed + 8)

            assert await handle.status() is TaskStatus.RUNNING
            assert tasks.starts == [1]
            await first.stop(cancel_in_flight=True)


async def test_a_storage_drops_its_claims_when_its_sibling_was_fenced():
    clock = ManualClock()
    storage = MemoryStorage(clock=clock)
    other, sibling = storage.another(), storage.sibling()
    async with storage, other, sibling:
        await storage.enqueue(a_task())
        (claimed,) = await storage.reserve(1)
        owner = storage.owner
        clock.advance(31)
        await other.give_back_abandoned()
        with pytest.raises(LeaseLost):
            await sibling.renew()

        assert storage.owner == sibling.owner != owner
        with pytest.raises(StaleClaim):
            await storage.mark_done(
                claimed.id, TaskResult(task_id=claimed.id, status=TaskStatus.SUCCESS)
            )
        (again,) = await storage.reserve(1)
    assert (again.id, again.token) == (claimed.id, claimed.token + 1)


async def test_a_lost_lease_that_is_noticed_twice_changes_the_id_once():
    clock = ManualClock()
    storage = MemoryStorage(clock=clock)
    sibling = storage.sibling()
    async with storage, sibling:
        await storage.renew()
        await storage._engine.retire(storage.owner)
        with pytest.raises(LeaseLost):
            await sibling.renew()
        fresh = storage.owner
        await sibling.renew()
        await storage.reserve(1)

    assert storage.owner == fresh


async def _result(memory: MemoryStorage, task_id: str) -> TaskResult:
    async with memory.another() as storage:
        result = await storage.wait_for_result(task_id, timeout=15)
    assert result is not None
    return result


class Forgetful(MemoryStorage):
    """A store that went back: it no longer counts some tasks as their owner's."""

    lost: frozenset[str] = frozenset()

    async def renew(self, **options: Any) -> Any:
        renewal = await super().renew(**options)
        held = {key: token for key, token in renewal.held.items() if key not in Forgetful.lost}
        return msgspec.structs.replace(renewal, held=held)


async def test_a_run_that_its_store_does_not_hold_any_more_is_stopped():
    storage = Forgetful()
    queue = AsyncTaskQueue(storage)
    async with queue, queue.worker(concurrency=2, poll_interval=0.05, lease=LEASE):
        lost = await queue.enqueue(tasks.waits_for_cancel)
        await until(lambda: tasks.starts)
        other = await queue.enqueue(tasks.good_in_a_thread, 7)
        Forgetful.lost = frozenset([lost.id])
        try:
            await until(tasks.stopped.is_set)
        finally:
            Forgetful.lost = frozenset()

        assert await other.result(timeout=20) == 7


async def test_tasks_of_a_file_store_that_was_put_back_do_not_stay_running(tmp_path: Path):
    """The folder as it was some time ago says RUNNING of tasks that this worker has finished."""
    url = f"file://{tmp_path}/store?durability=os"
    queue = AsyncTaskQueue(url)
    async with queue, queue.worker(concurrency=4, poll_interval=0.05, lease=LEASE):
        handles = [await queue.enqueue(tasks.sleeps_in_the_loop, 0.4) for _ in range(4)]
        folder = tmp_path / "store" / "tasks"
        await until(lambda: len(list(folder.glob("*.running"))) == 4)
        copies = {path: path.read_bytes() for path in folder.iterdir()}
        for handle in handles:
            await handle.result(timeout=20)
        for path, data in copies.items():
            path.write_bytes(data)
        for path in set(folder.iterdir()) - copies.keys():
            path.unlink()

        for handle in handles:
            await handle.result(timeout=20)
        stats = await queue.stats()
    assert stats.by_status[TaskStatus.RUNNING] == 0


async def test_a_running_task_that_the_store_has_forgotten_begins_a_new_epoch(tmp_path: Path):
    """A backup without the task is restored. The leases of SQLite are in another file, and stay."""
    emitted: list[Event] = []
    path, copy = tmp_path / "tasks.db", tmp_path / "copy.db"
    async with AsyncTaskQueue(f"sqlite:///{path}?durability=os") as queue:
        pool = queue.worker(concurrency=2, poll_interval=0.05, lease=LEASE)
        pool.events.subscribe(emitted.append, kinds=(StoreRestored, LeaseLoss))
        async with pool:
            with closing(sqlite3.connect(path)) as before, closing(sqlite3.connect(copy)) as after:
                before.backup(after)
            await queue.enqueue(tasks.waits_for_cancel)
            await until(lambda: tasks.starts)
            with closing(sqlite3.connect(copy)) as before, closing(sqlite3.connect(path)) as after:
                before.backup(after)
            await until(tasks.stopped.is_set)
            await until(lambda: emitted)
            again = await queue.enqueue(tasks.good_in_the_loop, 7)
            assert await again.result(timeout=20) == 7
            task = await queue.get_task(again.id)
            problems = (await queue.health()).problems

    assert [type(event) for event in emitted] == [StoreRestored, LeaseLoss]
    assert task is not None
    assert task.token > 2**21
    assert any("went back" in problem for problem in problems)


class Fleet:
    """Two workers of one store, which loses contact with both of them."""

    def __init__(self) -> None:
        memory = MemoryStorage()
        self.storages = [FaultyStorage(memory), FaultyStorage(memory.another())]
        self.queue = AsyncTaskQueue(memory.another())
        self.pools = [AsyncWorkerPool(each, 1, 0.05, 0.01, lease=LEASE) for each in self.storages]
        self.emitted: list[Event] = []
        for pool in self.pools:
            pool.events.subscribe(self.emitted.append)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.queue, self.storages[0], self.storages[1], self.pools[0], self.pools[1]:
            yield

    def given_back(self) -> list[str]:
        return [event.owner for event in self.emitted if isinstance(event, TasksGivenBack)]


@pytest.mark.parametrize("is_second", [False, True], ids=["first", "second"])
async def test_after_a_gap_no_worker_takes_what_another_has_finished_in_it(is_second: bool):
    """The worker that comes back first leaves the other the time to renew and to record."""
    fleet = Fleet()
    early, late = fleet.storages[:: -1 if is_second else 1]
    async with fleet.running():
        handles = [await fleet.queue.enqueue(tasks.sleeps_in_the_loop, 0.3) for _ in range(2)]
        await until(lambda: all(pool.stats().active_workers for pool in fleet.pools))
        for storage in fleet.storages:
            storage.fail("renew", "record", "reserve", "give_back", times=None)
        await asyncio.sleep(2 * LEASE)
        early.heal()
        await asyncio.sleep(LEASE / 2)
        late.heal()

        results = [await handle.result(timeout=30) for handle in handles]
        owners = [storage.owner for storage in fleet.storages]
    assert results == [0.3, 0.3]
    assert fleet.given_back() == []
    assert sum(pool.stats().stale_outcomes for pool in fleet.pools) == 0
    assert len(set(owners)) == 2


async def test_a_worker_that_cannot_renew_does_not_give_back_its_own_tasks():
    fleet = Fleet()
    async with fleet.queue, fleet.storages[0], fleet.pools[0]:
        handle = await fleet.queue.enqueue(tasks.sleeps_in_the_loop, 0.2)
        await until(lambda: fleet.pools[0].stats().active_workers)
        fleet.storages[0].fail("renew", "record", times=None)
        await asyncio.sleep(2 * LEASE)
        fleet.storages[0].heal()

        assert await handle.result(timeout=30) == 0.2
    assert fleet.given_back() == []
    assert fleet.pools[0].stats().stale_outcomes == 0


class SlowToRecord(MemoryStorage):
    """Records outcomes when the test allows it."""

    may_record = asyncio.Event()

    async def record(self, outcomes: Any) -> Any:
        await self.may_record.wait()
        return await super().record(outcomes)


async def test_a_claim_is_not_unknown_while_one_beside_it_ends_as_undecodable():
    """The reply is there, and its caller gets it only after the task beside it was recorded."""
    SlowToRecord.may_record = asyncio.Event()
    async with SlowToRecord(serializer=FailingSerializer()) as storage:
        await storage.enqueue_many([a_task("a", args=UNDECODABLE_ARGS), a_task("b")])
        await storage.renew()
        claim = asyncio.ensure_future(storage.reserve(2))
        for _ in range(3):
            await asyncio.sleep(0)
            asked_at = storage.register.tick()
            held = (await storage.renew()).held
            assert held == {"a": 1, "b": 1}
            assert storage.register.compare(held, asked_at).unknown == []
        storage.may_record.set()

        assert [task.id for task in await claim] == ["b"]
