"""Commits of the log backend: races, lost replies, groups, snapshots, and the way back."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from functools import partial

import pytest

from omniq import failpoints
from omniq.errors import LeaseLost, StorageCorrupt, StorageError, StorageRefused
from omniq.models import TaskStatus
from omniq.storage.backend import Document, Section
from omniq.storage.log import LogStorage
from omniq.storage.log.backend import LogBackend
from omniq.storage.log.encoding import Commit, Effects, encode_commit
from omniq.storage.log.replica import Replica
from omniq.testing.builders import a_result, a_task, an_error, some_tasks
from omniq.testing.clock import ManualClock
from tests.storage.memory_log import CAPABILITIES, MemoryLog, Records, log_storage


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def records() -> Records:
    return Records()


@pytest.fixture
def make(records, clock):
    return partial(log_storage, records, clock)


class FailingLog(MemoryLog):
    """A log whose next appends have these faults, in turn."""

    def __init__(self, records, clock, *faults):
        self.faults = list(faults)
        super().__init__(records, clock, lambda: self.faults.pop(0) if self.faults else None)


class HeldLog(MemoryLog):
    """A log whose appends, or also its reads, wait until they are released."""

    def __init__(self, records, clock):
        super().__init__(records, clock)
        self.began = threading.Event()
        self.released = threading.Event()
        self.holds_reads = False

    async def append(self, number, data):
        await self._hold()
        return await super().append(number, data)

    async def read(self, first):
        if self.holds_reads:
            await self._hold()
        return await super().read(first)

    async def _hold(self):
        self.began.set()
        await asyncio.to_thread(self.released.wait)


def on_log(log, clock):
    return LogStorage(lambda: log, capabilities=CAPABILITIES, clock=clock)


# Groups


async def test_calls_that_arrive_during_an_append_share_the_next_commit(records, clock):
    log = HeldLog(records, clock)
    async with on_log(log, clock) as storage:
        first = asyncio.create_task(storage.enqueue(a_task("first")))
        await asyncio.to_thread(log.began.wait)
        others = [asyncio.create_task(storage.enqueue(a_task())) for _ in range(20)]
        read = asyncio.create_task(storage.count_waiting())
        await asyncio.sleep(0.01)
        assert not first.done()
        log.released.set()
        await asyncio.gather(first, *others)

        assert records.end == 2
        assert await read in range(1, 22)


async def test_an_error_of_one_call_does_not_affect_others_of_its_group(records, clock):
    log = HeldLog(records, clock)
    async with on_log(log, clock) as storage:
        first = asyncio.create_task(storage.enqueue(a_task("a")))
        await asyncio.to_thread(log.began.wait)
        calls = [storage.enqueue(a_task("b")), storage.enqueue(a_task("a")), storage.cancel("b")]
        together = asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(0.01)
        log.released.set()
        await first

        assert [type(answer).__name__ for answer in await together] == [
            "str",
            "DuplicateTask",
            "bool",
        ]
        assert records.end == 2


async def test_a_call_whose_caller_was_cancelled_before_its_turn_is_not_run(records, clock):
    log = HeldLog(records, clock)
    async with on_log(log, clock) as storage:
        first = asyncio.create_task(storage.enqueue(a_task("first")))
        await asyncio.to_thread(log.began.wait)
        second = asyncio.create_task(storage.enqueue(a_task("second")))
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.sleep(0.01)
        log.released.set()
        await first

        assert await storage.get_task("second") is None


# Races


async def test_two_processes_that_claim_at_once_share_the_tasks(make):
    async with make() as one, make() as two:
        await one.enqueue_many(some_tasks([f"t{number:03}" for number in range(200)]))

        async def drain(storage):
            taken = []
            while tasks := await storage.reserve(3):
                taken += [task.id for task in tasks]
            return taken

        first, second = await asyncio.gather(drain(one), drain(two))

        assert sorted(first + second) == [f"t{number:03}" for number in range(200)]


async def test_a_section_that_lost_the_race_is_run_again_on_the_new_state(make):
    async with make() as one, make() as two:
        await one.enqueue(a_task("a"))
        await two.get_task("a")
        await one.reserve(1)

        # `two` has not read the claim: it decides, loses, and decides again.
        assert await two.reserve(1) == []
        assert await two.cancel("a")
        assert (await one.renew()).cancelled == {"a"}


async def test_a_read_sees_what_another_process_has_committed_before(make):
    async with make() as one, make() as two:
        await one.enqueue(a_task("a"))

        assert await two.get_task("a") is not None
        await one.cancel("a")
        assert (await two.get_task("a")).status is TaskStatus.CANCELLED


async def test_reads_that_arrive_during_a_look_at_the_log_share_the_next_one(records, clock):
    log = HeldLog(records, clock)
    async with on_log(log, clock) as storage:
        log.holds_reads = True
        first = asyncio.create_task(storage.get_task("a"))
        await asyncio.to_thread(log.began.wait)
        others = [asyncio.create_task(storage.get_task("a")) for _ in range(50)]
        await asyncio.sleep(0.01)
        before = records.reads
        log.released.set()
        await asyncio.gather(first, *others)

        assert records.reads - before == 2


async def test_a_process_cannot_claim_as_an_owner_that_another_has_fenced(make, clock):
    async with make() as one, make() as two:
        await one.enqueue_many(some_tasks("ab"))
        await one.reserve(1)
        clock.advance(one.lease_remaining - 0.001)
        identity = one._identity.lease_until
        clock.advance(1)
        await two.give_back_abandoned()
        # As if it did not know that its lease has expired.
        one._identity.lease_until = identity + 3_600_000_000

        with pytest.raises(LeaseLost):
            await one.reserve(1)


# The answers of the log


async def test_a_lost_reply_is_settled_by_the_id_of_the_commit(records, clock):
    log = FailingLog(records, clock, "lost reply")
    async with on_log(log, clock) as storage:
        await storage.enqueue(a_task("a"))

        assert records.end == 1
        assert await storage.count_waiting() == 1


@pytest.mark.parametrize("fault", ["lost request", "nobody wins", "conflict"])
async def test_a_commit_that_was_not_stored_is_appended_again(records, clock, fault):
    log = FailingLog(records, clock, fault)
    async with on_log(log, clock) as storage:
        await storage.enqueue(a_task("a"))

        assert records.end == (2 if fault == "conflict" else 1)
        assert await storage.count_waiting() == 1


class OutageBehindAnAppend(MemoryLog):
    """The first append is stored and its reply is lost; before the log answers again, its commits are trimmed."""

    def __init__(self, records, clock):
        super().__init__(records, clock)
        self.is_out = False

    async def append(self, number, data):
        is_stored = await super().append(number, data)
        if number == 1 and is_stored:
            self.is_out = True
            raise StorageError("the reply was lost")
        return is_stored

    async def read(self, first):
        if not self.is_out:
            return await super().read(first)
        self.is_out = False
        other = Replica(MemoryLog(self._records, self._clock), "other", self._clock)
        await other.load()
        self._records.kept = 0
        await other.save(*other.snapshot())
        raise StorageError("the log does not answer")


async def test_a_commit_that_may_have_been_stored_before_the_log_was_trimmed_is_not_made_again(
    records, clock
):
    """The second attempt is refused: by the commit of the first."""
    replica = Replica(OutageBehindAnAppend(records, clock), "a", clock)
    await replica.load()
    replica.begin()
    replica.tables.set_document("kind", "key", Document("kind", "key", b"x"))
    with pytest.raises(StorageError, match="may have been stored"):
        await replica.commit()

    assert replica.tables.document("kind", "key") is not None


async def test_an_outage_is_an_error_and_leaves_the_committed_state(records, clock, monkeypatch):
    monkeypatch.setattr("omniq.storage.log.replica._PAUSES", (0, 0))
    log = FailingLog(records, clock)
    async with on_log(log, clock) as storage:
        await storage.enqueue(a_task("a"))
        log.faults = ["lost request"] * 2
        with pytest.raises(StorageError, match="does not answer") as raised:
            await storage.enqueue(a_task("b"))

        assert str(raised.value.__cause__) == "the request was lost"
        assert await storage.get_task("b") is None
        await storage.enqueue(a_task("b"))
        assert await storage.count_waiting() == 2


async def test_a_commit_that_arrives_after_its_error_is_followed(records, clock, monkeypatch):
    monkeypatch.setattr("omniq.storage.log.replica._PAUSES", (0,))
    late: list[tuple[int, bytes]] = []

    class LateLog(MemoryLog):
        async def append(self, number, data):
            late.append((number, data))
            raise StorageError("no answer")

    storage = on_log(LateLog(records, clock), clock)
    async with storage:
        with pytest.raises(StorageError):
            await storage.enqueue(a_task("a"))
        records.append(*late[0])

        assert await storage.count_waiting() == 1


async def test_a_commit_of_an_unknown_format_is_refused_before_anything_is_applied(make, records):
    async with make() as storage:
        await storage.enqueue(a_task("a"))
        records.append(2, b"\x09" + records.commits[1][1:])

        with pytest.raises(StorageRefused, match="upgrade omniq"):
            await storage.get_task("a")
        del records.commits[2]
        records.end = 1
        assert await storage.count_waiting() == 1


async def test_a_damaged_commit_is_reported(make, records):
    async with make() as storage:
        records.append(1, b"\x01damaged")
        with pytest.raises(StorageCorrupt):
            await storage.get_task("a")
        records.end = 0


async def test_a_log_that_was_replaced_by_another_is_reported_and_then_loaded(make, records):
    async with make() as storage:
        await storage.enqueue(a_task("a"))
        records.append(2, encode_commit(Commit("x-2", "x-1", 0, 0, 0, Effects())))
        with pytest.raises(StorageCorrupt, match="does not follow"):
            await storage.get_task("a")
        records.end = 0
        records.commits.clear()

        assert await storage.get_task("a") is None


@pytest.mark.parametrize(
    ("failpoint", "is_stored"), [("log.before_append", False), ("log.after_append", True)]
)
async def test_after_a_defect_the_state_is_loaded_again(make, failpoint, is_stored):
    async with make() as storage:
        await storage.enqueue(a_task("a"))
        failpoints.configure(f"{failpoint}=raise:EIO@1")
        try:
            with pytest.raises(StorageError):
                await storage.enqueue(a_task("b"))
        finally:
            failpoints.reset()

        assert (await storage.get_task("b") is not None) is is_stored
        assert await storage.get_task("a") is not None


async def test_a_forked_process_gets_an_error(make, monkeypatch):
    async with make() as storage:
        with monkeypatch.context() as forked:
            forked.setattr("omniq.concurrency.process_id.PROCESS_ID.number", 1)
            with pytest.raises(StorageError, match="after a fork"):
                await storage.get_task("a")


# Time


async def test_the_time_of_the_store_never_goes_back(make, clock):
    async def read_now(section: Section) -> int:
        return section.now

    async with make() as one, make() as two:
        await one.enqueue(a_task("a"))
        before = clock.micros()
        clock.jump(timedelta(hours=-1))
        await two.enqueue(a_task("b"))

        assert await one._backend.transact(read_now) == before
        assert await two._backend.transact(read_now) == before


# Snapshots and bodies


async def test_a_process_that_opens_loads_the_snapshot_and_what_follows(records, clock):
    make = partial(log_storage, records, clock, snapshot_bytes=3_000)
    async with make() as storage:
        for number in range(30):
            await storage.enqueue(a_task(f"t{number}"))
        (task,) = await storage.reserve(1)
        await storage.mark_done(task.id, a_result(task, 7))
    assert records.snapshot is not None
    assert records.snapshot[0] < records.end

    async with make() as storage:
        assert await storage.count_waiting() == 29
        result = await storage.get_result(task.id)
        assert result is not None
        assert result.result == 7


async def test_a_process_that_stood_still_loads_the_snapshot_that_replaced_its_commits(clock):
    records = Records(kept=0)
    make = partial(log_storage, records, clock, snapshot_bytes=1)
    async with make() as asleep, make() as awake:
        for number in range(5):
            await awake.enqueue(a_task(f"t{number}"))

        await asleep.enqueue(a_task("a"))
        assert await asleep.count_waiting() == 6
        await awake.enqueue(a_task("b"))
        assert len(await asleep.reserve(9)) == 7


async def test_of_many_processes_one_saves_the_snapshot(clock):
    saved: list[int] = []

    class CountedRecords(Records):
        def save_snapshot(self, number, data):
            saved.append(number)
            super().save_snapshot(number, data)

    make = partial(log_storage, CountedRecords(), clock, snapshot_bytes=20_000)
    async with make() as one, make() as two, make() as three:
        for number in range(120):
            await (one, two, three)[number % 3].enqueue(a_task())

    assert len(saved) == len(set(saved))
    assert len(saved) <= 120 * 400 // 20_000


async def test_the_arguments_of_a_task_are_in_one_commit_only(make, records):
    argument = "x" * 1_000
    async with make() as storage, make() as other:
        await storage.enqueue(a_task("a", args=(argument,)))
        (task,) = await storage.reserve(1)
        await storage.mark_done("a", a_result(task))
        stored = [argument.encode() in data for data in records.commits.values()]

        assert stored.count(True) == 1
        assert (await other.get_task("a")).args == (argument,)


# The way back


async def test_undo_returns_to_the_state_before(clock, monkeypatch):
    """Every verb, decided and then lost: the state is as before, and the next claim returns the same."""
    calls = [
        lambda it: it.enqueue_many(some_tasks("xyz", unique=None)),
        lambda it: it.enqueue(a_task("u", unique="red")),
        lambda it: it.reserve(2),
        lambda it: it.renew(),
        lambda it: it.cancel("c"),
        lambda it: it.pause_queue("mail"),
        lambda it: it.retry_dead("dead"),
        lambda it: it.delete_dead("dead"),
        lambda it: it.delete_task("done"),
        lambda it: it.purge_results(clock.now() + timedelta(days=1)),
        lambda it: it.give_back_abandoned(),
        lambda it: it.mark_done("held", a_result(a_task("held"), 1)),
        lambda it: it.save_checkpoint("held", 1, b"step"),
        lambda it: it.retire(),
    ]
    for call in calls:
        records = Records()
        log = FailingLog(records, clock)
        async with on_log(log, clock) as storage:
            await storage.enqueue_many(some_tasks(["held", "done", "dead"]))
            tasks = {task.id: task for task in await storage.reserve(3)}
            await storage.mark_done("done", a_result(tasks["done"]))
            await storage.mark_failed("dead", an_error(), will_retry=False)
            await storage.enqueue_many(some_tasks("abc"))
            replica = _replica_of(storage)
            before = _state(replica)
            states: list[object] = []
            undo = replica.undo

            def noting(undo=undo, replica=replica, states=states):
                was_changed = replica.is_changed
                undo()
                if was_changed:
                    states.append(_state(replica))

            monkeypatch.setattr(replica, "undo", noting)
            log.faults = ["conflict"]
            await call(storage)

        assert states, "the call changed nothing"
        assert states[0] == before


async def test_undo_returns_to_the_state_before_the_first_of_several_changes(records, clock):
    replica = Replica(MemoryLog(records, clock), "w", clock)
    await replica.load()
    replica.begin()
    replica.tables.set_document("kind", "key", Document("kind", "key", b"1"))
    assert await replica.commit()
    before = _state(replica)

    replica.begin()
    for data in (b"2", b"3"):
        replica.tables.set_document("kind", "key", Document("kind", "key", data))
        replica.tables.set_document("kind", "new", Document("kind", "new", data))
    replica.undo()

    assert _state(replica) == before


def _replica_of(storage: LogStorage) -> Replica:
    backend = storage._backend
    assert isinstance(backend, LogBackend)
    assert backend._thread is not None
    return backend._thread._replica


def _state(replica: Replica) -> object:
    tables = replica.tables
    # In any order: an entry that was removed and put back is the last of its table.
    return (
        tables.seq,
        dict(tables.rows),
        dict(tables.finished),
        dict(tables.dead),
        {kind: dict(each.by_key) for kind, each in tables.documents.items() if each.by_key},
        dict(tables.leases),
        dict(tables.fenced),
        {owner: dict(rows) for owner, rows in tables.held.items()},
        dict(tables.ready.rows),
    )


async def test_all_replicas_have_the_same_state(records, clock):
    make = partial(log_storage, records, clock, faults=0.4, snapshot_bytes=5_000)
    async with make() as one, make() as two, make() as three:
        storages = (one, two, three)
        for number in range(60):
            storage = storages[number % 3]
            await storage.enqueue(a_task(f"t{number}", priority=number % 4))
            for task in await storage.reserve(1 + number % 2):
                if number % 5:
                    await storage.mark_done(task.id, a_result(task, number))
                else:
                    await storage.mark_failed(task.id, an_error(), will_retry=number % 2 == 0)
        await asyncio.gather(*(storage.stats() for storage in storages))
        states = [_state(_replica_of(storage)) for storage in storages]

    assert states[0] == states[1] == states[2]
