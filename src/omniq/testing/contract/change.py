"""Change: another priority, queue or eta for a task that waits."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import msgspec
import pytest

from omniq.errors import InvalidTask, KeyNeeded, SerializationError, TaskNotFound, TaskNotWaiting
from omniq.models import Limit, TaskStatus
from omniq.outcomes import Failed, Retried, Succeeded
from omniq.serialization import MsgspecSerializer
from omniq.signing import Seal, SealedSerializer
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
    visible_state,
)

_SIGNED = SealedSerializer(MsgspecSerializer(), Seal("the key of this store"))


class ChangeContract(ContractPart):
    """A1 to A4."""

    @promise("A1")
    async def test_a_higher_priority_brings_a_task_forward_and_changes_nothing_else(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many(some_tasks("abc", args=("x",), unique=None))
        before = await storage.get_task("c")
        assert before is not None

        changed = await storage.change_task("c", priority=7)

        assert changed == msgspec.structs.replace(before, priority=7)
        assert await storage.get_task("c") == changed
        claimed = await storage.reserve(5)
        assert ids(claimed) == ["c", "a", "b"]
        assert (claimed[0].priority, claimed[0].args, claimed[0].token) == (7, ("x",), 1)

    @promise("A1")
    async def test_a_task_keeps_its_place_among_equals(self, storage: BaseStorage) -> None:
        await storage.enqueue_many(some_tasks("abc"))

        await storage.change_task("a", priority=-1)
        await storage.change_task("a", priority=0)

        assert ids(await storage.reserve(5)) == ["a", "b", "c"]

    @promise("A1")
    async def test_a_task_moves_to_another_queue(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        other = await open_another()
        await storage.enqueue_many(some_tasks("ab"))
        assert ids(await other.reserve(1, queues=["slow"])) == []

        assert (await storage.change_task("a", queue="slow")).queue == "slow"

        assert ids(await storage.list_tasks(queue="slow")) == ["a"]
        assert ids(await storage.list_tasks(queue="default")) == ["b"]
        assert (await storage.stats()).by_queue == {"slow": 1, "default": 1}
        assert ids(await storage.reserve(5, queues=["default"])) == ["b"]
        (task,) = await other.reserve(5, queues=["slow"])
        assert (task.id, task.queue) == ("a", "slow")
        assert await other.record([Succeeded(task.id, task.token, a_result(task))]) == [True]
        assert (await storage.stats()).by_queue == {"default": 1}

    @promise("A1")
    async def test_a_later_eta_delays_a_task_and_an_earlier_one_brings_it_forward(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        now = clock.now()
        await storage.enqueue(a_task("a"))
        await storage.enqueue(a_task("b", eta=now + timedelta(seconds=60)))

        delayed = await storage.change_task("a", eta=now + timedelta(seconds=30))
        await storage.change_task("b", eta=now + timedelta(seconds=10))

        assert delayed.eta == now + timedelta(seconds=30)
        assert await storage.reserve(5) == []
        clock.advance(10)
        assert ids(await storage.reserve(5)) == ["b"]
        clock.advance(20)
        assert ids(await storage.reserve(5)) == ["a"]

    @promise("A1", "E3")
    async def test_a_changed_task_holds_its_unique_key(self, storage: BaseStorage) -> None:
        await storage.enqueue(a_task("a", unique="key"))

        await storage.change_task("a", priority=3, queue="other")

        assert await storage.enqueue(a_task("b", unique="key")) == "a"
        task = await claim_one(storage)
        await storage.record([Succeeded(task.id, task.token, a_result(task))])
        assert await storage.enqueue(a_task("c", unique="key")) == "c"

    @promise("A1", "G5")
    async def test_a_parked_task_stays_within_its_limit_and_takes_its_new_place(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many(some_tasks("abc", limits=(Limit(key="k", max_running=1),)))
        (first,) = await storage.reserve(5)

        await storage.change_task("c", priority=1)

        assert await storage.reserve(5) == []
        await storage.record([Succeeded(first.id, first.token, a_result(first))])
        assert ids(await storage.reserve(5)) == ["c"]

    @promise("A1", "G7")
    async def test_an_offered_task_that_is_delayed_leaves_its_room_to_the_next(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        limit = Limit(key="k", max_running=1)
        await storage.enqueue_many(some_tasks("abc", limits=(limit,)))
        (first,) = await storage.reserve(5)
        await storage.record([Succeeded(first.id, first.token, a_result(first))])

        await storage.change_task("b", eta=clock.now() + timedelta(hours=1))

        (second,) = await storage.reserve(5)
        assert second.id == "c"
        await storage.record([Succeeded(second.id, second.token, a_result(second))])
        clock.advance(3_600)
        assert ids(await storage.reserve(5)) == ["b"]

    @promise("A1", "G1")
    async def test_a_task_leaves_a_paused_queue(self, storage: BaseStorage) -> None:
        await storage.pause_queue("default")
        await storage.enqueue_many(some_tasks("ab"))
        assert await storage.reserve(5) == []

        await storage.change_task("b", queue="other")

        assert ids(await storage.reserve(5)) == ["b"]

    @promise("A1")
    async def test_a_task_that_waits_for_its_retry_keeps_its_failures(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        eta = clock.now() + timedelta(seconds=60)
        await storage.record([Retried("a", task.token, an_error(), eta)])

        await storage.change_task("a", priority=2, eta=clock.now() + timedelta(seconds=5))

        clock.advance(5)
        again = await claim_one(storage)
        assert (again.attempts, again.priority, again.token) == (1, 2, 2)
        assert len(await storage.history("a")) == 1

    @promise("A1", "D1")
    async def test_a_changed_task_that_dies_is_retried_as_it_was_changed(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("a"))
        await storage.change_task("a", priority=4, queue="other")
        task = await claim_one(storage)
        await storage.record([Failed("a", task.token, an_error())])

        assert await storage.retry_dead("a")

        again = await claim_one(storage)
        assert (again.priority, again.queue, again.is_verified) == (4, "other", True)

    @promise("A2")
    async def test_a_running_task_is_refused(self, storage: BaseStorage) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        before = await visible_state(storage)

        with pytest.raises(TaskNotWaiting, match="running") as refused:
            await storage.change_task("a", priority=3)
        with pytest.raises(TaskNotWaiting):
            await storage.run_task_now("a")

        assert (refused.value.task_id, refused.value.status) == ("a", TaskStatus.RUNNING)
        assert await visible_state(storage) == before
        assert await storage.record([Succeeded(task.id, task.token, a_result(task))]) == [True]

    @promise("A2", "M3")
    async def test_a_failed_task_that_its_owner_holds_is_refused(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("a"))
        await claim_one(storage)
        await storage.mark_failed("a", an_error(), will_retry=True)

        with pytest.raises(TaskNotWaiting, match="held"):
            await storage.change_task("a", priority=3)

    @promise("A2")
    @pytest.mark.parametrize("kind", FINAL_KINDS)
    async def test_a_task_that_has_ended_is_refused(
        self, storage: BaseStorage, clock: ManualClock, kind: OutcomeKind
    ) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        await storage.record([an_outcome(kind, task, clock.now())])
        before = await visible_state(storage)

        with pytest.raises(TaskNotWaiting, match="ended"):
            await storage.change_task("a", queue="other")

        assert await visible_state(storage) == before

    @promise("A2")
    async def test_a_task_without_a_record_is_refused(self, storage: BaseStorage) -> None:
        with pytest.raises(TaskNotFound):
            await storage.change_task("a", priority=1)
        with pytest.raises(TaskNotFound):
            await storage.run_task_now("a")

    @promise("A2", "C2")
    async def test_of_a_change_and_a_claim_at_the_same_time_one_comes_first(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        other = await open_another()
        await other.reserve(1)
        for number in range(5):
            task_id = f"t{number}"
            await storage.enqueue(a_task(task_id))
            changed, claimed = await asyncio.gather(
                storage.change_task(task_id, priority=9), other.reserve(1), return_exceptions=True
            )

            assert not isinstance(claimed, BaseException)
            if not claimed:
                claimed = await other.reserve(1)
            (task,) = claimed
            assert task.id == task_id
            if isinstance(changed, BaseException):
                assert isinstance(changed, TaskNotWaiting)
                assert task.priority == 0
            else:
                assert task.priority == 9
            assert await other.record([Succeeded(task.id, task.token, a_result(task))]) == [True]

    @promise("A2", "E4")
    @pytest.mark.parametrize(
        "change", [{}, {"priority": "high"}, {"queue": ""}, {"priority": 2**63}, {"eta": "soon"}]
    )
    async def test_a_bad_value_is_refused_and_nothing_is_changed(
        self, storage: BaseStorage, change: dict[str, object]
    ) -> None:
        await storage.enqueue(a_task("a"))
        before = await visible_state(storage)

        with pytest.raises(InvalidTask):
            await storage.change_task("a", **change)  # type: ignore[arg-type]

        assert await visible_state(storage) == before

    @promise("A3")
    async def test_a_signed_task_is_sealed_again(
        self, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        storage = await open_another(serializer=_SIGNED)
        await storage.enqueue(a_task("a", unique="key", eta=clock.now() + timedelta(hours=1)))

        await storage.change_task("a", priority=3, queue="other")
        changed = await storage.run_task_now("a")

        assert (changed.is_verified, changed.priority) == (True, 3)
        task = await claim_one(storage)
        assert (task.id, task.priority, task.queue) == ("a", 3, "other")
        assert await storage.get_dead("a") is None

    @promise("A3")
    async def test_a_signed_task_is_not_changed_without_the_key(
        self, open_another: OpenAnother
    ) -> None:
        storage = await open_another(serializer=MsgspecSerializer())
        signed = await open_another(serializer=_SIGNED)
        await signed.enqueue(a_task("a"))
        before = await visible_state(signed)

        with pytest.raises(KeyNeeded, match="OMNIQ_SIGNING_KEY"):
            await storage.change_task("a", priority=3)

        assert await visible_state(signed) == before
        assert ids(await signed.reserve(1)) == ["a"]

    @promise("A3")
    async def test_a_task_without_a_signature_is_not_signed_by_a_change(
        self, open_another: OpenAnother
    ) -> None:
        storage = await open_another(serializer=MsgspecSerializer())
        signed = await open_another(serializer=_SIGNED)
        await storage.enqueue(a_task("a"))

        with pytest.raises(SerializationError):
            await signed.change_task("a", priority=3)

        assert ids(await storage.reserve(1)) == ["a"]

    @promise("A4")
    async def test_a_delayed_task_can_be_run_now(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", eta=clock.now() + timedelta(days=1), priority=-1))
        await storage.enqueue(a_task("b"))

        changed = await storage.run_task_now("a")

        assert (changed.eta, changed.priority) == (clock.now(), -1)
        assert ids(await storage.reserve(5)) == ["b", "a"]

    @promise("A4")
    async def test_a_task_that_waits_for_its_retry_can_be_run_now(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        eta = clock.now() + timedelta(days=1)
        await storage.record([Retried("a", task.token, an_error(), eta)])

        await storage.run_task_now("a")

        again = await claim_one(storage)
        assert (again.id, again.attempts) == ("a", 1)

    @promise("A4", "M2")
    async def test_a_repeating_task_can_be_run_now_and_repeats_afterwards(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", interval=60.0))
        first = await claim_one(storage)
        await storage.mark_done("a", a_result(first))

        await storage.run_task_now("a")

        task = await claim_one(storage)
        await storage.mark_done("a", a_result(task))
        assert await storage.reserve(1) == []
        clock.advance(60)
        assert (await claim_one(storage)).token == task.token + 1

    @promise("A4", "G1")
    async def test_a_pause_holds_for_a_task_that_is_to_run_now(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.pause_queue("default")
        await storage.enqueue(a_task("a", eta=clock.now() + timedelta(days=1)))

        await storage.run_task_now("a")

        assert await storage.reserve(1) == []
        await storage.resume_queue("default")
        assert ids(await storage.reserve(1)) == ["a"]

    @promise("A4", "W1")
    async def test_a_task_that_is_to_run_now_ends_a_wait_for_work(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", eta=clock.now() + timedelta(days=1)))
        waiting = asyncio.ensure_future(storage.wait_for_work(60.0))
        await asyncio.sleep(0)

        await storage.run_task_now("a")

        await asyncio.wait_for(waiting, 5.0)
