"""Suspension: a running task waits for others and holds nothing; children belong to it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from omniq.errors import DuplicateTask, InvalidTask, StaleClaim
from omniq.models import Limit, Task, TaskStatus
from omniq.outcomes import Failed, Retried, Suspended
from omniq.storage.base import BaseStorage
from omniq.tasks.flow_records import EVENT_NONCE, event_task
from omniq.testing.builders import a_member, a_task, an_error
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
from omniq.testing.contract.dependencies import succeed


async def suspend(
    storage: BaseStorage, task: Task, *on: str, enough: int | None = None, until: object = None
) -> bool:
    """Suspend a claimed task."""
    outcome = Suspended(task.id, task.token, on, enough, until)  # type: ignore[arg-type]
    (recorded,) = await storage.record([outcome])
    return recorded


async def a_parent(storage: BaseStorage, *names: str, **fields: object) -> Task:
    """Claim a task and add children to it."""
    await storage.enqueue(a_task("p", **fields))
    (parent,) = await storage.reserve(1)
    children = [a_member(f"p.{name}", parent="p", queue="children") for name in names]
    if children:
        await storage.enqueue_many(children, nonce="n", under=("p", parent.token))
    return parent


class SuspensionContract(ContractPart):
    """F7 to F9, F12 to F14, F19."""

    @promise("F7")
    async def test_a_suspended_task_is_claimable_when_all_have_ended(
        self, storage: BaseStorage
    ) -> None:
        parent = await a_parent(storage, "a", "b", limits=(Limit(key="one", max_running=1),))

        assert await suspend(storage, parent, "p.a", "p.b")
        waiting = await storage.get_task("p")
        assert waiting is not None
        assert (waiting.status, waiting.owner, waiting.attempts) == (TaskStatus.PENDING, None, 0)
        # It has left its gates.
        await storage.enqueue(a_task("q", limits=(Limit(key="one", max_running=1),)))
        await succeed(storage, await claim_one(storage))
        first, second = await storage.reserve(5)
        await succeed(storage, first)
        assert await storage.reserve(5) == []
        await storage.record([Failed(second.id, second.token, an_error())])
        (resumed,) = await storage.reserve(5)
        assert (resumed.id, resumed.token, resumed.attempts) == ("p", parent.token + 1, 0)

    @promise("F7")
    @pytest.mark.parametrize(("enough", "needed"), [(1, 1), (2, 2), (None, 3)])
    async def test_enough_of_them_are_enough(
        self, storage: BaseStorage, enough: int | None, needed: int
    ) -> None:
        parent = await a_parent(storage, "a", "b", "c")
        children = await storage.reserve(3)
        await succeed(storage, children[0])

        await suspend(storage, parent, "p.a", "p.b", "p.c", enough=enough)
        for number, child in enumerate(children[1:], start=2):
            claimable = await storage.reserve(1)
            assert ids(claimable) == (["p"] if number > needed else [])
            if claimable:
                return
            await succeed(storage, child)
        assert ids(await storage.reserve(1)) == ["p"]

    @promise("F7")
    async def test_what_ended_before_counts_and_a_deadline_resumes(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        parent = await a_parent(storage, "a")
        await suspend(storage, parent, "p.a", until=clock.now() + timedelta(seconds=10))
        assert await storage.reserve(5, queues=["default"]) == []
        clock.advance(10)

        (resumed,) = await storage.reserve(5, queues=["default"])
        await succeed(storage, (await storage.reserve(1))[0])
        assert await suspend(storage, resumed, "p.a")
        assert ids(await storage.reserve(5)) == ["p"]

    @promise("F7")
    async def test_expires_does_not_end_a_task_that_is_resumed(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        expires = clock.now() + timedelta(seconds=5)
        parent = await a_parent(storage, "a", expires=expires)
        await suspend(storage, parent, "p.a")
        clock.advance(20)

        await succeed(storage, (await storage.reserve(1, queues=["children"]))[0])
        assert ids(await storage.reserve(1)) == ["p"]

    @promise("F19")
    async def test_an_edge_of_an_earlier_wait_releases_nothing(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        parent = await a_parent(storage, "a", "b")
        await suspend(storage, parent, "p.a", until=clock.now() + timedelta(seconds=1))
        clock.advance(1)
        (resumed,) = await storage.reserve(1, queues=["default"])
        await suspend(storage, resumed, "p.b")

        first, second = await storage.reserve(2, queues=["children"])
        await succeed(storage, first)
        assert await storage.reserve(1) == []
        await succeed(storage, second)
        (again,) = await storage.reserve(1)
        # Nor does it make a later retry due.
        later = clock.now() + timedelta(seconds=60)
        await storage.record([Retried("p", again.token, an_error(), later)])
        assert await storage.reserve(1) == []

    @promise("F19")
    @pytest.mark.parametrize("then", ["retry", "return"])
    async def test_the_ends_that_a_wait_did_not_need_release_nothing(
        self, storage: BaseStorage, clock: ManualClock, then: str
    ) -> None:
        parent = await a_parent(storage, "a")
        await storage.enqueue_many([a_task("x", queue="others"), a_task("y", queue="others")])
        await suspend(storage, parent, "x", "y", enough=1)
        first, second = await storage.reserve(2, queues=["others"])
        await succeed(storage, first)
        (resumed,) = await storage.reserve(1, queues=["default"])
        if then == "retry":
            later = clock.now() + timedelta(seconds=60)
            await storage.record([Retried("p", resumed.token, an_error(), later)])
        else:
            # It ends with its child.
            await succeed(storage, resumed)

        await succeed(storage, second)
        assert await storage.reserve(1, queues=["default"]) == []

    @promise("F8")
    async def test_a_claim_that_is_not_current_neither_suspends_nor_adds_children(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await other.enqueue_many([a_task("p"), a_task("q", queue="other")])
        task = await claim_one(other)
        clock.advance(LEASE)
        await storage.give_back_abandoned()

        assert not await suspend(other, task, "q")
        with pytest.raises(StaleClaim):
            await other.enqueue_many([a_member("p.a", parent="p")], under=("p", task.token))
        assert await status_of(storage, "p.a") is None

    @promise("F9")
    async def test_children_that_are_added_again_are_added_once(self, storage: BaseStorage) -> None:
        parent = await a_parent(storage, "a", "b")
        children = [a_member(f"p.{name}", parent="p", queue="children") for name in "abc"]

        added = await storage.enqueue_many(children, nonce="n", under=("p", parent.token))
        assert added == ["p.a", "p.b", "p.c"]
        stored = await storage.get_task("p")
        assert stored is not None
        assert stored.workflow is not None
        assert (stored.workflow.members, stored.workflow.size) == (3, 3)
        with pytest.raises(DuplicateTask):
            await storage.enqueue_many(children, nonce="other", under=("p", parent.token))

    @promise("F10")
    async def test_a_task_that_returns_ends_when_its_children_have(
        self, storage: BaseStorage
    ) -> None:
        parent = await a_parent(storage, "a", "b")
        await storage.enqueue(a_member("behind", after=("p",)))

        await succeed(storage, parent, "done")
        assert await status_of(storage, "p") is TaskStatus.PENDING
        first, second = await storage.reserve(5)
        assert ids([first, second]) == ["p.a", "p.b"]
        await succeed(storage, first)
        assert await storage.reserve(5) == []
        await succeed(storage, second)
        result = await storage.get_result("p")
        assert result is not None
        assert (result.status, result.result) == (TaskStatus.SUCCESS, "done")
        assert ids(await storage.reserve(5)) == ["behind"]

    @promise("F15")
    async def test_the_children_of_a_task_that_fails_are_cancelled(
        self, storage: BaseStorage
    ) -> None:
        parent = await a_parent(storage, "a", "b")
        (running,) = await storage.reserve(1)

        await storage.record([Failed("p", parent.token, an_error())])
        while await storage.advance_flows():
            pass
        assert await status_of(storage, "p.b") is TaskStatus.CANCELLED
        cancelled = await storage.get_task("p.a")
        assert cancelled is not None
        assert cancelled.cancel_requested
        assert running.id == "p.a"

    # Events

    @promise("F12", "F14")
    async def test_an_event_has_the_first_value_that_it_was_given(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        parent = await a_parent(storage)
        event = event_task("p.ok", parent)
        await storage.enqueue_many([event], nonce=EVENT_NONCE, under=("p", parent.token))
        await suspend(storage, parent, "p.ok")
        other = await open_another()

        assert await other.complete("p.ok", True)
        assert not await other.complete("p.ok", False)
        (resumed,) = await storage.reserve(1)
        results = await storage.results_of(["p.ok"])
        assert (resumed.id, results["p.ok"].result) == ("p", True)

    @promise("F12")
    async def test_an_event_that_is_sent_first_is_there_when_a_task_waits(
        self, storage: BaseStorage
    ) -> None:
        parent = await a_parent(storage)
        event = event_task("p.ok", parent)

        assert await storage.send(event, 7)
        assert not await storage.send(event, 8)
        await storage.enqueue_many([event], nonce=EVENT_NONCE, under=("p", parent.token))
        await suspend(storage, parent, "p.ok")
        assert ids(await storage.reserve(1)) == ["p"]
        assert (await storage.results_of(["p.ok"]))["p.ok"].result == 7

    @promise("F13")
    async def test_the_expiry_of_an_event_ends_it_and_releases_the_waiter(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        expires = clock.now() + timedelta(days=3)
        await storage.enqueue_many([event_task("e", expires=expires), a_task("x")])
        await suspend(storage, await claim_one(storage), "e")
        clock.advance(3 * 86_400)

        assert await storage.advance_flows()
        assert await status_of(storage, "e") is TaskStatus.CANCELLED
        assert ids(await storage.reserve(1)) == ["x"]
        assert not await storage.complete("e", 1)

    @promise("F12")
    async def test_an_event_is_never_claimed_and_only_an_event_is_completed(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many([event_task("e"), a_task("x", queue="other")])
        clock.advance(10 * 365 * 86_400)

        assert await storage.reserve(5, queues=["default"]) == []
        with pytest.raises(InvalidTask, match="not an event"):
            await storage.complete("x")
        assert not await storage.complete("gone")

    @promise("F7")
    @pytest.mark.parametrize("enough", [0, 3])
    async def test_a_suspension_that_cannot_end_is_refused(
        self, storage: BaseStorage, enough: int
    ) -> None:
        parent = await a_parent(storage, "a", "b")

        with pytest.raises(InvalidTask, match="enough"):
            await suspend(storage, parent, "p.a", "p.b", enough=enough)
        await succeed(storage, parent)
