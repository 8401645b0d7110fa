"""Opening and closing: the owner that a storage object is, and what happens to its tasks."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from omniq.errors import LeaseLost, StaleClaim, StorageClosed
from omniq.models import AuditEntry, Progress, Schedule, TaskStatus, Version
from omniq.outcomes import Released
from omniq.storage.base import BaseStorage
from omniq.storage.run_counts import PeriodCounts, RunCounts
from omniq.testing.builders import a_result, a_task, an_error, an_output, some_tasks
from omniq.testing.clock import START, ManualClock
from omniq.testing.contract._suite import (
    LEASE,
    ContractPart,
    OpenAnother,
    claim_one,
    ids,
    promise,
    status_of,
)

_SCHEDULE = Schedule(id="s", task=a_task("t"), interval=5.0)

_ENTRY = AuditEntry(at=START, action="queues/pause", subject="q", outcome="1 done", by="operator")

EVERY_CALL: dict[str, Callable[[BaseStorage], Awaitable[Any]]] = {
    "enqueue": lambda s: s.enqueue(a_task()),
    "enqueue_many": lambda s: s.enqueue_many([]),
    "dequeue": lambda s: s.dequeue(START),
    "reserve": lambda s: s.reserve(1),
    "record": lambda s: s.record([Released("a", 1)]),
    "record_and_reserve": lambda s: s.record_and_reserve([], 1),
    "mark_running": lambda s: s.mark_running("a"),
    "mark_done": lambda s: s.mark_done("a", a_result(a_task("a"))),
    "mark_failed": lambda s: s.mark_failed("a", an_error(), will_retry=True),
    "reschedule": lambda s: s.reschedule("a", START),
    "cancel": lambda s: s.cancel("a"),
    "renew": lambda s: s.renew(),
    "give_back_abandoned": lambda s: s.give_back_abandoned(),
    "wait_for_work": lambda s: s.wait_for_work(0),
    "wait_for_result": lambda s: s.wait_for_result("a", 0),
    "purge_results": lambda s: s.purge_results(START),
    "purge_expired": lambda s: s.purge_expired(),
    "retry_dead": lambda s: s.retry_dead("a"),
    "delete_dead": lambda s: s.delete_dead("a"),
    "purge_dead": lambda s: s.purge_dead(START),
    "save_checkpoint": lambda s: s.save_checkpoint("a", 1, b""),
    "purge_checkpoints": lambda s: s.purge_checkpoints(START),
    "report_progress": lambda s: s.report_progress([Progress(task_id="a", token=1, fraction=0)]),
    "append_output": lambda s: s.append_output([an_output("a", 1, "x")]),
    "read_output": lambda s: s.read_output("a"),
    "wait_for_output": lambda s: s.wait_for_output("a"),
    "put_schedule": lambda s: s.put_schedule(_SCHEDULE),
    "delete_schedule": lambda s: s.delete_schedule("s"),
    "fire_schedule": lambda s: s.fire_schedule(_SCHEDULE, _SCHEDULE, None),
    "pause_queue": lambda s: s.pause_queue("q"),
    "resume_queue": lambda s: s.resume_queue("q"),
    "get_task": lambda s: s.get_task("a"),
    "get_result": lambda s: s.get_result("a"),
    "list_tasks": lambda s: s.list_tasks(),
    "history": lambda s: s.history("a"),
    "list_dead": lambda s: s.list_dead(),
    "stats": lambda s: s.stats(),
    "workers": lambda s: s.workers(),
    "held_by": lambda s: s.held_by("o"),
    "get_dead": lambda s: s.get_dead("a"),
    "get_dead_task": lambda s: s.get_dead_task("a"),
    "count_waiting": lambda s: s.count_waiting(),
    "get_progress": lambda s: s.get_progress("a"),
    "progress_of": lambda s: s.progress_of(["a"]),
    "load_checkpoint": lambda s: s.load_checkpoint("a"),
    "get_schedule": lambda s: s.get_schedule("s"),
    "list_schedules": lambda s: s.list_schedules(),
    "older_documents": lambda s: s.older_documents(),
    "paused_queues": lambda s: s.paused_queues(),
    "gates": lambda s: s.gates(),
    "add_run_counts": lambda s: s.add_run_counts([PeriodCounts(0, RunCounts())]),
    "merge_run_counts": lambda s: s.merge_run_counts(),
    "purge_run_counts": lambda s: s.purge_run_counts(),
    "run_counts": lambda s: s.run_counts(START, START),
    "note_version": lambda s: s.note_version(Version(code="1", omniq="1", started_at=START)),
    "versions": lambda s: s.versions(),
    "ended_workers": lambda s: s.ended_workers(),
    "add_audit_entry": lambda s: s.add_audit_entry(_ENTRY),
    "audit_log": lambda s: s.audit_log(),
}


class LifecycleContract(ContractPart):
    """O1 to O4."""

    @promise("O1")
    async def test_a_storage_that_is_not_open_refuses_every_call(
        self, storage: BaseStorage
    ) -> None:
        sibling = storage.sibling()
        await storage.close()

        assert await _refused_calls(storage) == list(EVERY_CALL)
        assert await _refused_calls(sibling) == list(EVERY_CALL)

    @promise("O1")
    async def test_a_call_in_progress_when_the_storage_closes_completes_or_is_refused(
        self, storage: BaseStorage
    ) -> None:
        unexpected: list[Exception] = []
        for iterations in range(20):
            calls = [asyncio.create_task(_error_of(call(storage))) for call in EVERY_CALL.values()]
            for _ in range(iterations):
                await asyncio.sleep(0)
            await storage.close()
            unexpected += filter(None, await asyncio.gather(*calls))
            await storage.open()
        # Python warns about unclosed resources when it collects them: in this test, not in the next.
        gc.collect()

        assert unexpected == []

    @promise("O2")
    async def test_every_opening_is_a_new_owner(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        owners = [storage.owner, (await open_another()).owner]
        await storage.close()
        await storage.open()
        owners.append(storage.owner)

        assert len(set(owners)) == 3
        assert all(owners)

    @promise("O2", "O3")
    async def test_claims_of_an_earlier_opening_are_not_adopted(self, storage: BaseStorage) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        await storage.close()
        await storage.open()

        assert await storage.held_by(storage.owner) == {}
        assert await storage.record([Released("a", task.token + 1)]) == [False]
        assert (await claim_one(storage)).token == task.token + 1

    @promise("O3", "R7")
    async def test_closing_gives_held_tasks_back_without_a_charge(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        closing = await open_another()
        await storage.enqueue_many(some_tasks("abc"))
        await closing.reserve(2)
        await closing.close()

        assert await storage.workers() == []
        claimed = await storage.reserve(5)
        assert ids(claimed) == ["a", "b", "c"]
        assert [(task.attempts, task.crashes) for task in claimed] == [(0, 0)] * 3
        assert await storage.give_back_abandoned() == []

    @promise("O3", "M3")
    async def test_closing_gives_a_held_retry_back_without_a_second_charge(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        closing = await open_another()
        await storage.enqueue(a_task("a"))
        await closing.reserve(1)
        await closing.mark_failed("a", an_error(), will_retry=True)
        await closing.close()

        assert await status_of(storage, "a") is TaskStatus.RETRYING
        task = await claim_one(storage)
        assert (task.attempts, task.crashes) == (1, 0)

    @promise("O3")
    async def test_closing_twice_or_before_opening_has_no_effect(
        self, storage: BaseStorage
    ) -> None:
        sibling = storage.sibling()
        await sibling.close()
        await storage.close()
        await storage.close()

    @promise("O3")
    async def test_closing_a_fenced_owner_does_not_change_the_new_owners_claim(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        fenced = await open_another()
        await storage.enqueue(a_task("a"))
        await fenced.reserve(1)
        clock.advance(LEASE)
        await storage.give_back_abandoned()
        current = await claim_one(storage)
        await fenced.close()

        assert await storage.get_task("a") == current

    @promise("O4", "L1")
    async def test_a_sibling_renews_from_another_thread_and_gives_nothing_back(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        sibling = storage.sibling()

        async def renew() -> tuple[str, dict[str, int]]:
            async with sibling:
                return sibling.owner, (await sibling.renew()).held

        for _ in range(3):
            clock.advance(LEASE - 1)
            assert await asyncio.to_thread(asyncio.run, renew()) == (storage.owner, {"a": 1})
            assert await other.give_back_abandoned() == []

        assert storage.lease_remaining == LEASE
        assert [worker.id for worker in await other.workers()] == [storage.owner]
        await storage.mark_done("a", a_result(task))

    @promise("O4")
    async def test_opening_and_closing_a_sibling_does_not_change_the_owner(
        self, storage: BaseStorage
    ) -> None:
        before = storage.owner
        async with storage.sibling() as sibling:
            assert sibling.owner == before

        assert storage.owner == before
        await storage.enqueue(a_task("a"))
        assert ids(await storage.reserve(1)) == ["a"]

    @promise("O3", "O4", "L3")
    async def test_a_sibling_cannot_renew_for_an_owner_that_has_closed(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        other = await open_another()
        await storage.renew()
        async with storage.sibling() as sibling:
            await storage.close()
            with pytest.raises(LeaseLost):
                await sibling.renew()

        assert await other.workers() == []

    async def test_a_storage_states_its_capabilities(self, storage: BaseStorage) -> None:
        promised = storage.capabilities

        assert promised.name
        assert promised.durability == "none" or promised.reach != "process"

    @promise("O2")
    async def test_a_reopened_storage_works_like_a_new_one(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        for round_number in range(3):
            await storage.enqueue(a_task(f"t{round_number}"))
            await storage.mark_done(
                f"t{round_number}", a_result(await claim_one(storage), round_number)
            )
            await storage.close()
            clock.advance(timedelta(seconds=1))
            await storage.open()

        assert ids(await storage.list_tasks()) == ["t0", "t1", "t2"]


async def _error_of(call: Awaitable[Any]) -> Exception | None:
    """Return the error of the call, except a closed storage, a lost lease or an unknown claim."""
    try:
        await call
    except (StorageClosed, LeaseLost, StaleClaim):
        return None
    except Exception as error:
        return error
    return None


async def _refused_calls(storage: BaseStorage) -> list[str]:
    """Return the names of the calls that are refused because the storage is closed."""
    refused = []
    for name, call in EVERY_CALL.items():
        with suppress(StorageClosed):
            await call(storage)
            continue
        refused.append(name)
    return refused
