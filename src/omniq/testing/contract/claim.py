"""Claim: which tasks a claim returns, and to which owner. `order` tests their order."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from omniq.errors import InvalidTask, InvalidValue, LeaseLost, SerializationError
from omniq.models import Limit, Runnable, Task, TaskStatus
from omniq.outcomes import Retried, Succeeded
from omniq.serialization import MsgspecSerializer
from omniq.storage.base import BaseStorage
from omniq.testing.builders import (
    RELEASING_KINDS,
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
    claim_and_expire,
    claim_one,
    ids,
    promise,
    status_of,
)

UNDECODABLE_ARGS = ("poison",)
"""Arguments of a task that `FailingSerializer` cannot decode."""


FUNCTIONS = {
    "a": "shop.pack",
    "b": "shop.mail.send",
    "c": "shop.mailing",
    "d": "shopping.pack",
    "e": "bank.pay",
}
"""Functions of tasks by task id, in modules whose names begin alike."""


class FailingSerializer(MsgspecSerializer):
    """Fails to decode tasks with `UNDECODABLE_ARGS`, as if their bytes were damaged."""

    def decode_task(self, data: bytes) -> Task:
        task = super().decode_task(data)
        if task.args == UNDECODABLE_ARGS:
            raise SerializationError("not a valid record: damaged")
        return task


class ClaimContract(ContractPart):
    """C1 to C12, except C4; and C17."""

    @promise("C1")
    async def test_a_claimed_task_is_running_with_its_owner_and_a_token(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        claimed = await claim_one(storage)

        assert claimed.status is TaskStatus.RUNNING
        assert (claimed.owner, claimed.token) == (storage.owner, 1)
        assert claimed.started_at == clock.now()
        assert await storage.get_task("a") == claimed
        assert await storage.held_by(storage.owner) == {"a": 1}

    @promise("C1")
    @pytest.mark.parametrize("kind", RELEASING_KINDS)
    async def test_the_token_grows_by_one_with_every_claim(
        self, storage: BaseStorage, clock: ManualClock, kind: OutcomeKind
    ) -> None:
        await storage.enqueue(a_task("a"))
        tokens = []
        for _ in range(4):
            task = await claim_one(storage)
            tokens.append(task.token)
            await storage.record([an_outcome(kind, task, clock.now())])

        assert tokens == [1, 2, 3, 4]

    @promise("C1", "C2")
    async def test_the_token_grows_when_another_owner_takes_over(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        (lost,) = await claim_and_expire(open_another, clock)
        await storage.give_back_abandoned()
        claimed = await claim_one(storage)

        assert (lost.token, claimed.token) == (1, 2)
        assert claimed.owner == storage.owner != lost.owner

    @promise("C1")
    async def test_the_token_grows_when_a_dead_letter_is_retried(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        await storage.record([an_outcome("failed", await claim_one(storage), clock.now())])
        await storage.retry_dead("a")

        assert (await claim_one(storage)).token == 2

    @promise("C2")
    async def test_concurrent_claims_give_each_task_to_one_owner(
        self, open_another: OpenAnother
    ) -> None:
        owners = [await open_another() for _ in range(5)]
        await owners[0].enqueue_many([a_task(f"t{n:02}") for n in range(50)])
        claims = await asyncio.gather(*(owners[n % 5].reserve(1) for n in range(50)))
        claimed = [task for claim in claims for task in claim]

        assert sorted(ids(claimed)) == [f"t{n:02}" for n in range(50)]
        assert await owners[0].reserve(1) == []
        for owner in owners:
            mine = {task.id: task.token for task in claimed if task.owner == owner.owner}
            assert await owner.held_by(owner.owner) == mine

    @promise("C2")
    async def test_with_more_claims_than_tasks_some_claims_are_empty(
        self, open_another: OpenAnother
    ) -> None:
        owners = [await open_another() for _ in range(4)]
        await owners[0].enqueue_many(some_tasks("abc"))
        claims = await asyncio.gather(*(owner.reserve(2) for owner in owners for _ in range(5)))

        assert sorted(ids(task for claim in claims for task in claim)) == ["a", "b", "c"]

    @promise("C3")
    async def test_no_task_is_claimed_before_its_eta_on_the_clock_of_the_store(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", eta=clock.now() + timedelta(seconds=10)))
        clock.advance(timedelta(seconds=10) - timedelta(microseconds=1))
        early = await storage.reserve(1)
        clock.advance(timedelta(microseconds=1))

        assert early == []
        assert ids(await storage.reserve(1)) == ["a"]

    @promise("C3")
    async def test_a_given_now_decides_what_is_due(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        eta = clock.now() + timedelta(days=30)
        await storage.enqueue(a_task("a", eta=eta))

        assert await storage.reserve(1) == []
        assert await storage.reserve(1, eta - timedelta(microseconds=1)) == []
        assert ids(await storage.reserve(1, eta)) == ["a"]

    @promise("C3")
    async def test_a_given_now_in_the_past_excludes_tasks_that_are_due_later(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", eta=clock.now()))
        clock.advance(60)

        assert await storage.reserve(1, clock.now() - timedelta(seconds=61)) == []
        assert ids(await storage.reserve(1)) == ["a"]

    @promise("C3")
    async def test_a_claim_with_a_future_now_does_not_make_delayed_tasks_due_now(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        later = clock.now() + timedelta(hours=1)
        await storage.enqueue_many(some_tasks("ab", eta=later))
        await storage.enqueue(a_task("c"))
        first = await storage.reserve(1, later)

        assert ids(first) == ["c"]
        assert await storage.reserve(5) == []
        assert ids(await storage.reserve(5, later)) == ["a", "b"]

    @promise("C3")
    async def test_a_task_without_an_eta_is_due_at_any_given_now(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))

        assert ids(await storage.reserve(1, clock.now() - timedelta(days=365))) == ["a"]

    @promise("C3")
    async def test_a_now_without_a_time_zone_is_refused(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        with pytest.raises(InvalidTask, match="has no time zone"):
            await storage.dequeue(clock.now().replace(tzinfo=None))
        with pytest.raises(InvalidTask, match="has no time zone"):
            await storage.reserve(1, clock.now().replace(tzinfo=None))

    @promise("C5")
    async def test_a_claimed_task_is_not_claimed_again(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await storage.enqueue(a_task("a"))
        await storage.reserve(1)
        clock.advance(LEASE * 100)

        # Not even after its lease has expired: `give_back_abandoned` is a separate step.
        assert await other.reserve(1) == []
        assert await storage.reserve(1) == []

    @promise("C5")
    async def test_a_failed_task_that_is_held_is_not_claimed_until_it_is_rescheduled(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        await storage.record([Retried("a", task.token, an_error())])
        clock.advance(5)

        assert await storage.reserve(1) == []
        await storage.reschedule("a", clock.now())
        assert ids(await storage.reserve(1)) == ["a"]

    @promise("C6")
    async def test_a_claim_is_restricted_to_the_given_queues(self, storage: BaseStorage) -> None:
        for task_id, queue in [("a", "x"), ("b", "y"), ("c", "z"), ("d", "x")]:
            await storage.enqueue(a_task(task_id, queue=queue))

        assert await storage.reserve(10, queues=[]) == []
        assert await storage.reserve(10, queues=["unused"]) == []
        assert ids(await storage.reserve(10, queues=["x", "z", "x"])) == ["a", "c", "d"]
        assert ids(await storage.reserve(10)) == ["b"]

    @promise("C6")
    async def test_a_claim_skips_paused_queues(self, storage: BaseStorage) -> None:
        await storage.enqueue(a_task("a", queue="x"))
        await storage.enqueue(a_task("b", queue="y"))
        await storage.pause_queue("x")

        assert await storage.reserve(10, queues=["x"]) == []
        assert ids(await storage.reserve(10)) == ["b"]

    @promise("C7")
    async def test_a_repeated_claim_returns_the_same_tasks(self, storage: BaseStorage) -> None:
        await storage.enqueue_many(some_tasks("abcd"))
        first = await storage.reserve(2, claim_id="claim-1")
        other = await storage.reserve(1, claim_id="claim-2")
        again = await storage.reserve(2, claim_id="claim-1")

        assert again == first
        assert (ids(again), ids(other)) == (["a", "b"], ["c"])

    @promise("C7")
    async def test_a_repeated_claim_omits_tasks_that_have_ended(self, storage: BaseStorage) -> None:
        await storage.enqueue_many(some_tasks("abc"))
        first, _ = await storage.reserve(2, claim_id="claim-1")
        await storage.record([Succeeded(first.id, first.token, a_result(first))])

        assert ids(await storage.reserve(2, claim_id="claim-1")) == ["b"]

    @promise("C7", "C11")
    async def test_a_repeated_claim_returns_no_task_that_another_owner_holds(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await storage.enqueue(a_task("a"))
        await storage.reserve(1, claim_id="claim-1")
        clock.advance(LEASE)
        await other.give_back_abandoned()
        await other.reserve(1)

        with pytest.raises(LeaseLost):
            await storage.reserve(1, claim_id="claim-1")
        assert await storage.reserve(1, claim_id="claim-1") == []

    @promise("C8")
    async def test_a_task_past_its_expiry_ends_as_cancelled(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", expires=clock.now() + timedelta(seconds=5)))
        await storage.enqueue(a_task("b"))
        clock.advance(5)

        assert ids(await storage.reserve(10)) == ["b"]
        result = await storage.get_result("a")
        assert result is not None
        assert (result.status, result.reason) == (TaskStatus.CANCELLED, "expired")
        assert (result.attempts, result.started_at) == (0, None)

    @promise("C8")
    async def test_a_task_is_claimed_up_to_its_expiry(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", expires=clock.now() + timedelta(seconds=5)))
        clock.advance(timedelta(seconds=5) - timedelta(microseconds=1))

        assert ids(await storage.reserve(1)) == ["a"]

    @promise("C8")
    async def test_a_retry_past_the_expiry_ends_as_cancelled(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        expires = clock.now() + timedelta(seconds=5)
        await storage.enqueue(a_task("a", expires=expires, unique="key"))
        task = await claim_one(storage)
        await storage.record([Retried("a", task.token, an_error(), expires)])
        clock.advance(10)

        assert await storage.reserve(1) == []
        assert await status_of(storage, "a") is TaskStatus.CANCELLED
        assert await storage.enqueue(a_task("b", unique="key")) == "b"

    @promise("C9", "R6")
    async def test_a_task_that_cannot_be_decoded_becomes_a_dead_letter(
        self, open_another: OpenAnother
    ) -> None:
        storage = await open_another(serializer=FailingSerializer())
        await storage.enqueue_many([a_task("a", args=UNDECODABLE_ARGS), a_task("b")])

        claimed = ids(await storage.reserve(1)) + ids(await storage.reserve(1))
        assert claimed == ["b"]
        dead_letter = await storage.get_dead("a")
        assert dead_letter is not None
        assert (dead_letter.failure_reason, dead_letter.func_path) == ("undecodable", "tasks.work")
        assert "damaged" in dead_letter.error_details
        assert await storage.held_by(storage.owner) == {"b": 1}

    @promise("C9")
    async def test_a_task_that_cannot_be_decoded_is_still_listed(
        self, open_another: OpenAnother
    ) -> None:
        storage = await open_another(serializer=FailingSerializer())
        await storage.enqueue(a_task("a", args=UNDECODABLE_ARGS, queue="q", priority=3))
        (task,) = await storage.list_tasks()

        assert (task.id, task.func_path) == ("a", "tasks.work")
        assert (task.queue, task.priority, task.args) == ("q", 3, ())
        assert task == await storage.get_task("a")

    @promise("C10")
    async def test_an_owner_holds_at_most_one_suspect(
        self, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        first, second = await open_another(), await open_another()
        await first.enqueue_many(some_tasks("abc"))
        await claim_and_expire(open_another, clock, limit=3)
        await first.give_back_abandoned()
        await first.enqueue(a_task("d"))

        (suspect, fresh) = await first.reserve(10)
        assert (suspect.crashes, fresh.id) == (1, "d")
        assert await first.reserve(10) == []
        assert [task.crashes for task in await second.reserve(10)] == [1]
        await first.mark_done(suspect.id, a_result(suspect))
        assert [task.crashes for task in await first.reserve(10)] == [1]

    @promise("C11", "L6")
    async def test_a_fenced_owner_cannot_claim_and_has_a_new_id_afterwards(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await storage.enqueue_many(some_tasks("ab"))
        await storage.reserve(1)
        before = storage.owner
        clock.advance(LEASE)
        await other.give_back_abandoned()

        with pytest.raises(LeaseLost) as refused:
            await storage.reserve(1)
        assert refused.value.owner == before != storage.owner
        assert ids(await storage.reserve(1)) == ["b"]
        assert await storage.held_by(before) == {}

    @promise("C12")
    async def test_claiming_takes_a_lease_and_the_claim_is_valid_as_long_as_the_lease(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await storage.enqueue(a_task("a"))
        assert await storage.workers() == []
        await storage.reserve(1)

        assert [worker.id for worker in await other.workers()] == [storage.owner]
        assert storage.lease_remaining == LEASE
        clock.advance(LEASE - 0.001)
        assert await other.give_back_abandoned() == []
        clock.advance(0.001)
        assert [back.task_id for back in await other.give_back_abandoned()] == ["a"]

    @promise("C12")
    async def test_continued_claiming_renews_the_lease(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await storage.enqueue(a_task("a"))
        await storage.reserve(1)
        for _ in range(10):
            clock.advance(LEASE / 2)
            await storage.reserve(1)
            clock.advance(LEASE / 4)
            await storage.reserve(1)

        assert await other.give_back_abandoned() == []

    @promise("C17")
    @pytest.mark.parametrize(
        ("runnable", "claimed"),
        [
            (None, "abcde"),
            (Runnable(), ""),
            (Runnable(modules=("shop",)), "abc"),
            (Runnable(modules=("shop.mail", "shopping")), "bd"),
            (Runnable(modules=("shop", "shop.mail")), "abc"),
            (Runnable(modules=("s", "sho", "shop.", "shop.pack")), ""),
            (Runnable(names=frozenset({"shop.mail.send", "bank.pay"})), "be"),
            (Runnable(names=frozenset({"shop", "shop.mail"})), ""),
            (Runnable(modules=("shop",), names=frozenset({"bank.pay"})), "abce"),
            (Runnable(modules=("shop",), excluded=frozenset({"shop.pack"})), "bc"),
            (Runnable(modules=("shop",), excluded=frozenset({"shop.mail", "shop"})), "abc"),
            (
                Runnable(names=frozenset({"bank.pay"}), excluded=frozenset({"bank.pay"})),
                "",
            ),
            (Runnable(modules=None), "abcde"),
            (Runnable(modules=None, excluded=frozenset({"shop.pack", "bank.pay"})), "bcd"),
        ],
        ids=str,
    )
    async def test_a_claim_takes_only_functions_that_the_owner_can_run(
        self, storage: BaseStorage, runnable: Runnable | None, claimed: str
    ) -> None:
        for task_id, func_path in FUNCTIONS.items():
            await storage.enqueue(a_task(task_id, func_path=func_path))

        assert ids(await storage.reserve(10, runnable=runnable)) == list(claimed)
        others = [task_id for task_id in FUNCTIONS if task_id not in claimed]
        assert ids(await storage.reserve(10)) == others

    @promise("C17")
    async def test_a_task_that_the_owner_cannot_run_waits_unchanged(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await storage.enqueue_many(some_tasks("ab", func_path="bank.pay", priority=1))
        await storage.enqueue(
            a_task("c", func_path="bank.pay", expires=clock.now() + timedelta(seconds=5))
        )
        await storage.enqueue(a_task("d", func_path="shop.pack"))
        clock.advance(10)
        before = [await storage.get_task(task_id) for task_id in "abc"]

        assert ids(await storage.reserve(10, runnable=Runnable(modules=("shop",)))) == ["d"]
        assert [await storage.get_task(task_id) for task_id in "abc"] == before
        assert ids(await other.reserve(10, runnable=Runnable(modules=("bank",)))) == ["a", "b"]
        assert await status_of(storage, "c") is TaskStatus.CANCELLED

    @promise("C17", "C4")
    async def test_functions_that_the_owner_can_run_are_claimed_in_one_order(
        self, storage: BaseStorage
    ) -> None:
        for task_id, func_path, priority in [
            ("a", "shop.pack", 0),
            ("b", "bank.pay", 9),
            ("c", "shop.mail.send", 1),
            ("d", "shop.pack", 1),
            ("e", "shop.mail.send", 0),
        ]:
            await storage.enqueue(a_task(task_id, func_path=func_path, priority=priority))
        runnable = Runnable(modules=("shop",))

        assert ids(await storage.reserve(2, runnable=runnable)) == ["c", "d"]
        assert ids(await storage.reserve(2, runnable=runnable)) == ["a", "e"]

    @promise("C17", "C3", "C6")
    async def test_a_claim_may_name_queues_and_functions(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        later = clock.now() + timedelta(seconds=5)
        for task_id, func_path, queue, eta in [
            ("a", "shop.pack", "x", None),
            ("b", "bank.pay", "x", None),
            ("c", "shop.pack", "y", None),
            ("d", "shop.pack", "x", later),
            ("e", "shop.pack", "z", None),
        ]:
            await storage.enqueue(a_task(task_id, func_path=func_path, queue=queue, eta=eta))
        await storage.pause_queue("z")
        runnable = Runnable(modules=("shop",))

        assert ids(await storage.reserve(9, queues=["x", "z"], runnable=runnable)) == ["a"]
        assert ids(await storage.reserve(9, runnable=runnable)) == ["c"]
        clock.advance(5)
        assert ids(await storage.reserve(9, queues=["x"], runnable=runnable)) == ["d"]

    @promise("C17", "G5")
    async def test_a_task_parked_at_a_limit_waits_for_an_owner_that_can_run_it(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        limits = (Limit(key="one", max_running=1),)
        await storage.enqueue(a_task("a", func_path="shop.pack", limits=limits))
        await storage.enqueue(a_task("b", func_path="bank.pay", limits=limits))
        await storage.enqueue(a_task("c", func_path="shop.pack", limits=limits))
        shop, bank = Runnable(modules=("shop",)), Runnable(modules=("bank",))

        (first,) = await storage.reserve(9)
        assert first.id == "a"
        await storage.record([an_outcome("succeeded", first, clock.now())])
        (second,) = await storage.reserve(9, runnable=shop)
        assert second.id == "c"
        assert await storage.reserve(9, runnable=bank) == []
        await storage.record([an_outcome("succeeded", second, clock.now())])
        assert await storage.reserve(9, runnable=shop) == []
        assert ids(await storage.reserve(9, runnable=bank)) == ["b"]

    async def test_a_limit_of_0_claims_nothing(self, storage: BaseStorage) -> None:
        await storage.enqueue(a_task("a"))

        assert await storage.reserve(0) == []
        with pytest.raises(InvalidValue):
            await storage.reserve(-1)
