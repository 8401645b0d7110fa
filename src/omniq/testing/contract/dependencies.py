"""Dependencies: a task that waits for others is claimable with the step that ends the last of them."""

from __future__ import annotations

from datetime import timedelta

import pytest

from omniq.errors import InvalidTask
from omniq.models import Task, TaskStatus
from omniq.outcomes import Cancelled, Failed, Outcome, Retried, Succeeded
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


async def succeed(storage: BaseStorage, task: Task, value: object = None) -> None:
    """Record the success of a claimed task."""
    result = a_result(task, value)
    assert await storage.record([Succeeded(task.id, task.token, result)]) == [True]


async def end(storage: BaseStorage, other: BaseStorage, clock: ManualClock, how: str) -> None:
    """End the task `a` in one of the ways in which a task can end."""
    match how:
        case "success":
            await succeed(storage, await claim_one(storage))
        case "failure":
            task = await claim_one(storage)
            await storage.record([Failed("a", task.token, an_error())])
        case "discard":
            task = await claim_one(storage)
            await storage.record([Cancelled("a", task.token, "not needed")])
        case "cancel":
            await storage.cancel("a")
        case "cancelled while it ran":
            task = await claim_one(storage)
            await storage.cancel("a")
            await storage.record([Retried("a", task.token, an_error(), clock.now())])
        case "expiry":
            clock.advance(60)
            assert await storage.reserve(1, queues=["default"]) == []
        case "crash limit":
            # Its next claim is one of a new owner, with a new lease.
            await storage.retire()
            await other.reserve(1, queues=["default"])
            clock.advance(LEASE)
            await storage.give_back_abandoned(max_crashes=1)
        case _:
            raise AssertionError(how)


WAYS = {
    "success": TaskStatus.SUCCESS,
    "failure": TaskStatus.FAILED,
    "discard": TaskStatus.CANCELLED,
    "cancel": TaskStatus.CANCELLED,
    "cancelled while it ran": TaskStatus.CANCELLED,
    "expiry": TaskStatus.CANCELLED,
    "crash limit": TaskStatus.FAILED,
}


class DependencyContract(ContractPart):
    """F1 to F6, F14, F18 to F22."""

    @promise("F1", "F2", "F22")
    async def test_a_task_is_claimable_with_the_end_of_the_last_that_it_waits_for(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many([a_task("a"), a_task("b"), a_member("c", after=("a", "b"))])
        first, second = await storage.reserve(5)

        waiting = await storage.get_task("c")
        assert waiting is not None
        assert waiting.workflow is not None
        assert (waiting.status, waiting.workflow.needs) == (TaskStatus.PENDING, 2)
        await succeed(storage, first)
        assert await storage.reserve(1) == []
        assert [each.id for each in await storage.sources_of("c")] == ["b"]
        _, (last,) = await storage.record_and_reserve(
            [Succeeded(second.id, second.token, a_result(second))], 1
        )
        assert last.id == "c"
        assert await storage.sources_of("c") == []

    @promise("F1", "F3", "F4")
    @pytest.mark.parametrize("how", WAYS)
    async def test_every_end_of_a_task_releases_what_waits_for_it(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock, how: str
    ) -> None:
        expires = clock.now() + timedelta(seconds=60) if how == "expiry" else None
        await storage.enqueue_many(
            [
                a_task("a", expires=expires),
                a_member("any", after_any=("a",), queue="later"),
                a_member("ok", after=("a",), queue="later"),
                a_member("behind", after=("ok",), queue="later"),
            ]
        )
        assert await storage.reserve(5, queues=["later"]) == []

        await end(storage, await open_another(), clock, how)

        assert await status_of(storage, "a") is WAYS[how]
        claimed = ids(await storage.reserve(5, queues=["later"]))
        if how == "success":
            assert claimed == ["any", "ok"]
            return
        assert claimed == ["any"]
        result, behind = await storage.get_result("ok"), await storage.get_result("behind")
        assert result is not None
        assert behind is not None
        assert (result.status, behind.status) == (TaskStatus.CANCELLED,) * 2
        word = "failed" if WAYS[how] is TaskStatus.FAILED else "was cancelled"
        assert result.reason == f"needs a, which {word}"
        assert behind.reason == "needs ok, which was cancelled"

    @promise("F2")
    async def test_a_released_task_keeps_its_place_in_line_and_its_eta(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        later = clock.now() + timedelta(seconds=30)
        await storage.enqueue_many(
            [a_task("a"), a_member("b", after=("a",)), a_member("late", after=("a",), eta=later)]
        )
        task = await claim_one(storage)
        clock.advance(5)
        await storage.enqueue(a_task("newer"))

        await succeed(storage, task)
        assert ids(await storage.reserve(5)) == ["b", "newer"]
        clock.advance(25)
        assert ids(await storage.reserve(5)) == ["late"]

    @promise("F4")
    async def test_a_waiting_task_that_expires_ends_and_releases(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        expires = clock.now() + timedelta(seconds=5)
        await storage.enqueue_many(
            [
                a_task("a", queue="never"),
                a_member("b", after=("a",), expires=expires),
                a_member("c", after_any=("b",)),
            ]
        )
        clock.advance(5)

        assert await storage.reserve(5, queues=["default"]) == []
        assert await status_of(storage, "b") is TaskStatus.CANCELLED
        assert ids(await storage.reserve(5, queues=["default"])) == ["c"]

    @promise("F5")
    async def test_sources_that_have_ended_count_at_the_enqueue(self, storage: BaseStorage) -> None:
        await storage.enqueue_many([a_task("ok"), a_task("bad"), a_task("live", queue="other")])
        for task in await storage.reserve(2, queues=["default"]):
            if task.id == "ok":
                await succeed(storage, task)
            else:
                await storage.record([Failed("bad", task.token, an_error())])

        await storage.enqueue(a_member("x", after=("ok",), after_any=("bad",)))
        await storage.enqueue(a_member("y", after=("ok", "bad")))
        await storage.enqueue(a_member("z", after=("ok", "live")))
        assert ids(await storage.reserve(5, queues=["default"])) == ["x"]
        result = await storage.get_result("y")
        assert result is not None
        assert (result.status, result.reason) == (TaskStatus.CANCELLED, "needs bad, which failed")
        await succeed(storage, (await storage.reserve(1, queues=["other"]))[0])
        assert ids(await storage.reserve(5)) == ["z"]

    @promise("F5", "F6")
    @pytest.mark.parametrize(
        ("tasks", "words"),
        [
            ([a_member("x", after=("gone",))], "gone, which has no record"),
            ([a_member("x", after=("x",))], "x: it waits for x"),
            ([a_member("x", after=("y",)), a_member("y", after=("x",))], "x -> y -> x"),
            ([a_member("x", after=("repeats",))], "repeats and never ends"),
            ([a_member("x", after=("known", "known"))], "twice"),
            ([a_member("x", after=("known",), interval=5.0)], "repeating task"),
            ([a_member("known.x", parent="known", after=("known",))], "ends only after it"),
            ([a_member("y.x", parent="known")], "must begin with known."),
            ([a_member("known.x", parent="known"), a_member("q.x", parent="q")], "q is not live"),
        ],
    )
    async def test_waits_that_cannot_end_are_refused_and_nothing_is_written(
        self, storage: BaseStorage, tasks: list[Task], words: str
    ) -> None:
        await storage.enqueue_many([a_task("known"), a_task("repeats", interval=60.0)])
        before = await visible_state(storage)

        with pytest.raises(InvalidTask, match=words):
            await storage.enqueue_many(tasks)
        assert await visible_state(storage) == before

    @promise("F14")
    async def test_a_repeated_enqueue_and_a_repeated_outcome_change_nothing(
        self, storage: BaseStorage
    ) -> None:
        flow = [a_task("a"), a_member("b", after=("a",)), a_member("c", after=("a", "b"))]
        await storage.enqueue_many(flow, nonce="n")
        await storage.enqueue_many(flow, nonce="n")
        task = await claim_one(storage)
        outcome = Succeeded("a", task.token, a_result(task))

        assert await storage.record([outcome]) == [True]
        assert await storage.record([outcome]) == [True]
        waiting = await storage.get_task("c")
        assert waiting is not None
        assert waiting.workflow is not None
        assert waiting.workflow.needs == 1

    @promise("F2", "F10")
    async def test_a_claimed_task_can_get_waiters_while_it_runs(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        other = await open_another()
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)

        await other.enqueue(a_member("b", after=("a",)))
        await other.enqueue(a_member("c", after=("a",)))
        await succeed(storage, task)
        assert ids(await other.reserve(5)) == ["b", "c"]

    @promise("F2", "F4")
    async def test_very_many_waiters_are_released_in_the_next_turns(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        await storage.enqueue_many([a_task("a"), a_task("bad")])
        for start in range(0, 1_200, 400):
            await storage.enqueue_many(
                [
                    a_member(f"w{number:04d}", after=("a",), queue="later")
                    for number in range(start, start + 400)
                ]
            )
        await storage.enqueue_many(
            [a_member(f"x{number:03d}", after=("bad",)) for number in range(600)]
        )
        first, second = await storage.reserve(2)
        outcomes: list[Outcome] = [
            Succeeded(first.id, first.token, a_result(first)),
            Failed(second.id, second.token, an_error()),
        ]

        assert await storage.record(outcomes) == [True, True]
        other = await open_another()
        while await other.advance_flows():
            pass
        claimed: list[str] = []
        while found := await other.reserve(500):
            claimed += ids(found)
        assert claimed == [f"w{number:04d}" for number in range(1_200)]
        assert await status_of(storage, "x599") is TaskStatus.CANCELLED

    @promise("F18")
    async def test_the_unique_key_of_a_root_is_free_in_the_step_in_which_it_ends(
        self, storage: BaseStorage
    ) -> None:
        def flow(name: str) -> list[Task]:
            return [
                a_member(name, kind="group", unique="import"),
                a_member(f"{name}.a", parent=name),
            ]

        assert await storage.enqueue_many(flow("f")) == ["f", "f.a"]
        assert (await storage.enqueue_many(flow("g")))[0] == "f"
        assert await status_of(storage, "g.a") is None
        await succeed(storage, await claim_one(storage))
        assert (await storage.enqueue_many(flow("g")))[0] == "g"

    @promise("F21")
    async def test_waiting_tasks_are_not_among_those_that_a_claim_reads(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("source", queue="other"))
        await storage.enqueue_many(
            [a_member(f"w{number:03d}", after=("source",), priority=9) for number in range(300)]
        )
        await storage.enqueue(a_task("plain"))

        stats = await storage.stats()
        assert ids(await storage.reserve(5, queues=["default"])) == ["plain"]
        assert stats.by_status[TaskStatus.PENDING] == 302
        # A task that waits is not overdue.
        assert await storage.reserve(5, queues=["default"]) == []
        assert "default" not in (await storage.stats()).oldest_by_queue
