"""Sequences: tasks with one key run one at a time, in the order of their enqueue."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from omniq.errors import InvalidTask
from omniq.models import Task, TaskStatus
from omniq.outcomes import Failed, Retried, Snoozed, Succeeded, Suspended
from omniq.storage.base import BaseStorage
from omniq.testing.builders import a_member, a_result, a_task, an_error
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
from omniq.testing.contract.dependencies import WAYS, end, succeed


def in_sequence(names: str, **fields: object) -> list[Task]:
    """One task for each letter, in the sequence `k`."""
    return [a_member(each, **{"sequence": "k", **fields}) for each in names]


async def run_all(storage: BaseStorage) -> list[str]:
    """Run one task after the other while there is one; returns their ids."""
    ran: list[str] = []
    while claimed := await storage.reserve(10):
        assert len(claimed) == 1, ids(claimed)
        ran.append(claimed[0].id)
        await succeed(storage, claimed[0])
    return ran


async def fail(storage: BaseStorage, task_id: str) -> None:
    """Claim that task, and have it fail for good."""
    task = await claim_one(storage)
    assert task.id == task_id
    assert await storage.record([Failed(task.id, task.token, an_error())]) == [True]


class SequenceContract(ContractPart):
    """E10."""

    @promise("E10")
    async def test_tasks_of_a_sequence_run_one_at_a_time_in_the_order_of_their_enqueue(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await storage.enqueue_many(in_sequence("ab"))
        await other.enqueue(a_member("c", sequence="k", priority=9, queue="other"))
        await storage.enqueue_many(in_sequence("d", eta=clock.now() - timedelta(days=1)))
        await storage.enqueue_many([a_member("x", sequence="other"), a_task("plain")])

        claimed = await storage.reserve(10)
        assert sorted(ids(claimed)) == ["a", "plain", "x"]
        assert await other.reserve(10) == []
        (first,) = [task for task in claimed if task.id == "a"]
        await succeed(storage, first)
        assert await run_all(other) == ["b", "c", "d"]

    @promise("E10")
    async def test_the_step_that_ends_a_task_may_claim_the_next_one(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many(in_sequence("abc"))
        task = await claim_one(storage)

        for expected in "bc":
            _, (task,) = await storage.record_and_reserve(
                [Succeeded(task.id, task.token, a_result(task))], 1
            )
            assert task.id == expected

    @promise("E10")
    async def test_a_sequence_waits_for_an_eta_a_retry_and_a_sleep(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        later = clock.now() + timedelta(seconds=10)
        await storage.enqueue_many([*in_sequence("a", eta=later), *in_sequence("b")])

        assert await storage.reserve(5) == []
        clock.advance(10)
        task = await claim_one(storage)
        await storage.record(
            [Retried("a", task.token, an_error(), clock.now() + timedelta(seconds=5))]
        )
        assert await storage.reserve(5) == []
        clock.advance(5)
        task = await claim_one(storage)
        await storage.record([Snoozed("a", task.token, clock.now() + timedelta(seconds=5))])
        assert await storage.reserve(5) == []
        clock.advance(5)
        task = await claim_one(storage)
        until = clock.now() + timedelta(seconds=5)
        await storage.record([Suspended("a", task.token, (), None, until)])
        assert await run_all(storage) == ["a", "b"]

    @promise("E10")
    @pytest.mark.parametrize("how", WAYS)
    async def test_every_end_releases_the_next_task(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock, how: str
    ) -> None:
        expires = clock.now() + timedelta(seconds=60) if how == "expiry" else None
        await storage.enqueue_many(
            [*in_sequence("a", expires=expires), *in_sequence("bc", queue="later")]
        )
        assert await storage.reserve(5, queues=["later"]) == []

        await end(storage, await open_another(), clock, how)

        assert await status_of(storage, "a") is WAYS[how]
        assert await run_all(storage) == ["b", "c"]

    @promise("E10")
    @pytest.mark.parametrize("cancelled", ["b", "c", "d", "bc", "cb", "cd", "dcb", "bcd"])
    async def test_a_task_that_ends_while_it_waits_releases_nothing(
        self, storage: BaseStorage, cancelled: str
    ) -> None:
        await storage.enqueue_many(in_sequence("abcd"))
        first = await claim_one(storage)
        for task_id in cancelled:
            assert await storage.cancel(task_id)
        await storage.enqueue_many(in_sequence("e"))

        assert await storage.reserve(5) == []
        await succeed(storage, first)
        left = [each for each in "bcde" if each not in cancelled]
        assert await run_all(storage) == left

    @promise("E10")
    async def test_tasks_that_expire_while_they_wait_are_left_out(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        expires = clock.now() + timedelta(seconds=5)
        await storage.enqueue_many(
            [*in_sequence("a"), *in_sequence("bc", expires=expires), *in_sequence("d")]
        )
        first = await claim_one(storage)
        clock.advance(5)

        assert await storage.reserve(5) == []
        assert await status_of(storage, "b") is TaskStatus.CANCELLED
        await succeed(storage, first)
        assert await run_all(storage) == ["d"]

    @promise("E10")
    async def test_a_task_whose_worker_is_lost_keeps_its_place(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        await storage.enqueue_many(in_sequence("ab"))
        lost = await open_another()
        assert ids(await lost.reserve(5)) == ["a"]
        clock.advance(LEASE)
        await storage.give_back_abandoned(max_crashes=3)

        assert await run_all(storage) == ["a", "b"]

    @promise("E10")
    async def test_a_sequence_that_has_ended_begins_again(self, storage: BaseStorage) -> None:
        await storage.enqueue_many(in_sequence("a"))
        assert await run_all(storage) == ["a"]
        await storage.enqueue_many(in_sequence("b"))
        await storage.cancel("b")
        await storage.enqueue_many(in_sequence("cd"))

        assert await run_all(storage) == ["c", "d"]

    @promise("E10")
    async def test_a_dead_letter_that_halts_holds_the_others_until_it_has_run(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many(in_sequence("abc", halts=True))
        await fail(storage, "a")
        await storage.enqueue_many(in_sequence("d"))

        assert await storage.reserve(5) == []
        assert [each.id for each in await storage.sources_of("b")] == ["a"]
        assert await storage.retry_dead("a")
        assert await run_all(storage) == ["a", "b", "c", "d"]

    @promise("E10")
    @pytest.mark.parametrize("cancelled", ["", "b", "c", "bc", "cb"])
    async def test_deleting_a_dead_letter_that_halts_releases_the_next_task(
        self, storage: BaseStorage, cancelled: str
    ) -> None:
        await storage.enqueue_many(in_sequence("abc", halts=True))
        await fail(storage, "a")
        for task_id in cancelled:
            await storage.cancel(task_id)
        await storage.enqueue_many(in_sequence("d"))
        assert await storage.reserve(5) == []

        assert await storage.delete_dead("a")

        assert await run_all(storage) == [each for each in "bcd" if each not in cancelled]

    @promise("E10")
    async def test_a_dead_letter_alone_holds_what_is_enqueued_later(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many(in_sequence("a", halts=True))
        await fail(storage, "a")
        await storage.enqueue_many(in_sequence("bc"))

        assert await storage.reserve(5) == []
        clock.advance(1)
        assert await storage.purge_dead(clock.now()) == 1
        assert await run_all(storage) == ["b", "c"]

    @promise("E10")
    async def test_a_dead_letter_that_is_retried_later_goes_behind_the_others(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many(in_sequence("abc"))
        await fail(storage, "a")
        running = await claim_one(storage)
        assert await storage.retry_dead("a")

        assert await storage.reserve(5) == []
        await succeed(storage, running)
        assert await run_all(storage) == ["c", "a"]

    @promise("E10")
    async def test_a_task_waits_for_its_sequence_and_for_its_sources(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many(
            [*in_sequence("a"), a_task("x"), *in_sequence("b", after=("x",)), *in_sequence("c")]
        )
        claimed = {task.id: task for task in await storage.reserve(5)}
        assert set(claimed) == {"a", "x"}

        await succeed(storage, claimed["a"])
        assert await storage.reserve(5) == []
        await succeed(storage, claimed["x"])
        assert await run_all(storage) == ["b", "c"]

    @promise("E10")
    async def test_nodes_of_a_flow_that_are_retried_join_their_sequence_again(
        self, storage: BaseStorage
    ) -> None:
        nodes = [
            a_member("f", kind="group"),
            a_member("f.a", parent="f", sequence="k"),
            a_member("f.b", parent="f", sequence="k", after=("f.a",)),
        ]
        await storage.enqueue_many([*nodes, *in_sequence("c")])
        await fail(storage, "f.a")
        assert await status_of(storage, "f.b") is TaskStatus.CANCELLED
        running = await claim_one(storage)
        assert running.id == "c"
        assert await storage.revive("f", ["f.a", "f.b"])

        assert await storage.reserve(5) == []
        await succeed(storage, running)
        assert await run_all(storage) == ["f.a", "f.b"]

    @promise("E10", "E8")
    async def test_a_repeated_enqueue_and_a_held_key_add_nothing_to_a_sequence(
        self, storage: BaseStorage
    ) -> None:
        tasks = in_sequence("ab")
        for _ in range(2):
            assert await storage.enqueue_many(tasks, nonce="n") == ["a", "b"]
        holder = a_member("c", sequence="k", unique="u")
        assert await storage.enqueue_many([holder, a_member("x", sequence="k", unique="u")]) == [
            "c",
            "c",
        ]
        await storage.enqueue_many(in_sequence("d"))

        assert await run_all(storage) == ["a", "b", "c", "d"]

    @promise("E10")
    async def test_concurrent_enqueues_make_one_sequence(self, open_another: OpenAnother) -> None:
        owners = [await open_another() for _ in range(3)]
        await asyncio.gather(
            *(
                owners[number % 3].enqueue(a_member(f"t{number:02}", sequence="k"))
                for number in range(18)
            )
        )

        assert sorted(await run_all(owners[0])) == [f"t{number:02}" for number in range(18)]

    @promise("E10")
    async def test_many_sequences_in_one_batch_are_drained_in_order(
        self, storage: BaseStorage
    ) -> None:
        tasks = [
            a_member(f"{number:03}", sequence=f"k{number % 7}", args=(number,))
            for number in range(210)
        ]
        assert len(await storage.enqueue_many(tasks)) == 210
        ran: dict[int, list[int]] = {}
        while claimed := await storage.reserve(50):
            assert len({task.args[0] % 7 for task in claimed}) == len(claimed)
            for task in claimed:
                ran.setdefault(task.args[0] % 7, []).append(task.args[0])
            await storage.record(
                [Succeeded(each.id, each.token, a_result(each)) for each in claimed]
            )

        assert ran == {key: list(range(key, 210, 7)) for key in range(7)}

    @promise("E10", "E4")
    @pytest.mark.parametrize(
        ("tasks", "why"),
        [
            ([a_member("a", sequence="k", interval=5.0)], "never ends"),
            ([a_member("a", sequence="k", kind="event")], "only a task waits"),
            ([a_member("a", sequence="")], "sequence"),
            (
                [a_member("a", sequence="k", after=("b",)), a_member("b", sequence="k")],
                "wait for one another",
            ),
            (
                [a_member("a", sequence="k"), a_member("a.b", parent="a", sequence="k")],
                "the sequence of its parent",
            ),
        ],
    )
    async def test_what_cannot_be_in_a_sequence_is_refused(
        self, storage: BaseStorage, tasks: list[Task], why: str
    ) -> None:
        await storage.enqueue(a_member("first", sequence="k"))
        before = await visible_state(storage)

        with pytest.raises(InvalidTask, match=why):
            await storage.enqueue_many(tasks)

        assert await visible_state(storage) == before
        assert await run_all(storage) == ["first"]
