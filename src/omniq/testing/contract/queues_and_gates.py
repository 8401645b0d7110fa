"""Paused queues and gates: what stops a due task from being claimed, in the whole fleet."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

import msgspec
import pytest

from omniq.errors import InvalidValue
from omniq.gate_rules import BreakerState
from omniq.models import BreakerRule, Limit, Task, TaskStatus
from omniq.outcomes import Failed, Released, Rescheduled, Retried, Snoozed, Succeeded
from omniq.storage.backend import DocumentQuery
from omniq.storage.base import BaseStorage
from omniq.testing.builders import (
    FINAL_KINDS,
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
    claim_one,
    ids,
    promise,
)

RESET = 100.0
"""Seconds; longer than a lease, so that the two do not end together."""

SMTP = (BreakerRule(name="smtp", max_failures=2, reset_timeout=RESET),)


def _at_most(size: int) -> tuple[Limit, ...]:
    return (Limit(key="k", max_running=size),)


async def _succeed(storage: BaseStorage, *tasks: Task) -> None:
    done = await storage.record([Succeeded(task.id, task.token, a_result(task)) for task in tasks])
    assert all(done)


async def _open_breaker(storage: BaseStorage) -> None:
    """Open the breaker: two of its tasks fail."""
    await storage.enqueue_many(some_tasks(["f1", "f2"], breakers=SMTP, priority=99))
    for task in await storage.reserve(2):
        await storage.record([Failed(task.id, task.token, an_error("down"))])
    assert await _breaker(storage) is BreakerState.OPEN


async def _breaker(storage: BaseStorage) -> BreakerState:
    return (await storage.gates())["breaker:smtp"].breaker


class GateContract(ContractPart):
    """G1 to G5."""

    @promise("G1", "C6")
    async def test_a_paused_queue_accepts_tasks_and_none_is_claimed_from_it(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        other = await open_another()
        await storage.enqueue(a_task("a", queue="mail"))
        running = await claim_one(storage)
        await other.pause_queue("mail")
        await storage.enqueue(a_task("b", queue="mail"))

        assert await storage.paused_queues() == {"mail"}
        assert await storage.reserve(5) == []
        assert await storage.reserve(5, queues=["mail"]) == []
        await _succeed(storage, running)
        await storage.resume_queue("mail")
        assert ids(await other.reserve(5)) == ["b"]
        assert await other.paused_queues() == frozenset()

    @promise("G1")
    async def test_pausing_and_resuming_twice_has_the_same_effect_as_once(
        self, storage: BaseStorage
    ) -> None:
        await storage.pause_queue("a")
        await storage.pause_queue("a")
        await storage.pause_queue("never-used")
        await storage.resume_queue("a")
        await storage.resume_queue("a")

        assert await storage.paused_queues() == {"never-used"}
        with pytest.raises(InvalidValue):
            await storage.pause_queue("../x")

    @promise("G2")
    async def test_no_more_tasks_run_at_once_than_the_limit_allows(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        other = await open_another()
        await storage.enqueue_many(some_tasks("abcde", limits=_at_most(2)))
        mine = await storage.reserve(10)

        assert ids(mine) == ["a", "b"]
        assert await other.reserve(10) == []
        await _succeed(storage, mine[0])
        assert ids(await other.reserve(10)) == ["c"]
        assert await storage.reserve(10) == []

    @promise("G2")
    @pytest.mark.parametrize("kind", [*FINAL_KINDS, *RELEASING_KINDS])
    async def test_every_outcome_frees_the_running_limit(
        self, storage: BaseStorage, clock: ManualClock, kind: OutcomeKind
    ) -> None:
        await storage.enqueue(a_task("a", limits=_at_most(1)))
        await storage.enqueue(a_task("b", limits=_at_most(1), priority=-1))
        task = await claim_one(storage)
        assert await storage.reserve(1) == []
        await storage.record([an_outcome(kind, task, clock.now() + timedelta(days=1))])

        expected = ["a"] if kind == "released" else ["b"]
        assert ids(await storage.reserve(5)) == expected

    @promise("G2")
    async def test_the_limit_is_exact_when_owners_die(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        await storage.enqueue_many([a_task(f"t{n:02}", limits=_at_most(3)) for n in range(12)])
        for _ in range(4):
            lost = [await open_another() for _ in range(4)]
            claims = [await owner.reserve(10) for owner in lost]
            assert sum(map(len, claims)) == 3
            clock.advance(LEASE)
            await storage.give_back_abandoned(max_crashes=100)

        running = [await (await open_another()).reserve(10) for _ in range(6)]
        assert sum(map(len, running)) == 3

    @promise("G2")
    async def test_the_limit_is_exact_when_many_claim_at_once(
        self, open_another: OpenAnother
    ) -> None:
        owners = [await open_another() for _ in range(4)]
        await owners[0].enqueue_many([a_task(f"t{n}", limits=_at_most(3)) for n in range(9)])
        claims = await asyncio.gather(*(owner.reserve(1) for owner in owners * 4))

        assert sum(map(len, claims)) == 3

    @promise("G2", "O3")
    async def test_closing_frees_the_running_limit(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        closing = await open_another()
        await storage.enqueue_many(some_tasks("ab", limits=_at_most(1)))
        await closing.reserve(5)
        await closing.close()

        assert ids(await storage.reserve(5)) == ["a"]

    @promise("G2", "G5")
    async def test_a_task_with_two_limits_must_pass_both(self, storage: BaseStorage) -> None:
        x, y = Limit(key="x", max_running=1), Limit(key="y", max_running=1)
        await storage.enqueue(a_task("x1", limits=(x,)))
        await storage.enqueue(a_task("y1", limits=(y,)))
        first, second = await storage.reserve(5)
        await storage.enqueue(a_task("xy", limits=(x, y)))
        assert await storage.reserve(5) == []
        await _succeed(storage, first)
        assert await storage.reserve(5) == []
        await _succeed(storage, second)

        (both,) = await storage.reserve(5)
        await storage.enqueue(a_task("x2", limits=(x,)))
        await storage.enqueue(a_task("y2", limits=(y,)))
        assert await storage.reserve(5) == []
        await _succeed(storage, both)
        assert ids(await storage.reserve(5)) == ["x2", "y2"]

    @promise("G3")
    async def test_no_span_of_time_has_more_starts_than_the_rate_allows(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        span = timedelta(seconds=10)
        limits = (Limit(key="k", rate=3, per=span.total_seconds()),)
        await storage.enqueue_many([a_task(f"t{n:02}", limits=limits) for n in range(24)])
        starts: list[datetime] = []
        for pause in (0, 4, 4, 1, 1, 0.5, 9.5, 3, 3, 3, 0.999, 0.001, 12, 5, 5, 30):
            clock.advance(pause)
            claimed = await storage.reserve(10)
            starts += [clock.now()] * len(claimed)
            await _succeed(storage, *claimed)

        for start in starts:
            assert sum(start <= other < start + span for other in starts) <= 3
        assert len(starts) >= 18

    @promise("G3")
    async def test_the_full_rate_is_available_again_as_soon_as_the_period_ends(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        limits = (Limit(key="k", rate=2, per=10.0),)
        await storage.enqueue_many(some_tasks("abcdef", limits=limits))
        first = await storage.reserve(10)
        clock.advance(timedelta(seconds=10) - timedelta(microseconds=1))
        early = await storage.reserve(10)
        clock.advance(timedelta(microseconds=1))

        assert (ids(first), early) == (["a", "b"], [])
        assert ids(await storage.reserve(10)) == ["c", "d"]

    @promise("G3")
    async def test_one_claim_takes_all_tasks_that_a_rate_admits_again(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        limits = (Limit(key="k", rate=20, per=10.0),)
        await storage.enqueue_many([a_task(f"t{n:02}", limits=limits) for n in range(60)])
        assert len(await storage.reserve(30)) == 20
        assert await storage.reserve(30) == []
        clock.advance(10)

        assert ids(await storage.reserve(30)) == [f"t{n:02}" for n in range(20, 40)]

    @promise("G3")
    async def test_the_rate_counts_every_start_regardless_of_its_outcome(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        limits = (Limit(key="k", rate=1, per=10.0),)
        await storage.enqueue_many(some_tasks("ab", limits=limits))
        task = await claim_one(storage)
        await storage.record([Released("a", task.token)])

        assert await storage.reserve(5) == []
        clock.advance(10)
        assert ids(await storage.reserve(5)) == ["a"]

    @promise("G3")
    async def test_the_rate_is_exact_when_many_claim_at_once(
        self, open_another: OpenAnother
    ) -> None:
        owners = [await open_another() for _ in range(4)]
        limits = (Limit(key="k", rate=3, per=10.0),)
        await owners[0].enqueue_many([a_task(f"t{n}", limits=limits) for n in range(9)])
        claims = await asyncio.gather(*(owner.reserve(1) for owner in owners * 4))

        assert sum(map(len, claims)) == 3

    @promise("G4", "G5")
    async def test_an_open_breaker_holds_its_tasks_and_no_others(
        self, storage: BaseStorage
    ) -> None:
        await _open_breaker(storage)
        await storage.enqueue_many(some_tasks("ab", breakers=SMTP, priority=9))
        await storage.enqueue(a_task("other"))

        assert ids(await storage.reserve(10)) == ["other"]
        assert {task.status for task in await storage.list_tasks(limit=2)} == {TaskStatus.PENDING}
        gate = (await storage.gates())["breaker:smtp"]
        assert (gate.failures, gate.reason) == (2, "ValueError")

    @promise("G4")
    async def test_after_the_reset_timeout_one_probe_is_claimed_and_its_success_closes_the_breaker(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await _open_breaker(storage)
        await storage.enqueue_many(some_tasks("abc", breakers=SMTP))
        clock.advance(RESET - 0.001)
        assert await storage.reserve(10) == []
        clock.advance(0.001)

        (probe,) = await storage.reserve(10)
        assert probe.id == "a"
        assert await _breaker(storage) is BreakerState.HALF_OPEN
        assert await storage.reserve(10) + await other.reserve(10) == []
        await _succeed(storage, probe)
        assert await _breaker(storage) is BreakerState.CLOSED
        assert ids(await other.reserve(10)) == ["b", "c"]

    @promise("G4")
    async def test_a_failed_probe_opens_the_breaker_for_another_reset_timeout(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await _open_breaker(storage)
        await storage.enqueue_many(some_tasks("abc", breakers=SMTP))
        clock.advance(RESET)
        (probe,) = await storage.reserve(10)
        clock.advance(7)
        later = clock.now() + timedelta(days=1)
        await storage.record([Retried(probe.id, probe.token, an_error(), later)])

        assert await _breaker(storage) is BreakerState.OPEN
        clock.advance(RESET - 0.001)
        assert await storage.reserve(10) == []
        clock.advance(0.001)
        assert ids(await storage.reserve(10)) == ["b"]

    @promise("G4")
    async def test_a_lost_probe_is_followed_by_another_probe(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        watcher = await open_another()
        await _open_breaker(storage)
        await storage.enqueue_many(some_tasks("abc", breakers=SMTP))
        clock.advance(RESET)
        assert len(await storage.reserve(10)) == 1
        clock.advance(LEASE)
        await watcher.give_back_abandoned()

        assert len(await watcher.reserve(10)) == 1
        assert await _breaker(watcher) is BreakerState.HALF_OPEN

    @promise("G4")
    async def test_a_snoozed_probe_is_followed_by_another_probe(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await _open_breaker(storage)
        await storage.enqueue_many(some_tasks("ab", breakers=SMTP))
        clock.advance(RESET)
        (probe,) = await storage.reserve(10)
        await storage.record([Snoozed(probe.id, probe.token, clock.now() + timedelta(days=1))])

        assert ids(await storage.reserve(10)) == ["b"]

    @promise("G4")
    async def test_a_success_resets_the_failure_count_of_its_breaker(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many(some_tasks("abcd", breakers=SMTP))
        a, b, c, _ = await storage.reserve(10)
        await storage.record([Failed("a", a.token, an_error())])
        await _succeed(storage, b)
        await storage.record([Failed("c", c.token, an_error())])

        assert await _breaker(storage) is BreakerState.CLOSED

    @promise("G4")
    async def test_failures_of_tasks_started_before_the_breaker_opened_do_not_keep_it_open(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many(some_tasks("abcx", breakers=SMTP))
        a, b, c, _ = await storage.reserve(4)
        await storage.record([Failed("a", a.token, an_error()), Failed("b", b.token, an_error())])
        await storage.enqueue(a_task("d", breakers=SMTP))
        clock.advance(RESET - 1)
        await storage.record([Failed("c", c.token, an_error())])
        clock.advance(1)

        assert ids(await storage.reserve(10)) == ["d"]

    @promise("G4", "G6")
    async def test_a_breaker_whose_parked_tasks_are_cancelled_is_due_no_more(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await _open_breaker(storage)
        await storage.enqueue(a_task("a", breakers=SMTP))
        assert await storage.reserve(1) == []
        await storage.cancel("a")
        clock.advance(RESET)
        assert await storage.reserve(1) == []
        query = DocumentQuery(kind="gate", due_by=clock.micros())

        # Else every claim would look at it for ever.
        assert await storage._engine._read(lambda section: section.find_documents(query)) == []
        assert await _breaker(storage) is BreakerState.OPEN
        await storage.enqueue_many(some_tasks("bc", breakers=SMTP))
        assert ids(await storage.reserve(2)) == ["b"]

    @promise("G4", "R3")
    async def test_a_failure_recorded_twice_counts_once(self, storage: BaseStorage) -> None:
        await storage.enqueue(a_task("a", breakers=SMTP))
        task = await claim_one(storage)
        failure = Retried("a", task.token, an_error())
        await storage.record([failure])
        await storage.record([failure])
        await storage.mark_failed("a", an_error(), will_retry=False)

        assert (await storage.gates())["breaker:smtp"].failures == 1

    @promise("G5", "C4")
    async def test_parked_tasks_keep_their_order(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("first", limits=_at_most(1), priority=9))
        await storage.enqueue_many(some_tasks("bcd", limits=_at_most(1)))
        (running,) = await storage.reserve(10)
        clock.advance(1)
        await storage.enqueue(a_task("urgent", limits=_at_most(1), priority=5))
        order = []
        for _ in range(4):
            await _succeed(storage, running)
            (running,) = await storage.reserve(10)
            order.append(running.id)

        assert order == ["urgent", "b", "c", "d"]

    @promise("G5")
    async def test_parked_tasks_do_not_block_other_tasks(self, storage: BaseStorage) -> None:
        await storage.enqueue_many(some_tasks([f"p{n:02}" for n in range(50)], limits=_at_most(1)))
        await storage.enqueue_many(some_tasks("xy", priority=-1))

        assert ids(await storage.reserve(3)) == ["p00", "x", "y"]

    @promise("G5")
    async def test_parked_tasks_of_a_paused_queue_do_not_block_tasks_of_other_queues(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("first", limits=_at_most(1)))
        running = await claim_one(storage)
        await storage.enqueue_many(some_tasks("abcd", queue="slow", limits=_at_most(1)))
        await storage.enqueue(a_task("x", queue="fast", limits=_at_most(1)))
        assert await storage.reserve(10) == []
        await storage.pause_queue("slow")
        await _succeed(storage, running)

        assert ids(await storage.reserve(10)) == ["x"]

    @promise("G5")
    async def test_a_parked_task_that_was_rescheduled_waits_for_its_eta(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", interval=5, limits=_at_most(1)))
        await storage.mark_done("a", a_result(await claim_one(storage)))
        await storage.enqueue(a_task("b", limits=_at_most(1), priority=9))
        running = await claim_one(storage)
        clock.advance(5)
        assert await storage.reserve(10) == []
        await storage.reschedule("a", clock.now() + timedelta(seconds=5))
        await _succeed(storage, running)

        assert await storage.reserve(10) == []
        clock.advance(5)
        assert ids(await storage.reserve(10)) == ["a"]

    @promise("G5")
    async def test_a_task_that_is_moved_and_blocked_in_one_step_is_moved(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", interval=5, limits=_at_most(1)))
        done = await claim_one(storage)
        await storage.mark_done("a", a_result(done))
        clock.advance(9)
        await storage.enqueue(a_task("b", limits=_at_most(1), priority=9))
        moved = Rescheduled("a", done.token, clock.now())
        recorded, claimed = await storage.record_and_reserve([moved], 2)

        assert (recorded, ids(claimed)) == ([True], ["b"])
        task = await storage.get_task("a")
        assert task is not None
        assert task.eta == clock.now()

    @promise("G6")
    async def test_many_limits_that_have_room_at_once_hold_up_no_task(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        keys = [f"k{number:03}" for number in range(250)]
        for round_number in range(2):
            await storage.enqueue_many(
                [
                    a_task(f"{key}.{round_number}", limits=(Limit(key=key, rate=1, per=5.0),))
                    for key in keys
                ]
            )
        assert len(await storage.reserve(1_000)) == len(keys)
        assert await storage.reserve(1_000) == []
        clock.advance(5)
        await storage.enqueue(a_task("plain", priority=1))

        assert ids(await storage.reserve(1)) == ["plain"]
        assert ids(await storage.reserve(1_000)) == [f"{key}.1" for key in keys]

    @promise("G7")
    async def test_when_a_task_that_may_run_is_cancelled_the_next_one_may_run(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many(some_tasks("abc", limits=_at_most(1)))
        running = await claim_one(storage)
        assert await storage.reserve(3) == []
        await _succeed(storage, running)
        assert await storage.cancel("b")

        assert ids(await storage.reserve(3)) == ["c"]

    @promise("G7", "C8")
    async def test_when_a_task_that_may_run_has_expired_the_next_one_may_run(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        soon = clock.now() + timedelta(seconds=1)
        tasks = [a_task("a"), a_task("b", expires=soon), a_task("c")]
        await storage.enqueue_many([_limited(task) for task in tasks])
        running = await claim_one(storage)
        assert await storage.reserve(3) == []
        await _succeed(storage, running)
        clock.advance(2)

        assert ids(await storage.reserve(3)) == ["c"]

    @promise("G7")
    async def test_a_task_that_another_limit_blocks_keeps_no_other_out(
        self, storage: BaseStorage
    ) -> None:
        both = (*_at_most(1), Limit(key="other", max_running=1))
        await storage.enqueue(a_task("holds-other", limits=(Limit(key="other", max_running=1),)))
        await storage.enqueue(a_task("holds-k", limits=_at_most(1)))
        claimed = {task.id: task for task in await storage.reserve(2)}
        await storage.enqueue_many([a_task("both", limits=both), a_task("one", limits=_at_most(1))])
        assert await storage.reserve(3) == []
        await _succeed(storage, claimed["holds-k"])

        assert ids(await storage.reserve(3)) == ["one"]
        await _succeed(storage, claimed["holds-other"])
        assert await storage.reserve(3) == []

    @promise("G7", "G1")
    async def test_a_task_of_a_paused_queue_keeps_no_other_out_of_its_limit(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("first", limits=_at_most(1)))
        running = await claim_one(storage)
        await storage.enqueue_many([_limited(a_task("slow", queue="slow")), _limited(a_task("b"))])
        assert await storage.reserve(3) == []
        await _succeed(storage, running)
        await storage.pause_queue("slow")

        assert ids(await storage.reserve(3)) == ["b"]

    @promise("G8")
    async def test_the_state_of_a_limit_that_says_nothing_is_deleted(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        keys = [f"k{number}" for number in range(20)]
        for _ in range(2):
            tasks = [
                a_task(limits=(Limit(key=key, max_running=1), Limit(key=key, rate=1, per=5.0)))
                for key in keys
            ]
            await storage.enqueue_many(tasks)
            claimed = await storage.reserve(100)
            assert len(claimed) == len(keys)
            await _succeed(storage, *claimed)
            clock.advance(6)
            # A claim notices that the states say nothing any more.
            assert await storage.reserve(1) == []

            assert await storage.gates() == {}

    @promise("G9")
    async def test_a_breaker_that_is_closed_by_hand_admits_its_tasks_in_order(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        rule = BreakerRule(name="smtp", max_failures=1, reset_timeout=60.0)
        await storage.enqueue_many(some_tasks("abcdefg", breakers=(rule,)))
        (first,) = await storage.reserve(1)
        await storage.record([Failed("a", first.token, an_error("down"))])
        assert await storage.reserve(5) == []

        other = await open_another()
        assert await other.close_breaker("smtp")

        state = (await storage.gates())["breaker:smtp"]
        assert (state.breaker, state.failures, state.reason) == (BreakerState.CLOSED, 0, "")
        assert ids(await storage.reserve(20)) == list("bcdefg")

    @promise("G9", "G4")
    async def test_a_closed_breaker_counts_its_failures_from_zero(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        rule = BreakerRule(name="smtp", max_failures=2, reset_timeout=60.0)
        await storage.enqueue_many(some_tasks("abcd", breakers=(rule,)))
        (first,) = await storage.reserve(1)
        await storage.record([Failed(first.id, first.token, an_error("down"))])

        assert await storage.close_breaker("smtp")
        second, third = await storage.reserve(2)
        await storage.record([Failed(second.id, second.token, an_error("down"))])
        assert (await storage.gates())["breaker:smtp"].failures == 1
        await storage.record([Failed(third.id, third.token, an_error("down"))])
        assert await storage.reserve(5) == []

    @promise("G9")
    async def test_a_probe_that_still_runs_counts_as_any_other_run(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        rule = BreakerRule(name="smtp", max_failures=2, reset_timeout=5.0)
        await storage.enqueue_many(some_tasks("abcde", breakers=(rule,)))
        tasks = await storage.reserve(2)
        await storage.record([Failed(each.id, each.token, an_error("down")) for each in tasks])
        clock.advance(5)
        (probe,) = await storage.reserve(5)

        assert await storage.close_breaker("smtp")
        assert await storage.record([Failed(probe.id, probe.token, an_error("down"))]) == [True]

        state = (await storage.gates())["breaker:smtp"]
        assert (state.breaker, state.failures) == (BreakerState.CLOSED, 1)
        assert ids(await storage.reserve(5)) == ["d", "e"]

    @promise("G9")
    async def test_a_breaker_that_no_task_has_met_cannot_be_closed(
        self, storage: BaseStorage
    ) -> None:
        assert not await storage.close_breaker("smtp")
        assert await storage.gates() == {}


def _limited(task: Task) -> Task:
    return msgspec.structs.replace(task, limits=_at_most(1))
