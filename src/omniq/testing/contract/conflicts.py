"""What an enqueue does when another task holds its unique key: E11 to E14."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from omniq.errors import InvalidTask
from omniq.models import Limit, Task, TaskStatus
from omniq.outcomes import Failed, Retried, Snoozed, Succeeded
from omniq.storage.base import BaseStorage
from omniq.testing.builders import a_result, a_task, an_error
from omniq.testing.clock import ManualClock
from omniq.testing.contract._suite import (
    LEASE,
    ContractPart,
    OpenAnother,
    claim_one,
    ids,
    promise,
)


def _save(task_id: str, value: Any, **options: Any) -> Task:
    """A call that replaces the one before it."""
    options = {"on_conflict": "replace", "unique": "form-1", **options}
    return a_task(task_id, args=(value,), **options)


async def _succeed(storage: BaseStorage, *tasks: Task) -> None:
    done = await storage.record([Succeeded(task.id, task.token, a_result(task)) for task in tasks])
    assert all(done)


class ConflictContract(ContractPart):
    """E11 to E14."""

    @promise("E11")
    async def test_a_waiting_task_takes_the_arguments_and_the_eta_of_the_call_that_replaces_it(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        soon, later = (clock.now() + timedelta(seconds=seconds) for seconds in (5, 8))
        await storage.enqueue(_save("a", 1, eta=soon, priority=3))
        assert await other.enqueue(_save("b", 2, eta=later, kwargs={"x": "y"})) == "a"
        clock.advance(5)
        assert await storage.reserve(5) == []
        clock.advance(3)

        task = await claim_one(storage)
        assert (task.id, task.args, task.kwargs, task.eta) == ("a", (2,), {"x": "y"}, later)
        assert task.priority == 3
        assert await storage.get_task("b") is None

    @promise("E11")
    async def test_a_call_without_an_eta_makes_the_holder_due(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(_save("a", 1, eta=clock.now() + timedelta(hours=1)))
        await storage.enqueue(_save("b", 2))

        assert (await claim_one(storage)).args == (2,)

    @promise("E11")
    async def test_while_the_holder_runs_one_task_waits_for_its_end_with_the_newest_arguments(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        other = await open_another()
        await storage.enqueue(_save("a", 1))
        running = await claim_one(storage)
        assert await other.enqueue(_save("b", 2)) == "b"
        assert await storage.enqueue(_save("c", 3)) == "b"
        assert await other.enqueue(_save("d", 4)) == "b"
        assert await storage.reserve(5) + await other.reserve(5) == []
        await _succeed(storage, running)

        second = await claim_one(other)
        assert (second.id, second.args) == ("b", (4,))
        assert await storage.enqueue(_save("e", 5)) == "e"
        await _succeed(other, second)
        third = await claim_one(storage)
        assert (third.id, third.args) == ("e", (5,))
        await _succeed(storage, third)
        assert await storage.enqueue(_save("f", 6)) == "f"

    @promise("E11")
    async def test_the_waiting_task_keeps_its_delay_after_the_end_of_the_running_one(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(_save("a", 1))
        running = await claim_one(storage)
        await storage.enqueue(_save("b", 2, eta=clock.now() + timedelta(seconds=10)))
        await _succeed(storage, running)
        assert await storage.reserve(5) == []
        clock.advance(10)

        assert ids(await storage.reserve(5)) == ["b"]

    @promise("E11")
    @pytest.mark.parametrize("how", ["failed", "cancelled", "lost"])
    async def test_the_waiting_task_runs_however_the_running_one_ends(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock, how: str
    ) -> None:
        lost = await open_another()
        await lost.enqueue(_save("a", 1))
        running = await claim_one(lost)
        await storage.enqueue(_save("b", 2))
        watcher = storage
        if how == "failed":
            await lost.record([Failed("a", running.token, an_error())])
        elif how == "cancelled":
            await storage.cancel("a")
            await lost.record([Snoozed("a", running.token, clock.now())])
        else:
            clock.advance(LEASE)
            watcher = await open_another()
            await watcher.give_back_abandoned(max_crashes=1)

        task = await claim_one(watcher)
        assert (task.id, task.args) == ("b", (2,))

    @promise("E11")
    async def test_a_holder_that_waits_for_its_retry_is_replaced_and_begins_again(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(_save("a", 1))
        failed = await claim_one(storage)
        await storage.save_checkpoint("a", failed.token, b"of the first call")
        later = clock.now() + timedelta(hours=1)
        await storage.record([Retried("a", failed.token, an_error(), later)])
        clock.advance(100)
        eta = clock.now() + timedelta(seconds=5)
        assert await storage.enqueue(_save("b", 2, eta=eta, max_wait=60.0)) == "a"
        assert await storage.reserve(1) == []
        clock.advance(5)

        task = await claim_one(storage)
        assert (task.args, task.attempts, task.token) == ((2,), 0, failed.token + 1)
        assert await storage.load_checkpoint("a") is None

    @promise("E11", "G7")
    async def test_a_holder_that_a_limit_blocks_is_replaced_where_it_waits(
        self, storage: BaseStorage
    ) -> None:
        limits = (Limit(key="k", max_running=1),)
        await storage.enqueue(a_task("first", limits=limits))
        running = await claim_one(storage)
        await storage.enqueue(_save("a", 1, limits=limits))
        assert await storage.reserve(5) == []
        assert await storage.enqueue(_save("b", 2, limits=limits)) == "a"
        assert await storage.reserve(5) == []
        await _succeed(storage, running)

        assert [task.args for task in await storage.reserve(5)] == [(2,)]

    @promise("E11", "C2")
    async def test_of_many_calls_at_the_same_time_one_task_is_stored(
        self, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        owners = [await open_another() for _ in range(3)]
        eta = clock.now() + timedelta(seconds=1)
        found = await asyncio.gather(
            *(
                owner.enqueue(_save(f"t{place}-{number}", (place, number), eta=eta))
                for number in range(4)
                for place, owner in enumerate(owners)
            )
        )
        assert len(set(found)) == 1
        clock.advance(1)

        (task,) = await owners[0].reserve(10)
        assert task.id == found[0]
        assert task.args[0][1] == 3

    @promise("E11", "E8")
    async def test_a_repeated_call_replaces_once(self, storage: BaseStorage) -> None:
        await storage.enqueue(_save("a", 1))
        assert await storage.enqueue_many([_save("b", 2)], nonce="n") == ["a"]
        assert await storage.enqueue(_save("c", 3)) == "a"
        assert await storage.enqueue_many([_save("b", 2)], nonce="n") == ["a"]

        assert (await claim_one(storage)).args == (3,)

    @promise("E11")
    async def test_another_function_cannot_replace_the_holder(self, storage: BaseStorage) -> None:
        await storage.enqueue(_save("a", 1))
        with pytest.raises(InvalidTask, match="another function"):
            await storage.enqueue(_save("b", 2, func_path="other.function"))

        assert (await claim_one(storage)).args == (1,)

    @promise("E12")
    async def test_an_extended_holder_keeps_its_arguments_and_waits_longer(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        for number in range(3):
            eta = clock.now() + timedelta(seconds=5)
            task = _save(f"t{number}", number, eta=eta, on_conflict="extend")
            assert await storage.enqueue(task) == "t0"
            assert await storage.reserve(1) == []
            clock.advance(4)
        clock.advance(1)

        task = await claim_one(storage)
        assert (task.id, task.args) == ("t0", (0,))
        assert await storage.enqueue(_save("late", 9, on_conflict="extend")) == "t0"
        await _succeed(storage, task)
        assert await storage.reserve(1) == []

    @promise("E12")
    @pytest.mark.parametrize("how", ["replace", "extend"])
    async def test_no_call_delays_the_holder_beyond_max_wait_after_the_first(
        self, storage: BaseStorage, clock: ManualClock, how: str
    ) -> None:
        seconds = 0
        while True:
            eta = clock.now() + timedelta(seconds=5)
            await storage.enqueue(
                _save(f"t{seconds}", seconds, eta=eta, on_conflict=how, max_wait=20.0)
            )
            if claimed := await storage.reserve(5):
                break
            clock.advance(2)
            seconds += 2

        assert seconds == 20
        (task,) = claimed
        assert (task.id, task.args) == ("t0", (20 if how == "replace" else 0,))

    @promise("E13")
    async def test_a_key_stays_held_for_its_time_after_the_end_and_no_longer(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", unique="k", unique_for=30.0))
        await _succeed(storage, await claim_one(storage))
        clock.advance(29.999)
        assert await storage.enqueue(a_task("b", unique="k", unique_for=30.0)) == "a"
        assert await storage.purge_expired() >= 0
        assert await storage.enqueue(a_task("b", unique="k")) == "a"
        assert await storage.enqueue(_save("c", 1, unique="k")) == "a"
        clock.advance(0.001)

        assert await storage.enqueue(a_task("d", unique="k", unique_for=30.0)) == "d"
        assert ids(await storage.reserve(5)) == ["d"]

    @promise("E13")
    async def test_a_task_that_ends_after_the_time_of_its_key_frees_it_in_that_step(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", unique="k", unique_for=10.0))
        task = await claim_one(storage)
        clock.advance(11)
        await storage.purge_expired()
        assert await storage.enqueue(a_task("b", unique="k")) == "a"
        await _succeed(storage, task)

        assert await storage.enqueue(a_task("c", unique="k")) == "c"

    @promise("E13", "T1")
    async def test_keys_whose_time_has_passed_are_purged(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many(
            [a_task(f"t{n}", unique=f"k{n}", unique_for=10.0, result_ttl=0.0) for n in range(3)]
        )
        await _succeed(storage, *await storage.reserve(5))
        assert await storage.enqueue(a_task("x", unique="k1")) == "t1"
        clock.advance(10)
        await storage.purge_expired()

        held = await storage._engine._all_documents("unique")
        assert held == []

    @promise("E13", "D1")
    async def test_a_dead_letter_can_be_retried_while_its_own_key_is_held(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("a", unique="k", unique_for=30.0))
        task = await claim_one(storage)
        await storage.record([Failed("a", task.token, an_error())])
        assert await storage.enqueue(a_task("b", unique="k")) == "a"

        assert await storage.retry_dead("a")
        assert ids(await storage.reserve(5)) == ["a"]

    @promise("E14")
    async def test_the_conflicts_of_one_batch_are_settled_in_its_order(
        self, storage: BaseStorage
    ) -> None:
        assert await storage.enqueue_many([_save(f"t{n}", n) for n in range(4)]) == ["t0"] * 4
        task = await claim_one(storage)
        assert (task.id, task.args) == ("t0", (3,))
        found = await storage.enqueue_many(
            [_save("u0", 0), a_task("plain"), _save("u1", 1), _save("w", 0, unique="w")]
        )
        assert found == ["u0", "plain", "u0", "w"]
        await _succeed(storage, task)

        claimed = {each.id: each.args for each in await storage.reserve(5)}
        assert claimed["u0"] == (1,)
        assert claimed.keys() == {"u0", "plain", "w"}

    @promise("E11", "E4")
    @pytest.mark.parametrize(
        "options",
        [
            {"on_conflict": "replace", "unique": None},
            {"on_conflict": "other"},
            {"on_conflict": "keep", "max_wait": 5.0},
            {"max_wait": 0.0},
            {"max_wait": float("nan")},
            {"unique_for": -1.0},
            {"unique_for": 5.0, "unique": None, "on_conflict": "keep"},
            {"interval": 5.0},
        ],
    )
    async def test_options_that_say_nothing_are_refused(
        self, storage: BaseStorage, options: dict[str, Any]
    ) -> None:
        with pytest.raises(InvalidTask):
            await storage.enqueue(_save("a", 1, **options))

        assert await storage.list_tasks() == []
        assert (await storage.stats()).by_status[TaskStatus.PENDING] == 0
