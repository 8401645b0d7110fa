"""Cancel: a cancellation is stored, in every status that a task can have."""

from __future__ import annotations

from datetime import timedelta

import pytest

from omniq.errors import InvalidTask
from omniq.models import Limit, TaskStatus
from omniq.outcomes import Released, Retried, Snoozed, Succeeded
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
    LEASE,
    ContractPart,
    OpenAnother,
    claim_one,
    ids,
    promise,
    status_of,
    visible_state,
)


class CancelContract(ContractPart):
    """X1 to X3."""

    @promise("X1")
    async def test_a_cancelled_waiting_task_ends_at_once_and_never_runs(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many(some_tasks("ab"))

        assert await storage.cancel("a", "changed my mind")
        result = await storage.get_result("a")
        assert result is not None
        assert (result.status, result.reason) == (TaskStatus.CANCELLED, "changed my mind")
        assert (result.attempts, result.finished_at) == (0, clock.now())
        assert ids(await storage.reserve(5)) == ["b"]
        assert await storage.get_dead("a") is None

    @promise("X1")
    async def test_a_cancelled_delayed_task_ends_at_once_and_never_runs(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", eta=clock.now() + timedelta(seconds=5)))

        assert await storage.cancel("a")
        clock.advance(10)
        assert await storage.reserve(1) == []
        assert await status_of(storage, "a") is TaskStatus.CANCELLED

    @promise("X1")
    async def test_a_cancelled_task_that_waits_for_its_retry_ends_at_once(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        await storage.record([Retried("a", task.token, an_error(), clock.now())])

        assert await storage.cancel("a")
        assert await storage.reserve(1) == []
        result = await storage.get_result("a")
        assert result is not None
        assert (result.status, result.attempts) == (TaskStatus.CANCELLED, 1)

    @promise("X1", "G5")
    async def test_a_cancelled_parked_task_ends_at_once(self, storage: BaseStorage) -> None:
        await storage.enqueue_many(some_tasks("abc", limits=(Limit(key="k", max_running=1),)))
        (running,) = await storage.reserve(5)

        assert await storage.cancel("b")
        await storage.mark_done("a", a_result(running))
        assert ids(await storage.reserve(5)) == ["c"]

    @promise("X1")
    async def test_a_repeating_task_cancelled_between_two_runs_ends_at_once(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", interval=5))
        await storage.mark_done("a", a_result(await claim_one(storage)))

        assert await storage.cancel("a")
        clock.advance(10)
        assert await storage.reserve(1) == []
        result = await storage.get_result("a")
        assert result is not None
        assert result.status is TaskStatus.CANCELLED

    @promise("X2")
    async def test_a_cancelled_running_task_is_reported_at_renewal_and_keeps_running(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many(some_tasks("ab"))
        await storage.reserve(2)

        assert await storage.cancel("a")
        assert await storage.cancel("a")
        assert (await storage.renew()).cancelled == {"a"}
        task = await storage.get_task("a")
        assert task is not None
        assert (task.status, task.cancel_requested) == (TaskStatus.RUNNING, True)

    @promise("X2")
    async def test_a_cancelled_running_task_that_finishes_has_its_result(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        await storage.cancel("a")
        await storage.record([Succeeded("a", task.token, a_result(task, "done"))])

        result = await storage.get_result("a")
        assert result is not None
        assert (result.status, result.result) == (TaskStatus.SUCCESS, "done")

    @promise("X2", "R8")
    async def test_a_cancelled_running_task_that_would_run_again_ends_as_cancelled(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", unique="key"))
        task = await claim_one(storage)
        await storage.cancel("a")
        await storage.record([Snoozed("a", task.token, clock.now())])

        result = await storage.get_result("a")
        assert result is not None
        assert (result.status, result.attempts) == (TaskStatus.CANCELLED, 1)
        assert await storage.enqueue(a_task("b", unique="key")) == "b"

    @promise("X2", "R8", "R9")
    @pytest.mark.parametrize(
        "limits", [(), (Limit(key="k", max_running=1),)], ids=["plain", "limited"]
    )
    @pytest.mark.parametrize("is_suspect", [False, True], ids=["", "suspect"])
    async def test_a_cancelled_task_is_not_claimed_again_by_the_call_that_releases_it(
        self,
        storage: BaseStorage,
        open_another: OpenAnother,
        clock: ManualClock,
        limits: tuple[Limit, ...],
        is_suspect: bool,
    ) -> None:
        other = await open_another()
        await storage.enqueue(a_task("a", limits=limits))
        if is_suspect:
            await other.reserve(1)
            clock.advance(LEASE)
            await storage.give_back_abandoned()
        task = await claim_one(storage)
        await storage.enqueue(a_task("b", limits=limits))
        assert await other.cancel("a")
        recorded, claimed = await storage.record_and_reserve([Released("a", task.token)], 2)

        assert (recorded, ids(claimed)) == ([True], ["b"])
        assert await status_of(storage, "a") is TaskStatus.CANCELLED

    @promise("X2", "R8")
    async def test_a_held_retry_that_is_cancelled_ends_when_it_is_rescheduled(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        await storage.reserve(1)
        await storage.mark_failed("a", an_error(), will_retry=True)

        assert await storage.cancel("a")
        await storage.reschedule("a", clock.now())
        assert await storage.reserve(1) == []
        assert await status_of(storage, "a") is TaskStatus.CANCELLED

    @promise("X2", "L7")
    async def test_a_cancelled_task_whose_owner_is_lost_ends_as_cancelled(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        lost = await open_another()
        await storage.enqueue(a_task("a"))
        await lost.reserve(1)
        await storage.cancel("a")
        clock.advance(LEASE)
        (back,) = await storage.give_back_abandoned()

        assert back.status is TaskStatus.CANCELLED
        assert await storage.reserve(1) == []
        assert await status_of(storage, "a") is TaskStatus.CANCELLED

    @promise("X2", "O3")
    async def test_a_cancelled_task_whose_owner_closes_ends_as_cancelled(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        closing = await open_another()
        await storage.enqueue(a_task("a"))
        await closing.reserve(1)
        await storage.cancel("a")
        await closing.close()

        assert await storage.reserve(1) == []
        assert await status_of(storage, "a") is TaskStatus.CANCELLED

    @promise("X3")
    @pytest.mark.parametrize("kind", FINAL_KINDS)
    async def test_cancelling_a_task_that_has_ended_changes_nothing(
        self, storage: BaseStorage, clock: ManualClock, kind: OutcomeKind
    ) -> None:
        await storage.enqueue(a_task("a"))
        await storage.record([an_outcome(kind, await claim_one(storage), clock.now())])
        before = await visible_state(storage)

        assert not await storage.cancel("a")
        assert await visible_state(storage) == before

    async def test_a_listener_is_notified_of_cancellations_through_this_object(
        self, storage: BaseStorage
    ) -> None:
        notified: list[str] = []
        unsubscribe = storage.on_cancel(notified.append)
        await storage.enqueue_many(some_tasks("abc"))
        await storage.reserve(1)
        for task_id in ("a", "b", "unknown"):
            await storage.cancel(task_id)
        unsubscribe()
        await storage.cancel("c")

        assert notified == ["a", "b"]

    @promise("X3")
    async def test_a_second_cancel_returns_false(self, storage: BaseStorage) -> None:
        await storage.enqueue(a_task("a"))

        assert [await storage.cancel("a"), await storage.cancel("a")] == [True, False]

    @promise("X3")
    async def test_an_unknown_task_is_not_cancelled(self, storage: BaseStorage) -> None:
        assert not await storage.cancel("unknown")
        with pytest.raises(InvalidTask):
            await storage.cancel("../etc/passwd")
