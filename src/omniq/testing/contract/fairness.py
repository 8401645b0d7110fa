"""Fairness between keys, and ageing: the order of tasks that have a `fair` key, or grow older."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import pytest

from omniq.errors import InvalidTask
from omniq.models import FairShare, Limit, Task
from omniq.outcomes import Released, Retried, Snoozed, Succeeded, Suspended
from omniq.storage.base import BaseStorage
from omniq.storage.fairness import FAIR
from omniq.testing.builders import a_member, a_result, a_task, an_error
from omniq.testing.clock import ManualClock
from omniq.testing.contract._suite import (
    LEASE,
    ContractPart,
    OpenAnother,
    claim_one,
    ids,
    promise,
)

NO_NUMBERS = (0, -1, float("nan"), float("inf"), 10**400, True, "1")


def tasks_of(
    key: str,
    numbers: Sequence[int] | range,
    *,
    weight: float = 1,
    cost: float = 1,
    **fields: object,
) -> list[Task]:
    """Tasks of one key, whose ids are the key and these numbers."""
    fair = FairShare(key=key, weight=weight, cost=cost)
    return [a_task(f"{key}{number}", fair=fair, **fields) for number in numbers]


def shares(claimed: Sequence[str]) -> Counter[str]:
    """How many tasks of each key are among these."""
    return Counter(each.rstrip("0123456789") for each in claimed)


async def claimed_one_by_one(storage: BaseStorage, count: int) -> list[str]:
    """Claim and complete that many tasks, one after the other; returns their ids."""
    claimed: list[str] = []
    for _ in range(count):
        task = await claim_one(storage)
        claimed.append(task.id)
        await storage.record([Succeeded(task.id, task.token, a_result(task))])
    return claimed


class FairnessContract(ContractPart):
    """C13 to C16."""

    @promise("C13")
    async def test_keys_take_turns_however_many_tasks_one_of_them_has(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many(tasks_of("a", range(6)))
        await storage.enqueue_many([*tasks_of("b", range(3)), *tasks_of("c", range(1))])

        expected = ["a0", "b0", "c0", "a1", "b1", "a2", "b2", "a3", "a4", "a5"]
        assert ids(await storage.reserve(10)) == expected

    @promise("C13", "C14")
    async def test_a_key_of_three_times_the_weight_gets_three_times_as_many(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many(tasks_of("a", range(40)))
        await storage.enqueue_many(tasks_of("b", range(40), weight=3))

        assert shares(ids(await storage.reserve(40))) == {"a": 10, "b": 30}

    @promise("C13", "C14")
    async def test_a_task_takes_as_many_turns_as_it_costs(self, storage: BaseStorage) -> None:
        await storage.enqueue_many(tasks_of("a", range(10), cost=4))
        await storage.enqueue_many(tasks_of("b", range(40)))

        assert shares(ids(await storage.reserve(25))) == {"a": 5, "b": 20}

    @promise("C13")
    async def test_a_task_that_is_enqueued_alone_comes_to_wait_then(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        for task in [*tasks_of("a", range(1)), a_task("x")]:
            await storage.enqueue(task)
            clock.advance(1)

        assert ids(await storage.reserve(2)) == ["a0", "x"]

    @promise("C13")
    async def test_each_queue_and_each_priority_has_its_own_turns(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many(tasks_of("a", range(3)))
        await storage.enqueue_many(tasks_of("a", range(3, 5), queue="other"))
        await storage.enqueue_many(tasks_of("b", range(2)))
        await storage.enqueue_many(tasks_of("a", range(5, 7), priority=1))
        await storage.enqueue_many(tasks_of("b", range(2, 3), priority=1))

        expected = ["a5", "b2", "a6", "a0", "b0", "a1", "b1", "a2"]
        assert ids(await storage.reserve(20, queues=["default"])) == expected
        assert ids(await storage.reserve(20)) == ["a3", "a4"]

    @promise("C14")
    async def test_many_producers_and_owners_share_one_order(
        self, open_another: OpenAnother
    ) -> None:
        owners = [await open_another() for _ in range(3)]
        await asyncio.gather(
            *(
                owners[number % 3].enqueue(task)
                for number, task in enumerate([*tasks_of("a", range(9)), *tasks_of("b", range(9))])
            )
        )

        claimed = [task for owner in owners for task in ids(await owner.reserve(3))]
        # A key may have as many turns in a round as it had producers at that moment.
        assert abs(shares(claimed)["a"] - shares(claimed)["b"]) <= 1 + len(owners)

    @promise("C14")
    async def test_a_key_that_keeps_one_task_waiting_gets_its_share(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many(tasks_of("a", range(30)))
        await storage.enqueue_many(tasks_of("b", range(100), weight=5))
        claimed = ["c"]
        for number in range(35):
            if claimed[-1].startswith("c"):
                await storage.enqueue_many(tasks_of("c", [number]))
            claimed += await claimed_one_by_one(storage, 1)

        assert shares(claimed[1:]) == {"a": 5, "b": 25, "c": 5}

    @promise("C15")
    async def test_a_new_key_begins_in_the_next_round(self, storage: BaseStorage) -> None:
        await storage.enqueue_many(tasks_of("a", range(100)))
        await claimed_one_by_one(storage, 50)
        await storage.enqueue_many(tasks_of("b", range(3)))

        assert ids(await storage.reserve(6)) == ["a50", "b0", "a51", "b1", "a52", "b2"]

    @promise("C15")
    async def test_a_key_whose_tasks_have_run_is_as_a_new_one_when_the_line_was_empty(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many(tasks_of("a", range(50)))
        await claimed_one_by_one(storage, 50)
        await storage.enqueue_many(tasks_of("b", range(5)))
        await storage.enqueue_many(tasks_of("a", range(50, 53)))

        assert ids(await storage.reserve(6)) == ["b0", "a50", "b1", "a51", "b2", "a52"]

    @promise("C15")
    async def test_a_key_that_waited_for_nothing_is_not_charged_for_the_time_before(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many([*tasks_of("a", range(60)), *tasks_of("b", range(2))])
        await claimed_one_by_one(storage, 40)
        await storage.enqueue_many(tasks_of("b", range(2, 4)))

        assert ids(await storage.reserve(4)) == ["a38", "b2", "a39", "b3"]

    # What was cancelled

    @promise("C14")
    async def test_a_key_is_not_charged_for_tasks_that_were_cancelled(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many([*tasks_of("a", range(20)), *tasks_of("b", range(9))])
        for number in range(20):
            await storage.cancel(f"a{number}")
        await storage.enqueue_many(tasks_of("a", range(20, 23)))

        assert ids(await storage.reserve(5)) == ["b0", "a20", "b1", "a21", "b2"]

    @promise("C14")
    async def test_turns_between_others_that_were_cancelled_are_used_again(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many([*tasks_of("b", range(9)), *tasks_of("a", range(5))])
        for task_id in ("a1", "a3"):
            await storage.cancel(task_id)
        await storage.enqueue_many(tasks_of("a", range(5, 8)))

        expected = ["b0", "a0", "b1", "a5", "b2", "a2", "b3", "a6", "b4", "a4", "b5", "a7"]
        assert ids(await storage.reserve(12)) == expected

    @promise("C14")
    async def test_turns_that_all_others_have_passed_are_lost(self, storage: BaseStorage) -> None:
        await storage.enqueue_many([*tasks_of("a", range(10)), *tasks_of("b", range(10))])
        for number in range(5):
            await storage.cancel(f"a{number}")
        assert shares(await claimed_one_by_one(storage, 5)) == {"b": 5}
        await storage.enqueue_many(tasks_of("a", range(10, 15)))

        assert ids(await storage.reserve(4)) == ["a5", "b5", "a6", "b6"]

    @promise("C14")
    async def test_cancelling_again_and_again_gains_no_turns(self, storage: BaseStorage) -> None:
        await storage.enqueue_many(tasks_of("b", range(20)))
        claimed: list[str] = []
        for number in range(10):
            given = tasks_of("a", range(10 * number, 10 * number + 10))
            await storage.enqueue_many(given)
            claimed += await claimed_one_by_one(storage, 2)
            for task in given:
                await storage.cancel(task.id)

        assert abs(shares(claimed)["a"] - shares(claimed)["b"]) <= 2

    @promise("C13")
    async def test_a_task_of_another_queue_or_priority_gives_its_turn_back(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many([*tasks_of("a", range(3)), *tasks_of("b", range(3))])
        await storage.change_task("a0", queue="other")
        await storage.change_task("a1", priority=5)
        await storage.enqueue_many(tasks_of("a", range(3, 4)))

        assert ids(await storage.reserve(5, queues=["default"])) == ["a1", "b0", "a3", "b1", "a2"]
        assert ids(await storage.reserve(5)) == ["a0", "b2"]

    # Tasks that are not due, or wait again

    @promise("C13")
    async def test_delayed_tasks_hold_no_other_of_their_key_back(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        later = clock.now() + timedelta(seconds=60)
        await storage.enqueue_many(tasks_of("a", range(50), eta=later))
        await storage.enqueue_many([*tasks_of("b", range(4)), *tasks_of("a", range(50, 52))])

        assert ids(await storage.reserve(4)) == ["b0", "a50", "b1", "a51"]
        clock.advance(60)
        await storage.enqueue_many(tasks_of("b", range(4, 6)))
        assert shares(ids(await storage.reserve(6))) == {"a": 3, "b": 3}

    @promise("C13")
    @pytest.mark.parametrize("how", ["retried", "snoozed"])
    async def test_a_task_that_runs_again_waits_for_the_next_turn_of_its_key(
        self, storage: BaseStorage, clock: ManualClock, how: str
    ) -> None:
        await storage.enqueue_many([*tasks_of("a", range(3)), *tasks_of("b", range(9))])
        task = await claim_one(storage)
        outcome = (
            Retried(task.id, task.token, an_error(), clock.now())
            if how == "retried"
            else Snoozed(task.id, task.token, clock.now())
        )
        await storage.record([outcome])
        await storage.enqueue_many(tasks_of("a", range(3, 4)))

        claimed = ids(await storage.reserve(10))
        assert claimed[:4] == ["b0", "a1", "b1", "a2"]
        assert claimed.index("a0") > claimed.index("a2")
        assert shares(claimed) == {"a": 4, "b": 6}

    @promise("C13")
    async def test_a_step_that_retries_a_task_claims_in_the_order_of_turns(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many([*tasks_of("a", range(2)), *tasks_of("b", range(2))])
        task = await claim_one(storage)

        _, claimed = await storage.record_and_reserve(
            [Retried(task.id, task.token, an_error(), clock.now())], 10
        )
        assert ids(claimed) == ["b0", "a1", "b1", "a0"]

    @promise("C13")
    async def test_a_released_task_keeps_its_turn(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        await storage.enqueue_many([*tasks_of("a", range(3)), *tasks_of("b", range(3))])
        first = await claim_one(storage)
        await storage.record([Released(first.id, first.token)])
        assert ids(await storage.reserve(2)) == ["a0", "b0"]
        await storage.retire()
        other = await open_another()
        assert ids(await other.reserve(2)) == ["a0", "b0"]
        clock.advance(LEASE)
        third = await open_another()
        await third.give_back_abandoned()
        assert ids(await third.reserve(1)) == ["a0"]

    @promise("C13")
    async def test_a_suspended_task_goes_on_before_the_others_of_its_key(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("x", queue="other"))
        await storage.enqueue_many([*tasks_of("a", range(3)), *tasks_of("b", range(3))])
        (first,) = await storage.reserve(1, queues=["default"])
        await storage.record([Suspended(first.id, first.token, ("x",), None, None)])
        assert ids(await storage.reserve(1, queues=["default"])) == ["b0"]
        assert await claimed_one_by_one(storage, 1) == ["x"]

        assert ids(await storage.reserve(2)) == ["a0", "a1"]

    @promise("C13")
    async def test_a_task_that_waits_for_others_has_its_turn_when_it_is_released(
        self, storage: BaseStorage
    ) -> None:
        fair = FairShare(key="a")
        await storage.enqueue(a_task("first", priority=1))
        await storage.enqueue_many(
            [a_member(f"a{number}", after=("first",), fair=fair) for number in range(9)]
        )
        await storage.enqueue_many([*tasks_of("a", range(9, 11)), *tasks_of("b", range(9))])
        assert await claimed_one_by_one(storage, 5) == ["first", "a9", "b0", "a10", "b1"]

        assert shares(await claimed_one_by_one(storage, 6)) == {"a": 3, "b": 3}

    @promise("C13", "G5")
    async def test_keys_take_turns_within_a_limit_that_they_share(
        self, storage: BaseStorage
    ) -> None:
        limits = (Limit(key="all", max_running=1),)
        await storage.enqueue_many(tasks_of("a", range(4), limits=limits))
        first = await claim_one(storage)
        assert await storage.reserve(5) == []
        for number in range(4, 6):
            await storage.enqueue_many(tasks_of("a", [number], limits=limits))
        await storage.enqueue_many(tasks_of("b", range(3), limits=limits))
        await storage.record([Succeeded(first.id, first.token, a_result(first))])

        claimed = await claimed_one_by_one(storage, 8)
        assert claimed == ["a1", "b0", "a2", "b1", "a3", "b2", "a4", "a5"]

    @promise("C13", "E2")
    async def test_a_call_that_is_repeated_takes_no_second_turn(self, storage: BaseStorage) -> None:
        await storage.enqueue_many(tasks_of("b", range(3)))
        for _ in range(2):
            await storage.enqueue_many(tasks_of("a", range(1)), nonce="one")
        await storage.enqueue_many(tasks_of("a", range(1, 2)))

        assert ids(await storage.reserve(4)) == ["b0", "a0", "b1", "a1"]

    # What is remembered

    @promise("C15", "T1")
    async def test_keys_without_waiting_tasks_leave_nothing_behind(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        for key in "abcde":
            await storage.enqueue_many(tasks_of(key, range(2)))
        await storage.enqueue_many(tasks_of("z", range(9), priority=-1))
        for _ in range(5):
            await claimed_one_by_one(storage, 2)
        await storage.cancel("z8")
        clock.advance(3600)
        await storage.purge_expired()

        left = [each.key for each in await storage._engine._all_documents(FAIR)]
        assert sorted(left) == ["-1/7/default", "-1/7/default/z"]
        await claimed_one_by_one(storage, 8)
        clock.advance(3600)
        await storage.purge_expired()
        assert await storage._engine._all_documents(FAIR) == []

    @promise("C15", "T1")
    async def test_retention_forgets_no_turn_that_a_waiting_task_has_taken(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many([*tasks_of("a", range(5)), *tasks_of("b", range(5))])
        clock.advance(3600)
        await storage.purge_expired()
        await storage.enqueue_many(tasks_of("a", range(5, 7)))

        claimed = ids(await storage.reserve(12))
        assert claimed[-2:] == ["a5", "a6"]

    # Ageing

    @promise("C16")
    async def test_a_step_of_priority_is_worth_that_many_seconds_of_waiting(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("low", ageing=60, priority=-1))
        await storage.enqueue(a_task("plain"))
        clock.advance(59)
        await storage.enqueue(a_task("mid", ageing=60))
        await storage.enqueue(a_task("high", ageing=60, priority=2))
        clock.advance(2)
        await storage.enqueue(a_task("late", ageing=60, priority=0))
        clock.advance(120)
        await storage.enqueue(a_task("last", ageing=60, priority=2))

        assert ids(await storage.reserve(10)) == ["high", "plain", "mid", "low", "late", "last"]

    @promise("C16")
    async def test_an_old_task_is_not_passed_for_longer_than_the_difference(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("old", ageing=10, priority=0))
        for number in range(6):
            await storage.enqueue(a_task(f"n{number}", ageing=10, priority=3))
            clock.advance(10)

        claimed = ids(await storage.reserve(10))
        assert claimed == ["n0", "n1", "n2", "old", "n3", "n4", "n5"]

    @promise("C16")
    async def test_a_task_that_ages_shows_its_own_priority_and_keeps_it(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", ageing=10, priority=3))
        await storage.enqueue(a_task("b"))
        task = await claim_one(storage)
        assert (task.id, task.priority, task.ageing) == ("a", 3, 10)
        clock.advance(20)
        await storage.record([Retried("a", task.token, an_error(), clock.now())])
        assert ids(await storage.reserve(1)) == ["a"]
        await storage.enqueue(a_task("c", ageing=10))
        clock.advance(10)
        await storage.enqueue(a_task("d", ageing=10, priority=2))
        changed = await storage.change_task("d", priority=0)
        assert changed.priority == 0

        assert ids(await storage.reserve(5)) == ["b", "c", "d"]

    # Bad values

    @promise("E4")
    async def test_bad_shares_and_spans_are_refused(self, storage: BaseStorage) -> None:
        for number in NO_NUMBERS:
            for bad in (
                a_task("a", fair=FairShare(key="k", weight=number)),  # type: ignore[arg-type]
                a_task("a", fair=FairShare(key="k", cost=number)),  # type: ignore[arg-type]
                a_task("a", ageing=number),
            ):
                with pytest.raises(InvalidTask):
                    await storage.enqueue_many([a_task("first"), bad])

        assert await storage.get_task("first") is None

    @promise("E4")
    async def test_a_fair_key_and_ageing_exclude_each_other(self, storage: BaseStorage) -> None:
        with pytest.raises(InvalidTask, match="fair_key or ageing"):
            await storage.enqueue(a_task("a", fair=FairShare(key="k"), ageing=5))
        for key in ("", "k" * 2_000, 5):
            with pytest.raises(InvalidTask, match="fair_key"):
                await storage.enqueue(a_task("a", fair=FairShare(key=key)))  # type: ignore[arg-type]

        assert await storage.get_task("a") is None

    @promise("C13")
    async def test_shares_of_any_size_keep_the_order_of_each_key(
        self, storage: BaseStorage
    ) -> None:
        for key, weight, cost in [("a", 1e300, 1e-300), ("b", 1e-300, 1e300), ("c", 1, 1)]:
            await storage.enqueue_many(tasks_of(key, range(4), weight=weight, cost=cost))

        claimed = ids(await storage.reserve(20))
        for key in "abc":
            assert [each for each in claimed if each[0] == key] == [f"{key}{n}" for n in range(4)]
