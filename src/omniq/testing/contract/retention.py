"""Retention: how long records of finished tasks are stored, and what a purge deletes."""

from __future__ import annotations

from datetime import timedelta

import pytest

from omniq.errors import DuplicateTask, InvalidTask
from omniq.models import TaskStatus
from omniq.outcomes import Retried
from omniq.settings import Settings
from omniq.storage.base import BaseStorage
from omniq.testing.builders import (
    FINAL_KINDS,
    OutcomeKind,
    a_result,
    a_task,
    an_error,
    an_outcome,
    some_tasks,
)
from omniq.testing.clock import ManualClock
from omniq.testing.contract._suite import (
    ContractPart,
    OpenAnother,
    claim_one,
    ids,
    promise,
    status_of,
)

_MICROSECOND = timedelta(microseconds=1)


class RetentionContract(ContractPart):
    """T1 to T5."""

    @promise("T1")
    async def test_a_purge_deletes_tasks_that_finished_before_the_instant(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        await storage.mark_done("a", a_result(await claim_one(storage)))

        assert await storage.purge_results(clock.now()) == 0
        assert await status_of(storage, "a") is TaskStatus.SUCCESS
        assert await storage.purge_results(clock.now() + _MICROSECOND) == 1
        assert await storage.get_task("a") is None
        assert await storage.get_result("a") is None
        assert await storage.purge_results(clock.now() + _MICROSECOND) == 0

    @promise("T1")
    async def test_a_purge_keeps_tasks_that_have_not_ended(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many(some_tasks(["running", "retrying", "held"]))
        await storage.enqueue(a_task("interval", interval=5))
        running, retrying, _, interval = await storage.reserve(4)
        await storage.record([Retried("retrying", retrying.token, an_error(), clock.now())])
        await storage.mark_failed("held", an_error(), will_retry=True)
        await storage.mark_done("interval", a_result(interval, "newest"))
        await storage.enqueue(a_task("waiting"))
        before = await storage.list_tasks()

        assert await storage.purge_results(clock.now() + timedelta(days=999)) == 0
        assert await storage.list_tasks() == before
        assert len(before) == 5
        result = await storage.get_result("interval")
        assert result is not None
        assert result.result == "newest"
        await storage.mark_done("running", a_result(running))

    @promise("T1")
    async def test_a_purge_of_results_keeps_dead_letters(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        await storage.record([an_outcome("failed", await claim_one(storage), clock.now())])

        assert await storage.purge_results(clock.now() + _MICROSECOND) == 1
        assert await storage.get_task("a") is None
        assert await storage.get_dead("a") is not None
        assert (await storage.stats()).dead == 1

    @promise("T2")
    @pytest.mark.parametrize("kind", ["succeeded", "cancelled"])
    async def test_a_purged_id_is_free_again(
        self, storage: BaseStorage, clock: ManualClock, kind: OutcomeKind
    ) -> None:
        await storage.enqueue(a_task("a"))
        await storage.record([an_outcome(kind, await claim_one(storage), clock.now())])
        await storage.purge_results(clock.now() + _MICROSECOND)

        assert await storage.enqueue(a_task("a")) == "a"
        assert ids(await storage.reserve(1)) == ["a"]

    @promise("T2", "D4")
    async def test_the_id_of_a_dead_letter_stays_taken_when_its_result_was_purged(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        await storage.record([an_outcome("failed", await claim_one(storage), clock.now())])
        await storage.purge_results(clock.now() + _MICROSECOND)

        with pytest.raises(DuplicateTask):
            await storage.enqueue(a_task("a"))

    @promise("T3", "R5")
    @pytest.mark.parametrize("kind", FINAL_KINDS)
    async def test_a_record_is_readable_until_its_result_ttl_and_not_after_it(
        self, storage: BaseStorage, clock: ManualClock, kind: OutcomeKind
    ) -> None:
        await storage.enqueue(a_task("a", result_ttl=10))
        clock.advance(100)
        await storage.record([an_outcome(kind, await claim_one(storage), clock.now())])
        clock.advance(timedelta(seconds=10) - _MICROSECOND)
        assert await storage.get_result("a") is not None
        assert ids(await storage.list_tasks()) == ["a"]
        clock.advance(_MICROSECOND)

        assert await storage.get_result("a") is None
        assert await storage.get_task("a") is None
        assert await storage.list_tasks() == []
        # A dead letter keeps its history.
        assert len(await storage.history("a")) == (kind == "failed")
        assert sum((await storage.stats()).by_status.values()) == 0

    @promise("T3")
    async def test_an_expired_record_does_not_occupy_its_id(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", result_ttl=10))
        await storage.mark_done("a", a_result(await claim_one(storage), "old"))
        clock.advance(10)

        assert await storage.enqueue(a_task("a")) == "a"
        assert await storage.get_result("a") is None
        assert await storage.purge_expired() == 0
        assert await status_of(storage, "a") is TaskStatus.PENDING

    @promise("T3")
    async def test_expired_records_are_purged_and_counted(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        for task_id, ttl in [("a", 10), ("b", 20), ("c", 10)]:
            await storage.enqueue(a_task(task_id, result_ttl=ttl))
            await storage.mark_done(task_id, a_result(await claim_one(storage)))
        early = await storage.purge_expired()
        clock.advance(10)

        assert (early, await storage.purge_expired()) == (0, 2)
        assert ids(await storage.list_tasks()) == ["b"]

    @promise("T3")
    async def test_a_task_without_a_result_ttl_uses_that_of_the_settings(
        self, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        storage = await open_another(settings=Settings(result_ttl=7))
        await storage.enqueue(a_task("a"))
        await storage.mark_done("a", a_result(await claim_one(storage)))
        clock.advance(6)
        assert await storage.get_result("a") is not None
        clock.advance(1)

        assert await storage.get_result("a") is None

    @promise("T4")
    @pytest.mark.parametrize("kind", FINAL_KINDS)
    async def test_a_result_ttl_of_0_stores_only_the_dead_letter(
        self, storage: BaseStorage, clock: ManualClock, kind: OutcomeKind
    ) -> None:
        await storage.enqueue(a_task("a", result_ttl=0))
        await storage.record([an_outcome(kind, await claim_one(storage), clock.now())])

        assert await storage.get_task("a") is None
        assert await storage.get_result("a") is None
        assert sum((await storage.stats()).by_status.values()) == 0
        assert (await storage.get_dead("a") is not None) == (kind == "failed")
        if kind != "failed":
            assert await storage.enqueue(a_task("a")) == "a"

    @promise("T4")
    async def test_a_result_ttl_of_0_stores_nothing_of_a_cancelled_waiting_task(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("a", result_ttl=0))

        assert await storage.cancel("a")
        assert await storage.get_task("a") is None

    async def test_an_instant_without_a_time_zone_is_refused(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        naive = clock.now().replace(tzinfo=None)

        for purge in (storage.purge_results, storage.purge_dead, storage.purge_checkpoints):
            with pytest.raises(InvalidTask, match="has no time zone"):
                await purge(naive)

    @promise("T5")
    @pytest.mark.parametrize("kind", FINAL_KINDS)
    async def test_a_finished_task_can_be_deleted_and_other_tasks_stay(
        self, storage: BaseStorage, clock: ManualClock, kind: OutcomeKind
    ) -> None:
        await storage.enqueue_many(some_tasks("ab"))
        for task in await storage.reserve(2):
            await storage.record([an_outcome(kind, task, clock.now())])
        dead_letters = await storage.list_dead()

        assert await storage.delete_task("a")
        assert not await storage.delete_task("a")
        assert await storage.get_task("a") is None
        assert await storage.get_result("a") is None
        assert ids(await storage.list_tasks()) == ["b"]
        assert sum((await storage.stats()).by_status.values()) == 1
        assert await storage.list_dead() == dead_letters

    @promise("T5", "T2")
    async def test_the_id_of_a_deleted_task_is_free_again(self, storage: BaseStorage) -> None:
        await storage.enqueue(a_task("a"))
        await storage.mark_done("a", a_result(await claim_one(storage)))
        await storage.delete_task("a")
        await storage.enqueue(a_task("a"))

        assert await status_of(storage, "a") is TaskStatus.PENDING

    @promise("T5")
    async def test_a_dead_letter_outlives_the_record_of_its_task_and_can_be_retried(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("a"))
        await claim_one(storage)
        await storage.mark_failed("a", an_error(), will_retry=False)
        await storage.delete_task("a")

        assert await storage.retry_dead("a")
        assert await status_of(storage, "a") is TaskStatus.PENDING

    @promise("T5")
    async def test_a_task_that_has_not_ended_cannot_be_deleted(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many(some_tasks(["running", "retrying", "held"]))
        _, retrying, _ = await storage.reserve(3)
        await storage.record([Retried("retrying", retrying.token, an_error(), clock.now())])
        await storage.mark_failed("held", an_error(), will_retry=True)
        await storage.enqueue(a_task("waiting"))
        before = await storage.list_tasks()

        for task in before:
            assert not await storage.delete_task(task.id)
        assert not await storage.delete_task("unknown")
        assert await storage.list_tasks() == before
