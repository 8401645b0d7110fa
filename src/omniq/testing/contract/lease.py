"""Leases and recovery: an owner keeps its claims while its lease lasts, and no longer."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from omniq.errors import InvalidValue, LeaseLost, StaleClaim
from omniq.models import Pong, Runnable, Task, TaskStatus
from omniq.outcomes import Failed, Released, Retried
from omniq.settings import Settings
from omniq.storage.base import BaseStorage
from omniq.storage.types import WorkerAnswer
from omniq.testing.builders import a_result, a_task, an_error, some_tasks
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


class LeaseContract(ContractPart):
    """L1 to L12, V1 to V6."""

    @promise("L1")
    async def test_an_owner_that_renews_keeps_its_tasks(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        for _ in range(10):
            clock.advance(LEASE - 0.001)
            assert await other.give_back_abandoned() == []
            await storage.renew()

        assert await other.reserve(1) == []
        await storage.mark_done("a", a_result(task))

    @promise("L1")
    async def test_setting_the_wall_clock_ends_no_lease(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await storage.enqueue(a_task("a"))
        await storage.reserve(1)
        if storage.capabilities.reach == "fleet":
            pytest.skip("the leases of a fleet use the clock of its server")
        clock.jump(timedelta(days=400))
        assert await other.give_back_abandoned() == []
        clock.jump(timedelta(days=-800))

        assert await other.give_back_abandoned() == []
        clock.advance(LEASE)
        assert len(await other.give_back_abandoned()) == 1

    @promise("L1", "L11")
    async def test_a_lease_from_before_a_reboot_has_expired(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        if storage.capabilities.reach != "machine":
            pytest.skip(
                "leases of one process or of a fleet do not depend on a reboot of this machine"
            )
        await storage.enqueue(a_task("a"))
        await storage.reserve(1)
        clock.reboot()
        after = await open_another()

        assert [back.task_id for back in await after.give_back_abandoned()] == ["a"]

    @promise("L1")
    async def test_the_lease_is_as_long_as_the_settings_say(
        self, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        short = await open_another(settings=Settings(lease=2))
        other = await open_another()
        await short.enqueue(a_task("a"))
        await short.reserve(1)
        clock.advance(1.999)
        assert await other.give_back_abandoned() == []
        clock.advance(0.001)

        assert len(await other.give_back_abandoned()) == 1

    @promise("L1")
    async def test_a_lease_length_given_to_a_renewal_is_used_from_then_on(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await storage.enqueue(a_task("a"))
        await storage.renew(lease=3)
        await storage.reserve(1)
        await storage.renew()
        clock.advance(2.999)
        assert await other.give_back_abandoned() == []
        clock.advance(0.001)

        assert len(await other.give_back_abandoned()) == 1

    @promise("L2", "L4")
    async def test_renewing_twice_has_the_same_effect_as_once(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        await storage.enqueue(a_task("a"))
        await storage.reserve(1)
        first = await storage.renew()
        again = await storage.renew()

        assert again == first
        assert again.held == {"a": 1}
        assert len(await storage.workers()) == 1

    @promise("L3", "L6")
    async def test_a_fenced_owner_cannot_renew_and_has_a_new_id_afterwards(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await storage.renew()
        before = storage.owner
        clock.advance(LEASE)
        await other.give_back_abandoned()

        with pytest.raises(LeaseLost) as refused:
            await storage.renew()
        assert refused.value.owner == before != storage.owner
        await storage.renew()
        assert [worker.id for worker in await other.workers()] == [storage.owner]

    @promise("L3")
    async def test_an_owner_with_an_expired_lease_may_renew_until_its_tasks_are_given_back(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        clock.advance(LEASE * 2)
        await storage.renew()

        assert await other.give_back_abandoned() == []
        await storage.mark_done("a", a_result(task))

    @promise("L4", "X2")
    async def test_a_renewal_returns_the_held_and_the_cancelled_tasks(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        other = await open_another()
        await storage.enqueue_many(some_tasks("abc"))
        await storage.reserve(2)
        await other.reserve(1)
        await other.cancel("b")
        renewal = await storage.renew()

        assert renewal.held == {"a": 1, "b": 1}
        assert renewal.cancelled == {"b"}
        assert await other.held_by(storage.owner) == renewal.held

    @promise("L5")
    async def test_a_worker_is_listed_with_the_tasks_it_holds_while_its_lease_lasts(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await storage.enqueue_many(some_tasks("ba"))
        await storage.reserve(2)
        clock.advance(1)
        await storage.renew(concurrency=4, queues=("mail", "default"), stalled=True, stopping=True)

        (worker,) = await other.workers()
        assert (worker.id, worker.running) == (storage.owner, ("a", "b"))
        assert (worker.concurrency, worker.queues) == (4, ("mail", "default"))
        assert worker.stalled
        assert worker.stopping
        assert worker.host
        assert worker.pid > 0
        assert worker.last_heartbeat == clock.now()
        assert worker.started_at == clock.now() - timedelta(seconds=1)
        clock.advance(LEASE)
        assert await other.workers() == []

    @promise("L5")
    @pytest.mark.parametrize(
        "runnable",
        [
            None,
            Runnable(),
            Runnable(modules=("shop", "mail"), names=frozenset({"a.b", "c.d"})),
            Runnable(modules=None, excluded=frozenset({"shop.new"})),
        ],
        ids=str,
    )
    async def test_a_worker_is_listed_with_what_it_can_run(
        self, storage: BaseStorage, open_another: OpenAnother, runnable: Runnable | None
    ) -> None:
        other = await open_another()
        await storage.renew(runnable=runnable)
        assert [worker.runnable for worker in await other.workers()] == [runnable]

    @promise("L5")
    async def test_workers_are_listed_by_their_ids(self, open_another: OpenAnother) -> None:
        owners = [await open_another() for _ in range(4)]
        for owner in reversed(owners):
            await owner.renew()

        assert [worker.id for worker in await owners[0].workers()] == sorted(
            owner.owner for owner in owners
        )

    @promise("L6", "R2")
    async def test_a_fenced_owner_cannot_record(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        lost = await open_another()
        await storage.enqueue(a_task("a"))
        task = await claim_one(lost)
        clock.advance(LEASE)
        await storage.give_back_abandoned()

        assert await lost.record([Released("a", task.token)]) == [False]
        with pytest.raises(StaleClaim):
            await lost.mark_done("a", a_result(task))

    @promise("L7", "R4")
    async def test_a_task_of_a_lost_owner_is_due_at_once_and_charged(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", func_path="tasks.big", eta=clock.now()))
        (lost,) = await claim_and_expire(open_another, clock)
        (back,) = await storage.give_back_abandoned()

        assert (back.task_id, back.func_path) == ("a", "tasks.big")
        assert (back.owner, back.status) == (lost.owner, TaskStatus.RETRYING)
        (attempt,) = await storage.history("a")
        assert (attempt.outcome, attempt.owner, attempt.token) == ("crashed", lost.owner, 1)
        assert attempt.error is not None
        assert attempt.error.error_type == "WorkerLost"
        task = await storage.dequeue(clock.now() - timedelta(days=1))
        assert task is not None
        assert (task.attempts, task.crashes) == (0, 1)

    @promise("L7", "E3")
    async def test_a_task_of_a_lost_owner_keeps_its_unique_key(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", unique="key"))
        await claim_and_expire(open_another, clock)
        await storage.give_back_abandoned()

        assert await storage.enqueue(a_task("b", unique="key")) == "a"

    @promise("L7")
    async def test_recovering_twice_charges_once(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        await claim_and_expire(open_another, clock)

        assert len(await storage.give_back_abandoned()) == 1
        assert await storage.give_back_abandoned() == []
        assert (await claim_one(storage)).crashes == 1

    @promise("L8", "C10")
    async def test_when_a_lost_owner_held_a_suspect_only_the_suspect_is_charged(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("killer"))
        await claim_and_expire(open_another, clock)
        await storage.give_back_abandoned()
        await storage.enqueue_many(some_tasks(["x", "y"]))
        claimed = await claim_and_expire(open_another, clock, limit=3)
        await storage.give_back_abandoned()

        assert sorted(ids(claimed)) == ["killer", "x", "y"]
        charged = {task.id: (task.crashes, task.attempts) for task in await storage.list_tasks()}
        assert charged == {"killer": (2, 0), "x": (0, 0), "y": (0, 0)}
        assert await status_of(storage, "x") is TaskStatus.PENDING
        assert await storage.history("x") == []

    @promise("L9", "R6")
    async def test_a_task_becomes_a_dead_letter_after_exactly_three_crashes(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("killer", max_retries=0, unique="key"))
        statuses = []
        for _ in range(3):
            await claim_and_expire(open_another, clock)
            (back,) = await storage.give_back_abandoned()
            statuses.append(back.status)

        assert statuses == [TaskStatus.RETRYING, TaskStatus.RETRYING, TaskStatus.FAILED]
        dead_letter = await storage.get_dead("killer")
        assert dead_letter is not None
        assert (dead_letter.failure_reason, dead_letter.attempt_count) == ("crashed", 3)
        assert await storage.reserve(1) == []
        assert await storage.enqueue(a_task("next", unique="key")) == "next"

    @promise("L9")
    async def test_the_caller_may_set_the_maximum_number_of_crashes(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        await claim_and_expire(open_another, clock)

        (back,) = await storage.give_back_abandoned(max_crashes=1)
        assert back.status is TaskStatus.FAILED
        with pytest.raises(InvalidValue):
            await storage.give_back_abandoned(max_crashes=0)

    @promise("L9")
    async def test_a_task_may_have_its_own_maximum_of_crashes(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        await storage.enqueue_many([a_task("two", max_crashes=2), a_task("four", max_crashes=4)])
        statuses = []
        for _ in range(4):
            await claim_and_expire(open_another, clock)
            await claim_and_expire(open_another, clock)
            back = await storage.give_back_abandoned()
            statuses.append({each.task_id: each.status for each in back})

        assert [status.get("two") for status in statuses[:2]] == [
            TaskStatus.RETRYING,
            TaskStatus.FAILED,
        ]
        four = [status["four"] for status in statuses]
        assert four == [TaskStatus.RETRYING] * 3 + [TaskStatus.FAILED]

    @promise("L13")
    async def test_a_task_that_runs_at_most_once_is_a_dead_letter_when_its_owner_is_lost(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        await storage.enqueue_many([a_task("zero", max_crashes=0), a_task("one", max_crashes=1)])
        await claim_and_expire(open_another, clock, limit=2)
        back = await storage.give_back_abandoned()

        assert {each.task_id: each.status for each in back} == {
            "zero": TaskStatus.FAILED,
            "one": TaskStatus.FAILED,
        }
        for task_id in ("zero", "one"):
            letter = await storage.get_dead(task_id)
            assert letter is not None
            assert (letter.failure_reason, letter.attempt_count) == ("crashed", 1)
        assert await storage.reserve(2) == []

    @promise("L13")
    async def test_a_task_that_runs_at_most_once_does_not_run_again_beside_a_suspect(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("suspect"))
        await claim_and_expire(open_another, clock)
        await storage.give_back_abandoned()
        await storage.enqueue_many([a_task("once", max_crashes=0), a_task("other")])
        await claim_and_expire(open_another, clock, limit=3)
        back = await storage.give_back_abandoned()

        assert {each.task_id: each.status for each in back} == {
            "suspect": TaskStatus.RETRYING,
            "once": TaskStatus.FAILED,
            "other": TaskStatus.PENDING,
        }

    @promise("L13", "O3")
    async def test_a_task_that_runs_at_most_once_is_a_dead_letter_when_its_owner_closes(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        other = await open_another()
        await storage.enqueue_many([a_task("once", max_crashes=0), a_task("other")])
        assert len(await other.reserve(2)) == 2
        await other.close()

        assert ids(await storage.reserve(2)) == ["other"]
        letter = await storage.get_dead("once")
        assert letter is not None
        assert letter.failure_reason == "crashed"

    @promise("L13", "R7")
    async def test_a_task_that_runs_at_most_once_may_fail_be_retried_and_be_released(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("once", max_crashes=0))
        task = await claim_one(storage)
        assert await storage.record([Retried("once", task.token, an_error(), clock.now())]) == [
            True
        ]
        again = await claim_one(storage)
        assert (again.attempts, again.crashes) == (1, 0)
        assert await storage.record([Released("once", again.token)]) == [True]

        assert (await claim_one(storage)).id == "once"

    @promise("L8", "L9", "C10")
    async def test_a_task_that_kills_its_workers_becomes_a_dead_letter_and_other_tasks_finish(
        self, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        watcher = await open_another()
        await watcher.enqueue_many(some_tasks([f"n{n}" for n in range(6)] + ["killer"]))
        for _ in range(40):
            worker = await open_another()
            await _work_until_killed(worker)
            clock.advance(LEASE)
            await watcher.give_back_abandoned()

        statuses = {task.id: task.status for task in await watcher.list_tasks()}
        crashes = {task.id: task.crashes for task in await watcher.list_tasks()}
        assert statuses.pop("killer") is TaskStatus.FAILED
        assert set(statuses.values()) == {TaskStatus.SUCCESS}
        assert crashes.pop("killer") == 3
        assert max(crashes.values()) <= 1

    @promise("L10", "M3")
    async def test_a_held_failure_is_given_back_without_a_second_charge(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        lost = await open_another()
        await storage.enqueue(a_task("a"))
        task = await claim_one(lost)
        await lost.record([Retried("a", task.token, an_error("once"))])
        clock.advance(LEASE)
        (back,) = await storage.give_back_abandoned()
        task = await claim_one(storage)

        assert back.status is TaskStatus.RETRYING
        assert (task.attempts, task.crashes) == (1, 0)
        assert len(await storage.history("a")) == 1

    @promise("L11")
    async def test_tasks_of_a_closed_owner_are_not_given_back_twice(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        closing = await open_another()
        await storage.enqueue(a_task("a"))
        await closing.reserve(1)
        await closing.close()
        clock.advance(LEASE)

        assert await storage.give_back_abandoned() == []
        assert (await claim_one(storage)).crashes == 0

    @promise("L12")
    async def test_owners_that_recover_at_once_give_each_task_back_once(
        self, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        owners = [await open_another() for _ in range(4)]
        await owners[0].enqueue_many([a_task(f"t{n}") for n in range(9)])
        await claim_and_expire(open_another, clock, limit=9)
        taken = await asyncio.gather(*(owner.give_back_abandoned() for owner in owners * 2))

        given_back = [back.task_id for backs in taken for back in backs]
        assert sorted(given_back) == [f"t{n}" for n in range(9)]
        assert {task.crashes for task in await owners[0].list_tasks()} == {1}

    @promise("L8")
    async def test_a_task_given_back_without_a_charge_keeps_its_place(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("killer"))
        await claim_and_expire(open_another, clock)
        await storage.give_back_abandoned()
        await storage.enqueue(a_task("x"))
        await claim_and_expire(open_another, clock, limit=2)
        await storage.enqueue(a_task("y"))
        await storage.give_back_abandoned()

        order = ids(await storage.reserve(10))
        assert order.index("x") < order.index("y")

    @promise("L6")
    async def test_an_owner_with_a_lease_keeps_its_claims_when_another_owner_is_lost(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        await storage.enqueue_many(some_tasks("ab"))
        await claim_and_expire(open_another, clock)
        mine = await claim_one(storage)
        given_back = await storage.give_back_abandoned()

        assert ([back.task_id for back in given_back], mine.id) == (["a"], "b")
        assert await storage.record([Failed("b", mine.token, an_error())]) == [True]

    @promise("V1")
    async def test_every_renewal_of_a_paused_worker_reports_the_pause_until_it_is_resumed(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        operator, other = await open_another(), await open_another()
        await storage.renew(concurrency=2)
        await other.renew(concurrency=2)
        await storage.enqueue(a_task("a"))
        held = await claim_one(storage)

        assert await operator.pause_worker(storage.owner)
        assert await operator.pause_worker(storage.owner)
        assert [(await storage.renew()).paused for _ in range(2)] == [True, True]
        assert not (await other.renew()).paused
        shown = {worker.id: worker for worker in await operator.workers()}
        assert (shown[storage.owner].paused, shown[other.owner].paused) == (True, False)
        assert shown[storage.owner].running == ("a",)
        await storage.mark_done("a", a_result(held))
        assert await operator.resume_worker(storage.owner)
        assert not (await storage.renew()).paused
        assert not any(worker.paused for worker in await operator.workers())

    @promise("V1")
    async def test_a_worker_without_a_lease_cannot_be_paused(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        worker = await open_another()
        assert not await storage.pause_worker(worker.owner)
        assert not await storage.resume_worker("unknown")
        await worker.renew()
        clock.advance(LEASE + 1)
        assert not await storage.pause_worker(worker.owner)

    @promise("V2")
    async def test_a_pause_ends_with_the_lease(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        worker = await open_another()
        await worker.renew()
        await storage.pause_worker(worker.owner)
        clock.advance(LEASE + 1)
        await storage.give_back_abandoned()
        with pytest.raises(LeaseLost):
            await worker.renew()

        assert not (await worker.renew()).paused
        assert not any(each.paused for each in await storage.workers())

    @promise("V3", "L5")
    async def test_a_worker_reads_once_that_it_is_to_stop(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        worker, bystander = await open_another(), await open_another()
        await worker.renew()
        await bystander.renew()

        assert await storage.stop_worker(worker.owner)
        assert await storage.stop_worker(worker.owner, restart=True)

        assert await bystander.take_requests() == []
        requests = await worker.take_requests()
        assert sorted(request.action for request in requests) == ["restart", "stop"]
        assert await worker.take_requests() == []

    @promise("V3", "V4")
    async def test_a_worker_without_a_lease_is_not_asked(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        worker = await open_another()
        await worker.renew()
        clock.advance(LEASE)

        assert not await storage.stop_worker(worker.owner)
        assert not await storage.stop_worker("unknown")
        assert await storage.ping_worker(worker.owner) is None
        assert await worker.take_requests() == []

    @promise("V4")
    async def test_a_ping_is_answered_with_what_the_worker_says(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        worker = await open_another()
        await worker.renew()
        answers = [WorkerAnswer(("shop",), ("shop.pack",), 2), WorkerAnswer(None, ("x",), 0)]

        async def ping() -> Pong | None:
            pinging = asyncio.ensure_future(storage.ping_worker(worker.owner, 60.0))
            while not pinging.done():
                for request in await worker.take_requests():
                    assert request.action == "ping"
                    clock.advance(0.5)
                    await worker.answer_request(request, answers.pop())
                clock.advance(0.01)
                await worker.renew()
                await asyncio.sleep(0.001)
            return await pinging

        first, second = await ping(), await ping()

        assert first is not None
        assert second is not None
        assert (first.worker_id, first.modules, first.functions) == (worker.owner, None, ("x",))
        assert (second.modules, second.functions, second.more) == (("shop",), ("shop.pack",), 2)
        assert first.seconds >= 0.5

    @promise("V4")
    async def test_a_ping_without_an_answer_ends_and_leaves_nothing_behind(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        worker = await open_another()
        await worker.renew()
        pinging = asyncio.ensure_future(storage.ping_worker(worker.owner, 1.0))
        while not pinging.done():
            clock.advance(0.2)
            await asyncio.sleep(0.001)

        assert await pinging is None
        assert await worker.take_requests() == []
        assert await storage.purge_requests(clock.now() + timedelta(days=1)) == 0

    @promise("V6")
    async def test_the_last_number_of_slots_reaches_the_worker_last(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        worker, bystander = await open_another(), await open_another()
        await worker.renew()
        for slots in (2, 8):
            assert await storage.set_slots(worker.owner, slots)
            clock.advance(0.01)
        assert not await storage.set_slots("unknown", 3)
        with pytest.raises(InvalidValue):
            await storage.set_slots(worker.owner, 0)

        pending = await storage.pending_requests()
        assert [(each.owner, each.slots) for each in pending] == [
            (worker.owner, 2),
            (worker.owner, 8),
        ]
        assert await bystander.take_requests() == []
        assert [each.slots for each in await worker.take_requests()] == [2, 8]
        assert await storage.pending_requests() == []

    @promise("V5")
    async def test_requests_to_lost_workers_and_answers_that_are_not_read_are_purged(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        worker = await open_another()
        await worker.renew()
        await storage.stop_worker(worker.owner)
        (request,) = await worker.take_requests()
        await worker.answer_request(request, WorkerAnswer())
        await storage.stop_worker(worker.owner)
        stored_at = clock.now()
        clock.advance(10)
        await worker.renew()
        await storage.stop_worker(worker.owner)

        assert await storage.purge_requests(stored_at) == 0
        assert await storage.purge_requests(stored_at + timedelta(seconds=5)) == 2
        assert len(await worker.take_requests()) == 1


async def _work_until_killed(worker: BaseStorage) -> None:
    """Finish tasks until a claim includes the killer, then return without an outcome."""
    while tasks := await worker.reserve(3):
        if "killer" in ids(tasks):
            return
        await _finish_all(worker, tasks)


async def _finish_all(worker: BaseStorage, tasks: list[Task]) -> None:
    for task in tasks:
        await worker.mark_done(task.id, a_result(task))
