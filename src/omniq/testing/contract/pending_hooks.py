"""Pending hooks: the call of `on_dead` is recorded with the dead letter until it is made."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import msgspec
import pytest

from omniq.models import Task
from omniq.outcomes import Failed
from omniq.serialization import MsgspecSerializer
from omniq.signing import Seal, SealedSerializer
from omniq.storage.base import BaseStorage
from omniq.storage.types import PendingHook
from omniq.testing.builders import a_task, an_error, some_tasks
from omniq.testing.clock import ManualClock
from omniq.testing.contract._suite import (
    ContractPart,
    OpenAnother,
    claim_and_expire,
    claim_one,
    promise,
)

_SIGNED = SealedSerializer(MsgspecSerializer(), Seal("the key of this store"))


async def _die(storage: BaseStorage, task_id: str = "a", *, hook: str | None = "") -> Task:
    """Enqueue a task that fails for good, with that hook."""
    await storage.enqueue(a_task(task_id))
    task = await claim_one(storage)
    outcome = Failed(task_id, task.token, an_error("no stock"), "broken", hook=hook)
    assert await storage.record([outcome]) == [True]
    return task


class PendingHookContract(ContractPart):
    """H1 to H4."""

    @promise("H1")
    async def test_the_hook_of_a_failed_run_is_recorded_with_its_dead_letter(
        self, storage: BaseStorage, clock: ManualClock, open_another: OpenAnother
    ) -> None:
        task = await _die(storage, hook=storage.owner)

        other = await open_another()
        assert await other.pending_hook("a") == PendingHook(
            task_id="a",
            func_path=task.func_path,
            queue="default",
            owner=storage.owner,
            token=task.token,
            died_at=clock.now(),
            reason="broken",
            error=an_error("no stock"),
        )
        assert await other.get_dead("a") is not None

    @promise("H1")
    async def test_a_task_without_a_hook_has_no_pending_one(self, storage: BaseStorage) -> None:
        await _die(storage, hook=None)

        assert await storage.get_dead("a") is not None
        assert await storage.pending_hook("a") is None
        assert await storage.pending_hooks() == ([], "")

    @promise("H1", "R2", "R3")
    async def test_a_stale_or_repeated_outcome_records_no_hook(self, storage: BaseStorage) -> None:
        task = await _die(storage, hook=storage.owner)
        await storage.end_hook("a", task.token)
        again = Failed("a", task.token, an_error(), hook=storage.owner)
        stale = Failed("a", task.token + 1, an_error(), hook=storage.owner)

        assert await storage.record([again]) == [True]
        assert await storage.record([stale]) == [False]
        assert await storage.pending_hook("a") is None

    @promise("H1", "L9")
    async def test_the_hook_of_a_task_whose_worker_was_lost_waits_for_any_worker(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        (task,) = await claim_and_expire(open_another, clock)

        await storage.give_back_abandoned(max_crashes=1)

        hook = await storage.pending_hook("a")
        assert hook is not None
        assert (hook.owner, hook.token, hook.reason) == ("", task.token, "crashed")
        assert hook.error.error_type == "WorkerLost"

    @promise("H1", "L13")
    async def test_the_hook_of_a_task_that_may_run_once_waits_when_its_owner_ends(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        other = await open_another()
        await storage.enqueue(a_task("a", max_crashes=1))
        await claim_one(other)

        await other.close()

        hook = await storage.pending_hook("a")
        assert hook is not None
        assert (hook.owner, hook.reason) == ("", "crashed")

    @promise("H1", "L17", "L18")
    async def test_the_hook_of_a_task_that_a_restored_store_ends_waits_for_any_worker(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        other = await open_another()
        await storage.enqueue(a_task("a", max_crashes=1))
        await claim_one(other)

        await storage.mark_restored()

        hook = await storage.pending_hook("a")
        assert hook is not None
        assert (hook.owner, hook.reason) == ("", "store went back")

    @promise("H1", "C8", "X1")
    async def test_a_task_that_expires_or_is_cancelled_has_not_died(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", expires=clock.now() + timedelta(seconds=1)))
        await storage.enqueue(a_task("b"))
        await storage.cancel("b")
        clock.advance(2)
        assert await storage.reserve(5) == []

        assert await storage.pending_hooks() == ([], "")

    @promise("H1")
    async def test_a_process_that_knows_of_no_hook_records_none_for_a_lost_worker(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", func_path="shop.pack"))
        await storage.enqueue(a_task("b", func_path="shop.send"))
        storage.know_hooks(lambda func_path: func_path == "shop.send")
        await claim_and_expire(open_another, clock, 2)

        await storage.give_back_abandoned(max_crashes=1)

        assert await storage.pending_hook("a") is None
        assert await storage.pending_hook("b") is not None

    @promise("H1")
    async def test_a_signed_hook_is_read_with_the_key_alone(
        self, open_another: OpenAnother
    ) -> None:
        storage = await open_another(serializer=MsgspecSerializer())
        signed = await open_another(serializer=_SIGNED)
        await _die(signed)
        hook = await signed.pending_hook("a")

        assert hook is not None
        assert hook.error == an_error("no stock")
        assert await signed.take_hook(hook)
        assert await storage.pending_hook("a") is None
        await _die(storage, "b")
        assert await signed.pending_hook("b") is None
        found, _ = await signed.pending_hooks()
        assert [each.task_id for each in found] == ["a"]

    @promise("H2")
    async def test_a_hook_is_pending_until_it_has_ended(self, storage: BaseStorage) -> None:
        task = await _die(storage)

        await storage.end_hook("a", task.token)

        assert await storage.pending_hook("a") is None
        assert await storage.get_dead("a") is not None
        await storage.end_hook("a", task.token)
        await storage.end_hook("b", 1)

    @promise("H2", "D1")
    @pytest.mark.parametrize("how", ["retry", "delete", "purge"])
    async def test_a_hook_ends_with_its_dead_letter(
        self, storage: BaseStorage, clock: ManualClock, how: str
    ) -> None:
        await _die(storage)
        hook = await storage.pending_hook("a")
        assert hook is not None

        if how == "retry":
            assert await storage.retry_dead("a")
        elif how == "delete":
            assert await storage.delete_dead("a")
        else:
            assert await storage.purge_dead(clock.now() + timedelta(seconds=1)) == 1

        assert await storage.pending_hook("a") is None
        assert not await storage.take_hook(hook)

    @promise("H2")
    async def test_pending_hooks_are_listed_in_pages(self, storage: BaseStorage) -> None:
        for task_id in "abcde":
            await _die(storage, task_id)

        found: list[str] = []
        after = ""
        while True:
            page, after = await storage.pending_hooks(after, 2)
            found += [hook.task_id for hook in page]
            if not after:
                break
        assert found == list("abcde")

    @promise("H3")
    async def test_of_several_owners_one_takes_a_hook(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        others = [await open_another() for _ in range(4)]
        await _die(storage)
        hook = await storage.pending_hook("a")
        assert hook is not None

        taken = await asyncio.gather(*(other.take_hook(hook) for other in others))

        assert sorted(taken) == [False, False, False, True]
        owner = others[taken.index(True)].owner
        assert await storage.pending_hook("a") == msgspec.structs.replace(hook, owner=owner)
        assert not await storage.take_hook(hook)

    @promise("H3")
    async def test_it_counts_the_owners_that_were_lost_with_a_hook(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        others = [await open_another() for _ in range(3)]
        await _die(storage)
        for lost, owner in enumerate([others[0], others[0], *others[1:]]):
            hook = await storage.pending_hook("a")
            assert hook is not None
            assert await owner.take_hook(hook)
            taken = await storage.pending_hook("a")
            assert taken is not None
            assert (taken.owner, taken.lost) == (owner.owner, max(0, lost - 1))

    @promise("H4")
    async def test_the_hook_of_a_later_death_stays(self, storage: BaseStorage) -> None:
        first = await _die(storage)
        await storage.retry_dead("a")
        task = await claim_one(storage)
        await storage.record([Failed("a", task.token, an_error("again"), hook="")])

        await storage.end_hook("a", first.token)

        hook = await storage.pending_hook("a")
        assert hook is not None
        assert (hook.token, hook.error) == (task.token, an_error("again"))

    @promise("H1")
    async def test_the_hooks_of_one_batch_are_recorded_together(self, storage: BaseStorage) -> None:
        await storage.enqueue_many(some_tasks("abc"))
        tasks = await storage.reserve(3)
        await storage.record(
            [
                Failed(task.id, task.token, an_error(), hook=hook)
                for task, hook in zip(tasks, (storage.owner, None, ""), strict=True)
            ]
        )

        found, _ = await storage.pending_hooks()
        assert [(hook.task_id, hook.owner) for hook in found] == [("a", storage.owner), ("c", "")]
