"""Stores that went back to an earlier state: who notices it, what becomes of tasks, which tokens follow.

A test makes a store go back through the port of the engine, or has an owner remember more than the store
ever had, which is the same to both.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from functools import partial

import msgspec
import pytest

from omniq.clock import seconds_to_micros
from omniq.errors import DuplicateTask, LeaseLost, StorageRefused, StoreWentBack
from omniq.models import Schedule, TaskError, TaskResult, TaskStatus
from omniq.outcomes import Retried, Succeeded
from omniq.serialization import encode_internal
from omniq.storage import engine, incarnation
from omniq.storage.backend import ANY, Changes, DocumentChange, Ended, Section
from omniq.storage.base import BaseStorage
from omniq.storage.incarnation import STORE, StoreRecord
from omniq.storage.row_rules import (
    FORMAT,
    WENT_BACK,
    finish_cancelled,
    finished_row,
    first_token,
)
from omniq.testing.builders import a_task
from omniq.testing.clock import ManualClock
from omniq.testing.contract._suite import (
    LEASE,
    ContractPart,
    OpenAnother,
    claim_one,
    ids,
    promise,
    status_of,
)


async def _forget_claim(storage: BaseStorage, task_id: str) -> None:
    """Have the store forget that the task was ever claimed."""

    async def forget(section: Section) -> None:
        row = (await section.load([task_id], bodies=True))[task_id].row
        row.status, row.owner, row.token, row.started_at = TaskStatus.PENDING, None, 0, 0
        await section.write(Changes(updated=[row]))

    await storage._engine._transact(forget)


async def _forget_task(storage: BaseStorage, task_id: str) -> None:
    """Have the store forget that the task was ever enqueued."""

    async def forget(section: Section) -> None:
        row = (await section.load([task_id], bodies=True))[task_id].row
        finish = finish_cancelled(row, section.now, "forgotten")
        finished = finished_row(row, finish, b"", section.now)
        finished.row.result_ttl = 0
        await section.write(Changes(ended=[Ended(finished)]))

    await storage._engine._transact(forget)


async def _set_format(storage: BaseStorage, task_id: str, record_format: int) -> None:
    async def change(section: Section) -> None:
        row = (await section.load([task_id], bodies=True))[task_id].row
        # A change that is visible to claims makes every store write the row.
        row.format, row.attached = record_format, True
        await section.write(Changes(updated=[row]))

    await storage._engine._transact(change)


async def _put_record(storage: BaseStorage, record: StoreRecord) -> None:
    change = DocumentChange(STORE, STORE, ANY, encode_internal(record), due=record.epoch)
    await storage._engine._write(Changes(documents=[change]))


async def _epoch(storage: BaseStorage) -> int:
    return (await storage.store_record()).epoch


def _success(task_id: str, token: int) -> Succeeded:
    return Succeeded(task_id, token, TaskResult(task_id=task_id, status=TaskStatus.SUCCESS))


class IncarnationContract(ContractPart):
    """Stores that went back."""

    @promise("C1", "L14")
    async def test_in_a_new_store_tokens_count_from_one(self, storage: BaseStorage) -> None:
        await storage.enqueue(a_task("a"))

        assert (await claim_one(storage)).token == 1
        assert await _epoch(storage) == 0

    @promise("L14")
    async def test_a_lower_beat_shows_that_the_store_went_back(self, storage: BaseStorage) -> None:
        await storage.renew()
        owner = storage.owner
        storage._identity.beat += 1
        with pytest.raises(StoreWentBack) as noticed:
            await storage.renew()

        assert await _epoch(storage) == noticed.value.epoch > 0
        assert not noticed.value.is_repeated
        assert storage.owner != owner
        await storage.renew()

    @promise("L14")
    async def test_no_trace_of_the_lease_shows_that_the_store_went_back(
        self, storage: BaseStorage
    ) -> None:
        await storage.renew()
        until, beat = storage._identity.lease_until, storage._identity.beat
        storage._identity.replace(storage.owner, "unknown-to-the-store", 0)
        storage._identity.lease_until, storage._identity.beat = until, beat
        with pytest.raises(StoreWentBack):
            await storage.renew()

        assert await _epoch(storage) > 0

    @promise("L14")
    async def test_a_lower_epoch_shows_that_the_store_went_back(self, storage: BaseStorage) -> None:
        before = await storage.store_record()
        raised = await storage.mark_restored()
        await storage.renew()
        await _put_record(storage, before)
        with pytest.raises(StoreWentBack):
            await storage.renew()

        assert await _epoch(storage) > raised

    @promise("L14", "L3")
    async def test_an_owner_that_was_fenced_does_not_take_the_store_for_an_older_one(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await storage.enqueue(a_task("a"))
        for verb in (storage.renew, partial(storage.reserve, 1)):
            await storage.reserve(1)
            await storage.renew()
            clock.advance(LEASE)
            # Only the store's clock has ended the lease: the owner still counts on it.
            storage._identity.lease_until += seconds_to_micros(2 * LEASE)
            await other.give_back_abandoned()
            with pytest.raises(LeaseLost) as lost:
                await verb()
            assert not isinstance(lost.value, StoreWentBack)

        assert await _epoch(storage) == 0

    @promise("L15")
    async def test_who_meets_a_higher_epoch_is_fenced_and_adopts_it(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        claiming, renewing = await open_another(), await open_another()
        await storage.enqueue(a_task("a"))
        await claiming.renew()
        await renewing.renew()
        epoch = await storage.mark_restored()
        with pytest.raises(LeaseLost) as lost_by_claim:
            await claiming.reserve(1)
        with pytest.raises(LeaseLost) as lost_by_renewal:
            await renewing.renew()

        for lost in (lost_by_claim, lost_by_renewal):
            assert not isinstance(lost.value, StoreWentBack)
        await renewing.renew()
        assert (await claim_one(claiming)).token == first_token(epoch)
        assert await _epoch(storage) == epoch

    @promise("L16")
    async def test_a_store_that_needs_a_newer_reader_is_refused(
        self,
        storage: BaseStorage,
        open_another: OpenAnother,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        await storage.renew()
        record = await storage.store_record()
        newer = msgspec.structs.replace(record, format=FORMAT + 1, oldest_reader=FORMAT + 1)
        await _put_record(storage, newer)
        with pytest.raises(StorageRefused, match="newer version"):
            await storage.renew()
        with pytest.raises(StorageRefused, match="newer version"):
            await open_another()
        # What a newer omniq would do: so that the storage can be closed.
        monkeypatch.setattr(incarnation, "FORMAT", FORMAT + 1)
        await _put_record(storage, record)

    @promise("C19")
    async def test_a_task_of_a_newer_format_is_left_alone(
        self, storage: BaseStorage, open_another: OpenAnother, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        newer = await open_another()
        record = await storage.store_record()
        await _put_record(storage, msgspec.structs.replace(record, format=FORMAT + 1))
        await storage.enqueue_many([a_task("a", func_path="m.new"), a_task("b", func_path="m.old")])
        await _set_format(storage, "a", FORMAT + 1)

        assert ids(await storage.reserve(5)) == ["b"]
        assert await storage.reserve(5) == []
        task = await storage.get_task("a")
        assert task is not None
        assert (task.status, task.attempts, task.crashes) == (TaskStatus.PENDING, 0, 0)
        assert await storage.count_newer() == 1
        # What a newer omniq does.
        monkeypatch.setattr(engine, "FORMAT", FORMAT + 1)
        assert ids(await newer.reserve(5)) == ["a"]

    @promise("C19", "C9")
    async def test_a_task_of_a_newer_format_than_the_store_has_is_damaged(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many([a_task("a"), a_task("b")])
        await _set_format(storage, "a", FORMAT + 1)

        assert ids(await storage.reserve(5)) == ["b"]
        (letter,) = await storage.list_dead()
        assert (letter.task_id, letter.failure_reason) == ("a", "undecodable")
        stored = await storage._engine.record("a")
        assert stored is not None
        assert stored.row.body

    @promise("L17", "L18")
    async def test_what_was_claimed_before_is_given_back_uncharged(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        holder = await open_another()
        await storage.enqueue_many(
            [a_task("runs"), a_task("retries"), a_task("once", max_crashes=0), a_task("cancelled")]
        )
        await holder.reserve(4)
        await holder.mark_failed("retries", TaskError("no", error_type="E"), will_retry=True)
        await storage.cancel("cancelled")
        epoch = await storage.mark_restored()

        assert await status_of(storage, "cancelled") is TaskStatus.CANCELLED
        assert await status_of(storage, "retries") is TaskStatus.RETRYING
        (letter,) = await storage.list_dead()
        assert (letter.task_id, letter.failure_reason) == ("once", WENT_BACK)
        task = await storage.get_task("runs")
        assert task is not None
        assert (task.status, task.attempts, task.crashes) == (TaskStatus.PENDING, 0, 0)
        claimed = await storage.reserve(4)
        assert {(each.id, each.token) for each in claimed} == {
            ("runs", first_token(epoch)),
            ("retries", first_token(epoch)),
        }
        with pytest.raises(LeaseLost):
            await holder.reserve(1)
        assert await storage.record([_success("runs", first_token(epoch))]) == [True]

    @promise("L17")
    async def test_a_late_outcome_from_before_is_refused(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        holder = await open_another()
        await storage.enqueue(a_task("a"))
        task = await claim_one(holder)
        await storage.mark_restored()

        assert await holder.record([_success("a", task.token)]) == [False]
        assert await status_of(storage, "a") is TaskStatus.PENDING

    @promise("L17", "L7")
    async def test_a_crash_after_the_epoch_was_raised_is_charged(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        await storage.mark_restored()
        holder = await open_another()
        await storage.enqueue(a_task("a"))
        await claim_one(holder)
        clock.advance(LEASE)
        await storage.give_back_abandoned()
        task = await storage.get_task("a")

        assert task is not None
        assert (task.status, task.crashes) == (TaskStatus.RETRYING, 1)

    @promise("L18")
    async def test_every_restore_begins_a_higher_epoch(self, storage: BaseStorage) -> None:
        await storage.enqueue(a_task("a"))
        first = await storage.mark_restored()
        before = await claim_one(storage)
        second = await storage.mark_restored()
        with pytest.raises(LeaseLost):
            await storage.reserve(1)
        after = await claim_one(storage)

        assert first < second < 2**32
        assert before.token < after.token == first_token(second) < 2**53

    @promise("L18", "C4")
    async def test_tasks_of_an_earlier_epoch_keep_their_place(self, storage: BaseStorage) -> None:
        await storage.enqueue_many([a_task("a"), a_task("b")])
        await storage.mark_restored()
        await storage.enqueue_many([a_task("c"), a_task("d")])
        await storage.mark_restored()
        await storage.enqueue(a_task("e"))

        assert ids(await storage.reserve(5)) == ["a", "b", "c", "d", "e"]

    @promise("L18", "S1")
    async def test_the_versions_of_schedules_have_the_same_floor(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        schedule = Schedule(
            id="s", task=a_task("t"), interval=60.0, next_at=clock.now() + timedelta(seconds=60)
        )
        await storage.put_schedule(schedule)
        epoch = await storage.mark_restored()
        await storage.put_schedule(schedule)
        stored = await storage.get_schedule("s")

        assert stored is not None
        assert stored.version == first_token(epoch)

    @promise("C18")
    async def test_a_claim_does_not_give_the_same_token_twice(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        first = await claim_one(storage)
        await _forget_claim(storage, "a")
        clock.advance(0.000001)
        with pytest.raises(StoreWentBack) as noticed:
            await storage.reserve(1)
        again = await claim_one(storage)

        assert first.token < again.token == first_token(noticed.value.epoch)
        assert (again.attempts, again.crashes) == (0, 0)

    @promise("C18")
    async def test_an_outcome_shows_that_the_store_has_forgotten_its_claim(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many([a_task("a"), a_task("b")])
        first, other = await storage.reserve(2)
        await _forget_claim(storage, "a")
        with pytest.raises(StoreWentBack):
            await storage.record([_success("a", first.token), _success("b", other.token)])

        # A store may have recorded the other outcome, whose claim it knows.
        assert ids(await storage.reserve(1)) == ["a"]

    @promise("C18")
    async def test_an_outcome_shows_that_the_store_has_forgotten_its_task(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many([a_task("a"), a_task("b")])
        first, other = await storage.reserve(2)
        await _forget_task(storage, "a")
        with pytest.raises(StoreWentBack):
            await storage.record([_success("a", first.token), _success("b", other.token)])

        assert await _epoch(storage) > 0
        with suppress(DuplicateTask):
            await storage.enqueue(a_task("b"))
        assert all(task.token > other.token for task in await storage.reserve(2))

    @promise("C18")
    async def test_the_next_outcome_of_a_task_with_history_shows_it_too(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        error = TaskError("no", error_type="E")
        await storage.record([Retried("a", task.token, error, eta=storage.clock.now())])
        task = await claim_one(storage)
        await _forget_task(storage, "a")
        with pytest.raises(StoreWentBack):
            await storage.record([_success("a", task.token)])

    @promise("C18", "R2", "R3")
    async def test_a_task_that_ended_without_a_record_is_no_sign_that_the_store_went_back(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await storage.enqueue_many([a_task("a", result_ttl=0), a_task("b", result_ttl=0)])
        late, ended = await storage.reserve(2)
        await storage.record([_success(ended.id, ended.token)])
        await storage.record([_success(ended.id, ended.token)])
        clock.advance(LEASE)
        await other.give_back_abandoned()
        again = await claim_one(other)
        assert await other.record([_success(again.id, again.token)]) == [True]

        assert await storage.record([_success(late.id, late.token)]) == [False]
        assert await _epoch(storage) == 0

    @promise("C18", "E2")
    async def test_a_task_that_is_enqueued_again_under_its_id_is_another_one(
        self, storage: BaseStorage
    ) -> None:
        for _ in range(2):
            await storage.enqueue(a_task("a", result_ttl=0))
            task = await claim_one(storage)
            assert task.token == 1
            assert await storage.record([_success("a", 1)]) == [True]

        assert await _epoch(storage) == 0

    @promise("L19")
    async def test_after_two_raises_within_one_lease_claims_wait(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        for is_repeated in (False, True):
            await storage.renew()
            storage._identity.beat += 1
            with pytest.raises(StoreWentBack) as noticed:
                await storage.renew()
            assert noticed.value.is_repeated is is_repeated
        assert await storage.reserve(1) == []
        clock.advance(LEASE)

        assert ids(await storage.reserve(1)) == ["a"]
