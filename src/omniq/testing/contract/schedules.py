"""Schedules: each nominal time is fired once, however many workers read the same schedule."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import msgspec
import pytest

from omniq.errors import InvalidTask, InvalidValue, NotSealed, QueueFull, SerializationError
from omniq.models import Schedule
from omniq.serialization import MsgspecSerializer, encode_internal
from omniq.signing import Seal, SealedSerializer
from omniq.storage.base import BaseStorage
from omniq.tasks.steps import CheckpointData, decode_value, read_checkpoint, task_key
from omniq.testing.builders import a_result, a_task
from omniq.testing.clock import ManualClock
from omniq.testing.contract._suite import ContractPart, OpenAnother, claim_one, ids, promise


async def _put(storage: BaseStorage, clock: ManualClock, schedule_id: str = "nightly") -> Schedule:
    """Store a schedule and return it as a worker reads it before firing."""
    task = a_task("template", args=(1, (2, "x")), kwargs={"k": {3}})
    await storage.put_schedule(
        Schedule(id=schedule_id, task=task, interval=60.0, next_at=clock.now())
    )
    stored = await storage.get_schedule(schedule_id)
    assert stored is not None
    return stored


def _advanced(schedule: Schedule) -> Schedule:
    assert schedule.next_at is not None
    return msgspec.structs.replace(
        schedule, last_at=schedule.next_at, next_at=schedule.next_at + timedelta(seconds=60)
    )


class ScheduleContract(ContractPart):
    """S1 to S7."""

    @promise("S1", "E6")
    async def test_a_stored_schedule_is_returned_unchanged(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        schedule = Schedule(
            id="nightly",
            task=a_task("template", args=(1, (2, b"x")), kwargs={"k": {3}}, queue="mail"),
            cron="0 3 * * *",
            tz="Europe/Berlin",
            next_at=clock.now() + timedelta(hours=1),
            last_at=clock.now(),
            paused=True,
            start=clock.now() - timedelta(days=1),
            end=clock.now() + timedelta(days=1),
            missed="all",
            max_missed=7,
            overlap="skip",
            jitter=2.5,
            declared=True,
        )
        await storage.put_schedule(schedule)
        stored = await (await open_another()).get_schedule("nightly")

        assert stored is not None
        assert msgspec.structs.replace(stored, version=0) == schedule
        assert stored.task.args == (1, (2, b"x"))

    @promise("S1")
    async def test_every_change_increases_the_version(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        first = await _put(storage, clock)
        await storage.put_schedule(msgspec.structs.replace(first, paused=True))
        second = await storage.get_schedule("nightly")
        assert second is not None
        await storage.fire_schedule(second, _advanced(second), None)
        third = await storage.get_schedule("nightly")

        assert third is not None
        assert first.version < second.version < third.version

    async def test_schedules_are_listed_in_the_order_of_ids_and_deleted(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        for schedule_id in "cab":
            await _put(storage, clock, schedule_id)
        listed = [schedule.id for schedule in await storage.list_schedules()]

        assert listed == ["a", "b", "c"]
        assert [await storage.delete_schedule("b"), await storage.delete_schedule("b")] == [
            True,
            False,
        ]
        assert [schedule.id for schedule in await storage.list_schedules()] == ["a", "c"]
        assert await storage.get_schedule("b") is None

    @promise("S2")
    async def test_firing_enqueues_the_task_and_advances_the_schedule(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        schedule = await _put(storage, clock)

        assert await storage.fire_schedule(schedule, _advanced(schedule), a_task("n-1", args=(7,)))
        stored = await storage.get_schedule("nightly")
        assert stored is not None
        assert (stored.last_at, stored.next_at) == (
            schedule.next_at,
            clock.now() + timedelta(seconds=60),
        )
        task = await claim_one(storage)
        assert (task.id, task.args) == ("n-1", (7,))

    @promise("S2")
    async def test_one_of_many_that_fire_the_same_version_of_a_schedule_returns_true(
        self, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        owners = [await open_another() for _ in range(4)]
        schedule = await _put(owners[0], clock)
        # The task id contains the nominal time, so concurrent workers fire the same task id.
        task = a_task("nightly-1")
        fired = await asyncio.gather(
            *(owner.fire_schedule(schedule, _advanced(schedule), task) for owner in owners)
        )

        assert fired.count(True) == 1
        assert ids(await owners[0].reserve(10)) == ["nightly-1"]

    @promise("S2")
    async def test_a_schedule_that_was_changed_or_deleted_meanwhile_is_not_fired(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        schedule = await _put(storage, clock)
        await storage.put_schedule(msgspec.structs.replace(schedule, paused=True))

        assert not await storage.fire_schedule(schedule, _advanced(schedule), a_task())
        stored = await storage.get_schedule("nightly")
        assert stored is not None
        assert stored.paused
        await storage.delete_schedule("nightly")
        assert not await storage.fire_schedule(stored, _advanced(stored), a_task())
        assert await storage.list_tasks() == []
        assert await storage.get_schedule("nightly") is None

    @promise("S4")
    async def test_a_deleted_schedule_cannot_be_fired_when_a_new_one_has_its_id(
        self, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        storage, stale = await open_another(), await open_another()
        await _put(storage, clock)
        read = await stale.get_schedule("nightly")
        assert read is not None
        await storage.delete_schedule("nightly")
        fresh = await _put(storage, clock)

        assert not await stale.fire_schedule(read, _advanced(read), a_task("n-1"))
        assert await storage.list_tasks() == []
        assert await storage.get_schedule("nightly") == fresh

    @promise("S5")
    async def test_a_time_that_is_not_due_by_the_clock_of_the_store_is_not_passed(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        schedule = await _put(storage, clock)
        early = clock.now() + timedelta(seconds=5)
        for task in (a_task("n-1"), None):
            assert not await storage.fire_schedule(
                schedule, _advanced(schedule), task, passed=early
            )
        assert await storage.list_tasks() == []
        assert await storage.get_schedule("nightly") == schedule
        clock.advance(timedelta(seconds=5))

        assert await storage.fire_schedule(
            schedule, _advanced(schedule), a_task("n-1"), passed=early
        )

    @promise("S3")
    async def test_firing_a_nominal_time_whose_task_exists_only_advances_the_schedule(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        schedule = await _put(storage, clock)
        await storage.enqueue(a_task("n-1"))
        await storage.mark_done("n-1", a_result(await claim_one(storage)))

        assert await storage.fire_schedule(schedule, _advanced(schedule), a_task("n-1"))
        assert await storage.reserve(1) == []
        stored = await storage.get_schedule("nightly")
        assert stored is not None
        assert stored.last_at == schedule.next_at

    @promise("S3", "E3")
    async def test_a_schedule_enqueues_nothing_while_its_unique_key_is_held(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        schedule = await _put(storage, clock)
        await storage.enqueue(a_task("a", unique="key"))

        assert await storage.fire_schedule(schedule, _advanced(schedule), a_task("b", unique="key"))
        assert ids(await storage.list_tasks()) == ["a"]
        assert await storage.enqueue(a_task("c", unique="key")) == "a"

    @promise("S3", "E5")
    async def test_firing_into_a_full_queue_is_refused_and_the_schedule_stays_unchanged(
        self, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        storage = await open_another(max_pending=1)
        schedule = await _put(storage, clock)
        await storage.enqueue(a_task("a"))

        with pytest.raises(QueueFull):
            await storage.fire_schedule(schedule, _advanced(schedule), a_task("b"))
        assert await storage.get_schedule("nightly") == schedule
        assert ids(await storage.list_tasks()) == ["a"]

    @promise("S2")
    async def test_advancing_without_a_task_enqueues_nothing(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        schedule = await _put(storage, clock)

        assert await storage.fire_schedule(schedule, _advanced(schedule), None)
        assert await storage.list_tasks() == []

    @promise("Q5")
    async def test_changing_a_schedule_that_was_read_does_not_change_the_store(
        self, storage: BaseStorage
    ) -> None:
        items = [1]
        await storage.put_schedule(Schedule(id="s", task=a_task("t", args=(items,)), interval=5.0))
        items.append(2)
        read = await storage.get_schedule("s")
        assert read is not None
        read.task.args[0].append(3)
        (listed,) = await storage.list_schedules()
        listed.task.args[0].append(4)
        again = await storage.get_schedule("s")

        assert again is not None
        assert again.task.args == ([1],)

    @promise("E4")
    async def test_a_schedule_that_could_not_be_fired_is_refused(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        with pytest.raises(InvalidValue):
            await storage.put_schedule(Schedule(id="../x", task=a_task()))
        with pytest.raises(InvalidTask):
            await storage.put_schedule(Schedule(id="s", task=a_task(args=(object(),))))
        with pytest.raises(InvalidTask):
            await storage.put_schedule(Schedule(id="s", task=a_task(max_retries=-1)))
        with pytest.raises(InvalidValue):
            await storage.put_schedule(Schedule(id="s", task=a_task(), cron="0 0 30 2 *"))

        assert await storage.list_schedules() == []

    @promise("S6")
    async def test_a_schedule_without_a_seal_waits_when_there_is_a_key(
        self, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        unsealed = await open_another(serializer=_WithoutDocumentSeals(_SEALED))
        schedule = await _put(unsealed, clock)
        sealed = await open_another(serializer=_SEALED)
        (older,) = await sealed.older_documents()

        assert (older.kind, older.id, older.problem) == ("schedule", "nightly", "")
        assert older.schedule == schedule
        assert await sealed.list_schedules() == []
        with pytest.raises(NotSealed):
            await sealed.get_schedule("nightly")
        assert not await sealed.fire_schedule(schedule, _advanced(schedule), None)
        assert await unsealed.older_documents() == []

    @promise("S6", "S7")
    async def test_a_checkpoint_without_a_seal_waits_when_there_is_a_key(
        self, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        unsealed = await open_another(serializer=_WithoutDocumentSeals(_SEALED))
        await unsealed.enqueue(a_task("a"))
        task = await claim_one(unsealed)
        value = _SEALED.encode_result(a_result(task, 7))
        stored = encode_internal(CheckpointData(steps={"one": value}))
        await unsealed.save_checkpoint(task.id, task.token, stored)
        sealed = await open_another(serializer=_SEALED)
        (older,) = await sealed.older_documents()

        with pytest.raises(NotSealed):
            read_checkpoint(_SEALED, task_key(task), await sealed.load_checkpoint("a"))
        assert await sealed.seal_older(older)
        assert await sealed.older_documents() == []
        data = read_checkpoint(_SEALED, task_key(task), await sealed.load_checkpoint("a"))
        assert decode_value(_SEALED, data.steps["one"]) == 7

    @promise("S7")
    async def test_a_schedule_that_was_sealed_is_like_any_other(
        self, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        unsealed = await open_another(serializer=_WithoutDocumentSeals(_SEALED))
        schedule = await _put(unsealed, clock)
        sealed = await open_another(serializer=_SEALED)
        (older,) = await sealed.older_documents()

        assert await sealed.seal_older(older)
        assert await sealed.list_schedules() == [schedule]
        assert await sealed.fire_schedule(schedule, _advanced(schedule), a_task("fired"))
        assert not await sealed.seal_older(older)

    @promise("S8")
    async def test_a_schedule_that_cannot_be_read_is_named_with_the_reason(
        self, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        sealed = await open_another(serializer=_SEALED)
        await _put(sealed, clock)
        keyless = await open_another(serializer=MsgspecSerializer())
        unreadable = await keyless.unreadable_schedules()

        assert list(unreadable) == ["nightly"]
        assert "OMNIQ_SIGNING_KEY" in unreadable["nightly"]
        assert await keyless.list_schedules() == []
        assert await sealed.unreadable_schedules() == {}

    @promise("S7")
    async def test_a_schedule_whose_call_has_no_seal_cannot_be_sealed(
        self, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        await _put(await open_another(serializer=MsgspecSerializer()), clock)
        sealed = await open_another(serializer=_SEALED)
        (older,) = await sealed.older_documents()

        with pytest.raises(SerializationError, match=older.problem):
            await sealed.seal_older(older)
        assert await sealed.list_schedules() == []


_SEALED = SealedSerializer(MsgspecSerializer(), Seal("the key of this store"))


class _WithoutDocumentSeals:
    """Seals tasks and results and, as an older omniq did, no documents."""

    def __init__(self, sealed: SealedSerializer) -> None:
        self.encode_task, self.decode_task = sealed.encode_task, sealed.decode_task
        self.encode_result, self.decode_result = sealed.encode_result, sealed.decode_result
