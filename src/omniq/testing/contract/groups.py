"""Groups and flows: they end with their last member, and are cancelled, retried and deleted as a whole."""

from __future__ import annotations

import asyncio
import functools
import operator
from datetime import timedelta

import pytest

from omniq.errors import InvalidTask, TaskNotWaiting
from omniq.models import Task, TaskStatus
from omniq.outcomes import Failed, Succeeded
from omniq.storage import flow_engine
from omniq.storage.base import BaseStorage
from omniq.testing.builders import a_member, a_result, a_task, an_error
from omniq.testing.clock import ManualClock
from omniq.testing.contract._suite import (
    ContractPart,
    OpenAnother,
    claim_one,
    ids,
    promise,
    status_of,
)
from omniq.testing.contract.dependencies import succeed
from omniq.testing.contract.suspension import suspend


def a_flow(*names: str, **fields: object) -> list[Task]:
    """A group `f` with members of these names."""
    group = a_member("f", kind="group", **fields)
    return [group, *(a_member(f"f.{name}", parent="f") for name in names)]


def a_chain() -> list[Task]:
    """A flow of three nodes, each behind the one before."""
    first, *others = a_flow("a")
    return [
        first,
        *others,
        a_member("f.b", parent="f", after=("f.a",)),
        a_member("f.c", parent="f", after=("f.b",)),
    ]


async def advance(storage: BaseStorage) -> None:
    """Do what steps have left to do."""
    while await storage.advance_flows():
        pass


class GroupContract(ContractPart):
    """F6, F10, F11, F15 to F17."""

    @promise("F10")
    @pytest.mark.parametrize("failures", [0, 2])
    async def test_a_group_ends_with_its_last_member(
        self, storage: BaseStorage, failures: int
    ) -> None:
        await storage.enqueue_many([*a_flow("a", "b", "c"), a_member("z", after_any=("f",))])
        tasks = await storage.reserve(5)

        for number, task in enumerate(tasks):
            assert await status_of(storage, "f") is TaskStatus.PENDING
            if number < failures:
                await storage.record([Failed(task.id, task.token, an_error())])
            else:
                await succeed(storage, task)
        group = await storage.get_task("f")
        assert group is not None
        assert group.workflow is not None
        counts = (group.workflow.size, group.workflow.members, group.workflow.failed)
        assert counts == (3, 0, failures)
        assert group.status is (TaskStatus.FAILED if failures else TaskStatus.SUCCESS)
        assert ids(await storage.reserve(5)) == ["z"]

    @promise("F16")
    async def test_the_records_below_another_are_listed_in_pages(
        self, storage: BaseStorage
    ) -> None:
        inner = [a_member(f"f.m.{number:06d}", parent="f.m") for number in range(5)]
        others = [a_member("f.z", parent="f"), a_task("f.m.000002.other")]
        await storage.enqueue_many(
            [*a_flow(), a_member("f.m", kind="group", parent="f"), *inner, others[0]]
        )
        await storage.enqueue_many(others[1:])

        found: list[str] = []
        while page := await storage.list_below("f", limit=2, after=found[-1] if found else ""):
            found += ids(page)
        # An id with dots that a user chose is below nothing.
        assert found == ["f.m", *ids(inner), "f.z"]

    @promise("F10")
    async def test_a_group_without_members_succeeds(self, storage: BaseStorage) -> None:
        await storage.enqueue_many([*a_flow(), a_member("z", after=("f",))])

        assert await status_of(storage, "f") is TaskStatus.SUCCESS
        assert ids(await storage.reserve(5)) == ["z"]

    @promise("F10")
    async def test_the_last_members_may_end_through_several_owners_in_any_order(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        owners = [storage, *[await open_another() for _ in range(3)]]
        await storage.enqueue_many(
            [*a_flow(*(f"m{number:02d}" for number in range(24))), a_member("z", after=("f",))]
        )
        claims = [await owner.reserve(6) for owner in owners]

        async def record(owner: BaseStorage, tasks: list[Task]) -> None:
            for task in tasks:
                await succeed(owner, task)

        await asyncio.gather(*map(record, owners, claims))
        group = await storage.get_task("f")
        assert group is not None
        assert group.workflow is not None
        assert (group.status, group.workflow.members) == (TaskStatus.SUCCESS, 0)
        found = [ids(await owner.reserve(5)) for owner in owners]
        assert sorted(functools.reduce(operator.iadd, found, [])) == ["z"]

    @promise("F11")
    async def test_members_join_while_the_group_is_live(self, storage: BaseStorage) -> None:
        await storage.enqueue_many([*a_flow("a", is_open=True)])
        await succeed(storage, await claim_one(storage))
        assert await status_of(storage, "f") is TaskStatus.PENDING

        await storage.enqueue_many([a_member("f.b", parent="f")])
        await succeed(storage, await claim_one(storage))
        assert await status_of(storage, "f") is TaskStatus.PENDING
        assert await storage.close_group("f")
        assert await status_of(storage, "f") is TaskStatus.SUCCESS
        assert not await storage.close_group("f")
        with pytest.raises(InvalidTask, match="not live"):
            await storage.enqueue_many([a_member("f.c", parent="f")])

    @promise("F11")
    async def test_a_flow_whose_producer_died_is_cancelled_after_an_hour(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many(a_flow("a", is_open=True))
        clock.advance(3_600)

        await advance(storage)
        assert await status_of(storage, "f.a") is TaskStatus.CANCELLED
        assert await status_of(storage, "f") is TaskStatus.CANCELLED

    @promise("F4")
    async def test_the_first_failure_stops_a_group_that_says_so(self, storage: BaseStorage) -> None:
        await storage.enqueue_many(a_flow("a", "b", "c", stops=True))
        first, second = await storage.reserve(2)

        await storage.record([Failed(first.id, first.token, an_error())])
        await advance(storage)
        assert await status_of(storage, "f.c") is TaskStatus.CANCELLED
        assert await status_of(storage, "f") is TaskStatus.PENDING
        await succeed(storage, second)
        assert await status_of(storage, "f") is TaskStatus.FAILED

    # Cancel

    @promise("F15")
    async def test_cancelling_a_flow_reaches_all_below(self, storage: BaseStorage) -> None:
        await storage.enqueue_many(a_chain())
        task = await claim_one(storage)
        children = [a_member("f.a.x", parent="f.a"), a_member("f.a.y", parent="f.a")]
        await storage.enqueue_many(children, under=("f.a", task.token))
        await storage.enqueue(a_task("f.other"))

        assert await storage.cancel("f")
        statuses = [await status_of(storage, f"f.{name}") for name in ("b", "c", "a.x", "a.y")]
        assert statuses == [TaskStatus.CANCELLED] * 4
        renewal = await storage.renew()
        assert renewal.cancelled == {"f.a"}
        with pytest.raises(InvalidTask, match="cancelled"):
            await storage.enqueue_many([a_member("f.d", parent="f")])
        assert await storage.record([Failed("f.a", task.token, an_error())]) == [True]
        assert await status_of(storage, "f") is TaskStatus.CANCELLED
        # It has a dot in its id, and belongs to nothing.
        assert ids(await storage.reserve(5)) == ["f.other"]

    @promise("F15")
    async def test_a_suspended_parent_is_cancelled_with_its_children(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("p"))
        parent = await claim_one(storage)
        await storage.enqueue_many([a_member("p.a", parent="p")], under=("p", parent.token))
        await suspend(storage, parent, "p.a")

        assert await storage.cancel("p")
        assert await status_of(storage, "p") is TaskStatus.CANCELLED
        assert await status_of(storage, "p.a") is TaskStatus.CANCELLED
        assert await storage.reserve(5) == []

    # Retry

    @promise("F17")
    async def test_a_failed_flow_is_retried_and_what_has_succeeded_stays(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many(a_chain())
        await succeed(storage, await claim_one(storage), 1)
        task = await claim_one(storage)
        await storage.record([Failed("f.b", task.token, an_error())])
        assert await status_of(storage, "f.c") is TaskStatus.CANCELLED
        assert await status_of(storage, "f") is TaskStatus.FAILED

        retries = await asyncio.gather(*(storage.revive("f", ["f.b", "f.c"]) for _ in range(2)))
        assert sorted(retries) == [False, True]
        assert await status_of(storage, "f") is TaskStatus.PENDING
        assert await storage.get_dead("f.b") is None
        for name in ("f.b", "f.c"):
            (task,) = await storage.reserve(5)
            assert task.id == name
            await succeed(storage, task)
        group = await storage.get_task("f")
        assert group is not None
        assert group.workflow is not None
        assert (group.status, group.workflow.failed) == (TaskStatus.SUCCESS, 0)
        result = await storage.get_result("f.a")
        assert result is not None
        assert result.result == 1

    @promise("F17")
    async def test_a_flow_is_retried_from_a_node_that_has_succeeded(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many(a_chain())
        for _ in range(3):
            await succeed(storage, await claim_one(storage))
        assert await status_of(storage, "f") is TaskStatus.SUCCESS

        assert await storage.revive("f", ["f.b", "f.c"])
        assert ids(await storage.reserve(5)) == ["f.b"]
        assert not await storage.revive("f", ["f.b"])

    @promise("F17")
    async def test_a_retry_of_many_nodes_of_which_one_is_live_changes_nothing(
        self, storage: BaseStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(flow_engine, "MAX_REVIVED", 1)
        await storage.enqueue_many(a_flow("a", "b", "c"))
        for task in await storage.reserve(3):
            await storage.record([Failed(task.id, task.token, an_error())])
        assert await storage.retry_dead("f.b")

        assert not await storage.revive("f", ["f.a", "f.b", "f.c"])
        assert await storage.get_dead("f.a") is not None
        assert await status_of(storage, "f") is TaskStatus.FAILED
        assert await storage.revive("f", ["f.a", "f.c"])
        assert sorted(ids(await storage.reserve(5))) == ["f.a", "f.b", "f.c"]

    @promise("F10")
    async def test_a_dead_member_that_is_retried_alone_counts_again(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many(a_flow("a", "b"))
        first, second = await storage.reserve(2)
        await storage.record([Failed(first.id, first.token, an_error())])

        assert await storage.retry_dead("f.a")
        await succeed(storage, second)
        assert await status_of(storage, "f") is TaskStatus.PENDING
        await succeed(storage, await claim_one(storage))
        assert await status_of(storage, "f") is TaskStatus.SUCCESS

    @promise("F1", "A1")
    async def test_a_change_of_a_record_that_waits_makes_it_not_due(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many([*a_chain(), a_member("e", kind="event")])

        await storage.run_task_now("f.b")
        await storage.change_task("f.b", priority=5)
        assert ids(await storage.reserve(5)) == ["f.a"]
        for task_id in ("f", "e"):
            with pytest.raises(TaskNotWaiting):
                await storage.run_task_now(task_id)

    # Retention

    @promise("F16")
    async def test_members_are_kept_as_long_as_their_root_and_deleted_with_it(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        flow = a_flow("a", "b", result_ttl=60)
        await storage.enqueue_many([*flow, a_task("plain", result_ttl=60)])
        first, second, plain = await storage.reserve(5)
        await succeed(storage, first)
        await succeed(storage, plain)
        clock.advance(1_000)

        await storage.purge_expired()
        assert await storage.purge_results(clock.now() + timedelta(seconds=1)) == 0
        assert not await storage.delete_task("f.a")
        assert await status_of(storage, "f.a") is TaskStatus.SUCCESS
        assert await status_of(storage, "plain") is None
        await storage.renew()
        await succeed(storage, second)
        await advance(storage)
        assert await status_of(storage, "f.a") is TaskStatus.SUCCESS
        clock.advance(61)
        await storage.purge_expired()
        await advance(storage)
        assert await storage.list_tasks() == []

    @promise("F16")
    @pytest.mark.parametrize("how", ["purge", "delete", "no ttl"])
    async def test_nothing_is_left_of_a_flow_that_is_deleted(
        self, storage: BaseStorage, clock: ManualClock, how: str
    ) -> None:
        await storage.enqueue_many(a_flow("a", "b", result_ttl=0 if how == "no ttl" else 3_600))
        for task in await storage.reserve(5):
            await succeed(storage, task)

        clock.advance(1)
        if how == "purge":
            assert await storage.purge_results(clock.now()) == 1
        elif how == "delete":
            assert await storage.delete_task("f")
        else:
            await advance(storage)
        assert await storage.list_tasks() == []
        assert await storage.list_below("f") == []

    @promise("F10", "F22")
    async def test_the_records_below_a_root_are_listed_in_id_order(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many([*a_chain(), a_task("f.stranger"), a_task("g")])

        assert ids(await storage.list_below("f")) == ["f.a", "f.b", "f.c"]
        assert ids(await storage.list_below("f", limit=2, after="f.a")) == ["f.b", "f.c"]
        task = await claim_one(storage)
        await storage.record([Succeeded(task.id, task.token, a_result(task))])
        assert len(await storage.list_below("f")) == 3
