"""Limits that count units, that operators change or hold, and pauses with an end: G10 to G15."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta

import pytest

from omniq.errors import InvalidTask, InvalidValue
from omniq.gate_rules import SAVED_FOR
from omniq.models import Limit, Task
from omniq.outcomes import Retried, Succeeded
from omniq.storage.base import BaseStorage
from omniq.testing.builders import a_result, a_task, an_error, some_tasks
from omniq.testing.clock import ManualClock
from omniq.testing.contract._suite import (
    LEASE,
    ContractPart,
    OpenAnother,
    claim_one,
    ids,
    promise,
)

SAVED_SECONDS = SAVED_FOR / 1_000_000


def _units(size: int, cost: int, key: str = "k") -> tuple[Limit, ...]:
    return (Limit(key=key, max_running=size, cost=cost),)


def _tokens(rate: int, cost: int, per: float = 10.0) -> tuple[Limit, ...]:
    return (Limit(key="k", rate=rate, per=per, cost=cost),)


def _slow(task_id: str, cost: int) -> Task:
    return a_task(task_id, queue="slow", limits=_units(4, cost))


async def _succeed(storage: BaseStorage, *tasks: Task) -> None:
    done = await storage.record([Succeeded(task.id, task.token, a_result(task)) for task in tasks])
    assert all(done)


def _cost(task: Task) -> int:
    return task.limits[0].cost or 1


class LimitContract(ContractPart):
    """G10 to G15."""

    # Units

    @promise("G11")
    async def test_running_tasks_take_no_more_units_than_the_limit_has(
        self, storage: BaseStorage
    ) -> None:
        for task_id, cost in zip("abcd", (2, 2, 1, 3), strict=True):
            await storage.enqueue(a_task(task_id, limits=_units(4, cost)))

        first = await storage.reserve(10)
        assert ids(first) == ["a", "b"]
        await _succeed(storage, first[0])
        second = await storage.reserve(10)
        assert ids(second) == ["c"]
        await _succeed(storage, first[1])
        assert ids(await storage.reserve(10)) == ["d"]

    @promise("G11")
    async def test_starts_take_no_more_units_than_the_rate_has_in_its_span(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        costs = [random.Random(7).randint(1, 60) for _ in range(40)]
        await storage.enqueue_many(
            [a_task(f"t{n:02}", limits=_tokens(100, cost)) for n, cost in enumerate(costs)]
        )
        starts: list[tuple[int, int]] = []
        for _ in range(200):
            claimed = await storage.reserve(10)
            starts += [(clock.micros(), _cost(task)) for task in claimed]
            await _succeed(storage, *claimed)
            clock.advance(1.3)

        assert len(starts) == len(costs)
        assert [cost for _, cost in starts] == costs
        for start, _ in starts:
            window = [cost for at, cost in starts if start <= at < start + 10_000_000]
            assert sum(window) <= 100

    @promise("G11")
    async def test_a_task_that_costs_more_than_the_limit_runs_alone(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many(
            [a_task("a", limits=_units(4, 1)), a_task("huge", limits=_units(4, 9))]
        )
        await storage.enqueue(a_task("b", limits=_units(4, 1)))
        (a,) = await storage.reserve(10)
        assert a.id == "a"
        await _succeed(storage, a)
        (huge,) = await storage.reserve(10)
        assert huge.id == "huge"
        assert await storage.reserve(10) == []
        await _succeed(storage, huge)

        assert ids(await storage.reserve(10)) == ["b"]

    @promise("G11")
    async def test_a_start_that_costs_more_than_the_rate_has_its_span_alone(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("huge", limits=_tokens(5, 12)))
        await storage.enqueue(a_task("b", limits=_tokens(5, 1)))

        assert ids(await storage.reserve(10)) == ["huge"]
        clock.advance(9.9)
        assert await storage.reserve(10) == []
        clock.advance(0.1)
        assert ids(await storage.reserve(10)) == ["b"]

    @promise("G11")
    async def test_a_rate_of_many_units_is_exact_although_its_log_is_short(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many(
            [a_task(f"t{n:04}", limits=_tokens(2_000, 1, per=60.0)) for n in range(2_300)]
        )
        count = 0
        for _ in range(30):
            count += len(await storage.reserve(100))
            clock.advance(1)

        assert count == 2_000
        starts = (await storage.gates())["rate:k"].starts
        assert len(starts) <= 1_001

    @promise("G11", "L4")
    async def test_units_are_free_again_when_their_owner_dies(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        lost = await open_another()
        await storage.enqueue_many([a_task(task_id, limits=_units(4, 3)) for task_id in "ab"])
        assert ids(await lost.reserve(5)) == ["a"]
        assert await storage.reserve(5) == []
        clock.advance(LEASE)
        watcher = await open_another()
        await watcher.give_back_abandoned()

        assert len(await watcher.reserve(5)) == 1
        assert await watcher.reserve(5) == []

    @promise("G11")
    async def test_many_claims_at_the_same_time_take_no_more_units_than_there_are(
        self, open_another: OpenAnother
    ) -> None:
        owners = [await open_another() for _ in range(4)]
        await owners[0].enqueue_many(
            [a_task(f"t{n}", limits=_units(7, 1 + n % 3)) for n in range(12)]
        )
        claims = await asyncio.gather(*(owner.reserve(1) for owner in owners * 4))

        assert 6 <= sum(_cost(task) for claim in claims for task in claim) <= 7

    @promise("G11", "G5")
    async def test_a_task_enters_all_of_its_limits_or_none(self, storage: BaseStorage) -> None:
        x, y = Limit(key="x", max_running=4, cost=2), Limit(key="y", max_running=4, cost=3)
        await storage.enqueue(a_task("holds-y", limits=(y,)))
        holds_y = await claim_one(storage)
        await storage.enqueue(a_task("both", limits=(x, y)))
        assert await storage.reserve(5) == []
        await storage.enqueue_many([a_task("x1", limits=(x,)), a_task("x2", limits=(x,))])

        x1, x2 = await storage.reserve(5)
        await _succeed(storage, holds_y, x1)
        (both,) = await storage.reserve(5)
        assert both.id == "both"
        await _succeed(storage, both, x2)
        assert await storage.gates() == {}

    @promise("G11", "G8")
    async def test_units_leave_with_every_kind_of_outcome(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", limits=_units(3, 3)))
        await storage.enqueue(a_task("b", limits=_units(3, 3), priority=-1))
        a = await claim_one(storage)
        later = clock.now() + timedelta(hours=1)
        assert await storage.record([Retried("a", a.token, an_error(), later)]) == [True]

        b = await claim_one(storage)
        assert b.id == "b"
        await _succeed(storage, b)
        assert await storage.gates() == {}

    @promise("G11")
    async def test_bad_costs_are_refused(self, storage: BaseStorage) -> None:
        for cost in (0, -1, True, 1.5, "1"):
            limit = Limit(key="k", max_running=3, cost=cost)  # type: ignore[arg-type]
            with pytest.raises(InvalidTask):
                await storage.enqueue(a_task(limits=(limit,)))
        twice = (Limit(key="k", max_running=3), Limit(key="k", max_running=4))
        with pytest.raises(InvalidTask):
            await storage.enqueue(a_task(limits=twice))

        assert await storage.list_tasks() == []

    # What is passed in line

    @promise("G15")
    async def test_small_tasks_do_not_pass_one_that_needs_more_units_for_ever(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many([a_task(f"r{n}", limits=_units(4, 1)) for n in range(4)])
        running = await storage.reserve(4)
        await storage.enqueue(a_task("dear", limits=_units(4, 4)))
        passed = 0
        for number in range(12):
            await storage.enqueue(a_task(f"s{number:02}", limits=_units(4, 1)))
            if running:
                await _succeed(storage, running.pop(0))
            claimed = await storage.reserve(10)
            if "dear" in ids(claimed):
                break
            passed += len(claimed)
            running += claimed
            clock.advance(3)

        assert ids(claimed) == ["dear"]
        assert passed == 0

    @promise("G15")
    async def test_room_stays_saved_between_claims_that_are_seldom(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many([a_task(f"r{n}", limits=_units(3, 1)) for n in range(3)])
        running = await storage.reserve(3)
        await storage.enqueue(a_task("dear", limits=_units(3, 3)))
        await storage.enqueue(a_task("small", limits=_units(3, 1)))
        for task in running:
            assert await storage.reserve(5) == []
            clock.advance(4 * SAVED_SECONDS)
            await _succeed(storage, task)

        assert ids(await storage.reserve(5)) == ["dear"]

    @promise("G15", "G7")
    async def test_a_task_that_no_claim_wants_keeps_others_out_for_ten_seconds_at_most(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many([a_task("r1", limits=_units(4, 2)), _slow("dear", 4)])
        assert ids(await storage.reserve(5)) == ["r1"]
        await storage.enqueue(a_task("small", limits=_units(4, 1)))
        assert await storage.reserve(5) == []
        await storage.pause_queue("slow")
        assert await storage.reserve(5) == []
        clock.advance(SAVED_SECONDS)

        assert ids(await storage.reserve(5)) == ["small"]

    @promise("G15", "G7")
    async def test_when_the_task_that_room_is_saved_for_ends_others_take_it(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many(
            [a_task("r1", limits=_units(4, 2)), a_task("dear", limits=_units(4, 4))]
        )
        await storage.enqueue_many([a_task("s1", limits=_units(4, 1))])
        assert ids(await storage.reserve(5)) == ["r1"]
        await storage.cancel("dear")

        assert ids(await storage.reserve(5)) == ["s1"]

    @promise("G15", "G7")
    async def test_no_room_is_saved_for_a_task_that_another_limit_blocks(
        self, storage: BaseStorage
    ) -> None:
        x, y = Limit(key="x", max_running=5, cost=3), Limit(key="y", max_running=1)
        small = Limit(key="x", max_running=5, cost=1)
        await storage.enqueue_many([a_task(each, limits=(small,)) for each in ("r", "s", "u")])
        await storage.enqueue(a_task("holds-y", limits=(y,)))
        running = {task.id: task for task in await storage.reserve(5)}
        await storage.enqueue(a_task("dear", limits=(x, y)))
        await storage.enqueue(a_task("t", limits=(Limit(key="x", max_running=5, cost=2),)))
        assert await storage.reserve(5) == []
        await _succeed(storage, running["r"], running["s"])

        (t,) = await storage.reserve(5)
        assert t.id == "t"
        await _succeed(storage, t, running["holds-y"])
        assert ids(await storage.reserve(5)) == ["dear"]

    @promise("G15")
    async def test_a_task_of_higher_priority_may_pass(self, storage: BaseStorage) -> None:
        await storage.enqueue_many(
            [a_task("r1", limits=_units(4, 2)), a_task("dear", limits=_units(4, 4))]
        )
        assert ids(await storage.reserve(5)) == ["r1"]
        await storage.enqueue(a_task("urgent", limits=_units(4, 1), priority=5))

        assert ids(await storage.reserve(5)) == ["urgent"]

    @promise("G15")
    async def test_a_rate_saves_its_units_too(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        for number in range(10):
            await storage.enqueue(a_task(f"r{number}", limits=_tokens(10, 1)))
            assert len(await storage.reserve(5)) == 1
            clock.advance(1)
        await storage.enqueue(a_task("dear", limits=_tokens(10, 8)))
        started = clock.micros()
        while True:
            await storage.enqueue(a_task(limits=_tokens(10, 1)))
            if "dear" in ids(await storage.reserve(5)):
                break
            clock.advance(0.5)
            assert clock.micros() - started < 11_000_000

    # Changes while the fleet runs

    @promise("G10")
    async def test_a_raised_limit_admits_tasks_that_wait_already(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        other = await open_another()
        await storage.enqueue_many(some_tasks("abcdef", limits=(Limit(key="k", max_running=1),)))
        assert ids(await storage.reserve(10)) == ["a"]
        await other.set_limit("k", max_running=3)
        assert ids(await storage.reserve(10)) == ["b", "c"]
        assert await other.reserve(10) == []
        await other.set_limit("k", max_running=5)

        assert ids(await other.reserve(1)) == ["d"]

    @promise("G10")
    async def test_a_lowered_limit_admits_nothing_until_enough_have_left(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many(some_tasks("abcdef", limits=(Limit(key="k", max_running=3),)))
        running = await storage.reserve(10)
        await storage.set_limit("k", max_running=1)
        for task in running[:2]:
            await _succeed(storage, task)
            assert await storage.reserve(10) == []
        await _succeed(storage, running[2])

        assert ids(await storage.reserve(10)) == ["d"]
        assert await storage.reserve(10) == []

    @promise("G10")
    async def test_a_limit_that_is_reset_admits_what_its_tasks_say(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many(some_tasks("abcdef", limits=(Limit(key="k", max_running=2),)))
        await storage.set_limit("k", max_running=1)
        assert ids(await storage.reserve(10)) == ["a"]
        await storage.reset_limit("k")

        claimed = await storage.reserve(10)
        assert ids(claimed) == ["b"]

    @promise("G10")
    async def test_a_change_stays_while_nothing_uses_the_limit(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.set_limit("k", max_running=1, rate=(2, 10.0))
        limits = (Limit(key="k", max_running=9), Limit(key="k", rate=9, per=1.0))
        for _ in range(3):
            await storage.enqueue_many([a_task(limits=limits) for _ in range(3)])
            (first,) = await storage.reserve(10)
            await _succeed(storage, first)
            (second,) = await storage.reserve(10)
            await _succeed(storage, second)
            assert await storage.reserve(10) == []
            clock.advance(1_000)
            (third,) = await storage.reserve(10)
            await _succeed(storage, third)
            clock.advance(1_000)
            assert await storage.reserve(10) == []
            state = (await storage.gates())["running:k"]
            assert (state.holders, state.starts) == ([], [])

        await storage.reset_limit("k")
        assert await storage.gates() == {}

    @promise("G10", "G3")
    async def test_a_changed_rate_counts_the_starts_that_were_made_before(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        limits = (Limit(key="k", rate=5, per=10.0),)
        await storage.enqueue_many([a_task(f"t{n:02}", limits=limits) for n in range(20)])
        assert len(await storage.reserve(3)) == 3
        await storage.set_limit("k", rate=(4, 10.0))
        assert len(await storage.reserve(10)) == 1
        clock.advance(5)
        await storage.set_limit("k", rate=(2, 10.0))
        assert await storage.reserve(10) == []
        clock.advance(5)

        assert len(await storage.reserve(10)) == 2
        assert await storage.reserve(10) == []

    @promise("G10")
    async def test_bad_numbers_of_limits_are_refused(self, storage: BaseStorage) -> None:
        with pytest.raises(InvalidValue):
            await storage.set_limit("k")
        with pytest.raises(InvalidValue):
            await storage.set_limit("k", max_running=0)
        with pytest.raises(InvalidValue):
            await storage.set_limit("k", rate=(1, float("nan")))
        with pytest.raises(InvalidValue):
            await storage.set_limit("", max_running=1)

        assert await storage.gates() == {}

    @promise("G14")
    async def test_nothing_enters_a_limit_that_is_held_until_it_is_released(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        other = await open_another()
        await storage.enqueue_many(some_tasks("abcd", limits=(Limit(key="k", max_running=2),)))
        a = (await storage.reserve(1))[0]
        await other.hold_limit("k", reason="the API is down")
        assert await storage.reserve(10) == []
        await _succeed(storage, a)
        assert await storage.reserve(10) == []
        special = (await storage.gates())["running:k"].special
        assert special is not None
        assert special.reason == "the API is down"
        await other.release_limit("k")

        assert ids(await storage.reserve(10)) == ["b", "c"]

    @promise("G14")
    async def test_a_limit_that_is_held_until_an_instant_admits_tasks_from_then_on(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.hold_limit("k", until=clock.now() + timedelta(seconds=60))
        limits = (Limit(key="k", max_running=2), Limit(key="k", rate=9, per=1.0))
        await storage.enqueue_many(some_tasks("abc", limits=limits))
        await storage.enqueue(a_task("plain"))
        assert ids(await storage.reserve(10)) == ["plain"]
        clock.advance(59.999)
        assert await storage.reserve(10) == []
        clock.advance(0.001)

        claimed = await storage.reserve(10)
        assert ids(claimed) == ["a", "b"]
        await _succeed(storage, *claimed)
        assert ids(await storage.reserve(10)) == ["c"]

    @promise("G14", "G8")
    async def test_a_hold_that_has_ended_leaves_nothing_behind(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.hold_limit("k", until=clock.now() + timedelta(seconds=60))
        clock.advance(60)
        assert await storage.reserve(1) == []
        assert await storage.gates() == {}
        await storage.hold_limit("k")
        await storage.release_limit("k")
        await storage.release_limit("never-used")

        assert await storage.gates() == {}

    # Pauses

    @promise("G12")
    async def test_no_task_of_a_paused_function_is_claimed_and_no_other_waits_for_that(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        other = await open_another()
        await storage.enqueue(a_task("a", func_path="shop.mail.send"))
        running = await claim_one(storage)
        await other.pause_function("shop.mail.send", reason="wrong text")
        await storage.enqueue_many(
            [
                a_task("b", func_path="shop.mail.send", queue="fast", priority=9),
                a_task("c", func_path="shop.mail.send_all"),
                a_task("d", func_path="shop.mail.send", limits=_units(3, 1)),
            ]
        )

        assert ids(await storage.reserve(10)) == ["c"]
        assert ids(await other.reserve(10, queues=["fast"])) == []
        await _succeed(storage, running)
        (pause,) = await storage.pauses()
        assert (pause.function, pause.reason, pause.until) == ("shop.mail.send", "wrong text", None)
        assert await storage.paused_queues() == frozenset()
        await other.resume_function("shop.mail.send")
        assert ids(await storage.reserve(10)) == ["b", "d"]
        with pytest.raises(InvalidValue):
            await storage.pause_function("not a path")

    @promise("G12", "G7")
    async def test_a_task_of_a_paused_function_keeps_no_other_out_of_its_limit(
        self, storage: BaseStorage
    ) -> None:
        limits = (Limit(key="k", max_running=1),)
        await storage.enqueue(a_task("first", limits=limits))
        running = await claim_one(storage)
        await storage.enqueue(a_task("slow", func_path="shop.slow", limits=limits))
        await storage.enqueue(a_task("b", limits=limits))
        assert await storage.reserve(3) == []
        await storage.pause_function("shop.slow")
        await _succeed(storage, running)

        assert ids(await storage.reserve(3)) == ["b"]

    @promise("G13")
    async def test_a_pause_ends_at_its_time_and_not_before(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", queue="mail"))
        await storage.enqueue(a_task("b", func_path="shop.send"))
        until = clock.now() + timedelta(seconds=60)
        await storage.pause_queue("mail", until=until, reason="deploy")
        await storage.pause_function("shop.send", until=until)
        await storage.pause_queue("other")
        clock.advance(59.999)
        assert await storage.resume_due() == 0
        assert await storage.reserve(5) == []
        pauses = {pause.name: pause for pause in await storage.pauses()}
        assert (pauses["mail"].until, pauses["mail"].reason) == (until, "deploy")
        clock.advance(0.001)

        assert await storage.resume_due() == 2
        assert ids(await storage.reserve(5)) == ["a", "b"]
        assert await storage.paused_queues() == {"other"}

    @promise("G13")
    async def test_a_pause_without_an_end_replaces_one_that_has_one(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.pause_queue("mail", until=clock.now() + timedelta(seconds=1))
        await storage.pause_queue("mail")
        clock.advance(10)

        assert await storage.resume_due() == 0
        assert await storage.paused_queues() == {"mail"}
