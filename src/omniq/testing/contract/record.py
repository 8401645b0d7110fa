"""Record: an outcome changes its task once, and only while its claim is the current one."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest

from omniq.errors import InvalidTask
from omniq.models import BreakerRule, Limit, Task, TaskStatus
from omniq.outcomes import (
    Cancelled,
    Failed,
    Outcome,
    Released,
    Retried,
    Snoozed,
    Succeeded,
)
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
    status_of,
    visible_state,
)

ALL_KINDS: tuple[OutcomeKind, ...] = (*FINAL_KINDS, *RELEASING_KINDS, "held")

AFTERWARDS: dict[OutcomeKind, TaskStatus] = {
    "succeeded": TaskStatus.SUCCESS,
    "failed": TaskStatus.FAILED,
    "cancelled": TaskStatus.CANCELLED,
    "retried": TaskStatus.RETRYING,
    "held": TaskStatus.RETRYING,
    "rescheduled": TaskStatus.PENDING,
    "snoozed": TaskStatus.PENDING,
    "released": TaskStatus.PENDING,
}


class RecordContract(ContractPart):
    """R1 to R13."""

    @promise("R1")
    @pytest.mark.parametrize("kind", ALL_KINDS)
    async def test_an_outcome_sets_the_next_status_of_the_task(
        self, storage: BaseStorage, clock: ManualClock, kind: OutcomeKind
    ) -> None:
        await storage.enqueue(a_task("a"))
        recorded = await storage.record([an_outcome(kind, await claim_one(storage), clock.now())])

        assert recorded == [True]
        assert await status_of(storage, "a") is AFTERWARDS[kind]
        is_held = await storage.held_by(storage.owner) != {}
        assert is_held == (kind == "held")

    @promise("R1", "R2")
    async def test_each_outcome_of_a_batch_is_recorded_or_refused_separately(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many(some_tasks("abc"))
        a, b, c = await storage.reserve(3)
        later = clock.now() + timedelta(seconds=60)
        recorded = await storage.record(
            [
                Succeeded("a", a.token, a_result(a)),
                Failed("b", b.token + 1, an_error()),
                Succeeded("unknown", 1, a_result(a)),
                Retried("c", c.token, an_error(), later),
            ]
        )

        assert recorded == [True, False, False, True]
        assert await status_of(storage, "a") is TaskStatus.SUCCESS
        assert await status_of(storage, "b") is TaskStatus.RUNNING
        assert await status_of(storage, "c") is TaskStatus.RETRYING

    async def test_recording_no_outcomes_has_no_effect(self, storage: BaseStorage) -> None:
        assert await storage.record([]) == []

    @promise("R2", "L6")
    @pytest.mark.parametrize("kind", ALL_KINDS)
    async def test_a_late_outcome_is_refused_after_its_task_was_given_back(
        self,
        storage: BaseStorage,
        open_another: OpenAnother,
        clock: ManualClock,
        kind: OutcomeKind,
    ) -> None:
        late = await open_another()
        await storage.enqueue(a_task("a"))
        task = await claim_one(late)
        clock.advance(LEASE)
        await storage.give_back_abandoned()
        before = await visible_state(storage)

        assert await late.record([an_outcome(kind, task, clock.now())]) == [False]
        assert await visible_state(storage) == before

    @promise("R2")
    @pytest.mark.parametrize("kind", ALL_KINDS)
    async def test_a_late_outcome_is_refused_after_another_claim(
        self,
        storage: BaseStorage,
        open_another: OpenAnother,
        clock: ManualClock,
        kind: OutcomeKind,
    ) -> None:
        late = await open_another()
        await storage.enqueue(a_task("a"))
        task = await claim_one(late)
        clock.advance(LEASE)
        await storage.give_back_abandoned()
        current = await claim_one(storage)
        before = await visible_state(storage)

        assert await late.record([an_outcome(kind, task, clock.now())]) == [False]
        assert await late.record([an_outcome(kind, current, clock.now())]) == [False]
        assert await visible_state(storage) == before

    @promise("R2")
    async def test_a_late_outcome_is_refused_after_another_owner_has_finished_the_task(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        late = await open_another()
        await storage.enqueue(a_task("a"))
        task = await claim_one(late)
        clock.advance(LEASE)
        await storage.give_back_abandoned()
        current = await claim_one(storage)
        await storage.record([Succeeded("a", current.token, a_result(current, "second"))])

        assert await late.record([Succeeded("a", task.token, a_result(task, "first"))]) == [False]
        result = await storage.get_result("a")
        assert result is not None
        assert result.result == "second"

    @promise("R2")
    async def test_an_outcome_of_an_earlier_claim_of_the_same_owner_is_refused(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        first = await claim_one(storage)
        await storage.record([Released("a", first.token)])
        second = await claim_one(storage)

        assert await storage.record([Succeeded("a", first.token, a_result(first))]) == [False]
        assert await storage.get_task("a") == second

    @promise("R3")
    @pytest.mark.parametrize("kind", ALL_KINDS)
    async def test_a_repeated_outcome_returns_true_and_changes_nothing(
        self, storage: BaseStorage, clock: ManualClock, kind: OutcomeKind
    ) -> None:
        await storage.enqueue(
            a_task(
                "a",
                limits=(Limit(key="k", max_running=1),),
                breakers=(BreakerRule(name="b", max_failures=2),),
            )
        )
        task = await claim_one(storage)
        await storage.save_checkpoint("a", task.token, b"half way")
        outcome = an_outcome(kind, task, clock.now() + timedelta(seconds=5))
        await storage.record([outcome])
        before = await visible_state(storage)
        clock.advance(1)

        assert await storage.record([outcome]) == [True]
        assert await visible_state(storage) == before

    @promise("R3")
    async def test_a_repeated_success_of_a_repeating_task_changes_nothing(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", interval=60))
        task = await claim_one(storage)
        outcome = Succeeded("a", task.token, a_result(task, 1), clock.now() + timedelta(seconds=60))
        await storage.record([outcome])
        before = await visible_state(storage)

        assert await storage.record([outcome]) == [True]
        assert await visible_state(storage) == before

    @promise("R13")
    async def test_only_the_next_occurrence_of_a_repeating_task_has_a_higher_number(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", interval=60, max_crashes=5))
        numbers: list[list[int]] = []
        for _ in range(3):
            numbers.append([])
            for kind in RELEASING_KINDS:
                task = await claim_one(storage)
                numbers[-1].append(task.occurrence)
                await storage.record([an_outcome(kind, task, clock.now())])
            task = await claim_one(storage)
            numbers[-1].append(task.occurrence)
            await storage.record([Succeeded("a", task.token, a_result(task, 1), clock.now())])

        firsts = [occurrence[0] for occurrence in numbers]
        assert numbers == [[first] * (len(RELEASING_KINDS) + 1) for first in firsts]
        assert firsts == sorted(set(firsts))
        assert firsts[0] == 0

    @promise("R3")
    async def test_a_repeat_within_one_batch_counts_once(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        outcome = Retried("a", task.token, an_error(), clock.now())

        assert await storage.record([outcome, outcome]) == [True, True]
        assert (await claim_one(storage)).attempts == 1

    @promise("R11")
    async def test_a_failed_run_ended_when_it_failed_and_not_when_that_was_recorded(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many(some_tasks("abc"))
        a, b, c = await storage.reserve(3)
        clock.advance(2)
        failed_at = clock.now()
        clock.advance(3)
        early, late = failed_at - timedelta(days=1), failed_at + timedelta(days=1)
        await storage.record(
            [
                Failed("a", a.token, an_error(timestamp=failed_at)),
                Retried("b", b.token, an_error(timestamp=late), late),
                Retried("c", c.token, an_error(timestamp=early), late),
            ]
        )

        ends = {task_id: (await storage.history(task_id))[0].finished_at for task_id in "abc"}
        assert ends == {"a": failed_at, "b": clock.now(), "c": c.started_at}
        letter, result = await storage.get_dead("a"), await storage.get_result("a")
        assert letter is not None
        assert result is not None
        assert (letter.first_failure, letter.last_failure) == (failed_at, failed_at)
        assert result.finished_at == failed_at

    @promise("R4")
    async def test_a_failed_run_is_charged_once_and_stored_in_the_history(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        started = clock.now()
        task = await claim_one(storage)
        clock.advance(2)
        error = an_error("no answer", traceback="Traceback …", category="transient")
        await storage.record([Retried("a", task.token, error, clock.now())])

        (attempt,) = await storage.history("a")
        assert (attempt.number, attempt.token, attempt.owner) == (1, 1, storage.owner)
        assert (attempt.started_at, attempt.finished_at) == (started, clock.now())
        assert (attempt.outcome, attempt.error) == ("failed", error)
        assert (await claim_one(storage)).attempts == 1

    @promise("R4", "R7")
    @pytest.mark.parametrize("kind", ["rescheduled", "snoozed", "released"])
    async def test_a_task_released_without_a_failure_is_not_charged(
        self, storage: BaseStorage, clock: ManualClock, kind: OutcomeKind
    ) -> None:
        await storage.enqueue(a_task("a", attempts=1))
        for _ in range(3):
            await storage.record([an_outcome(kind, await claim_one(storage), clock.now())])
        task = await claim_one(storage)

        assert (task.attempts, task.crashes) == (1, 0)
        assert await storage.history("a") == []

    @promise("R7")
    async def test_a_snoozed_task_is_due_again_at_its_eta(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        await storage.record([Snoozed("a", task.token, clock.now() + timedelta(seconds=9))])

        assert await status_of(storage, "a") is TaskStatus.PENDING
        assert await storage.reserve(1, clock.now() + timedelta(seconds=8)) == []
        clock.advance(9)
        assert ids(await storage.reserve(1)) == ["a"]

    @promise("R7")
    async def test_a_release_may_set_the_next_eta(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        await storage.record([Released("a", task.token, eta=clock.now() + timedelta(seconds=9))])

        assert await status_of(storage, "a") is TaskStatus.PENDING
        assert await storage.reserve(1, clock.now() + timedelta(seconds=8)) == []
        clock.advance(9)
        assert ids(await storage.reserve(1)) == ["a"]

    @promise("R7")
    async def test_a_release_for_an_unknown_function_is_counted(self, storage: BaseStorage) -> None:
        await storage.enqueue(a_task("a"))
        for _ in range(2):
            task = await claim_one(storage)
            await storage.record([Released("a", task.token, unknown_function=True)])
        task = await claim_one(storage)
        await storage.record([Released("a", task.token)])

        assert (await claim_one(storage)).releases == 2

    @promise("R5", "Q1")
    async def test_the_result_of_a_success_is_stored(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        clock.advance(1)
        result = a_result(
            task,
            {"answer": 42},
            attempts=1,
            started_at=task.started_at,
            finished_at=clock.now(),
            warnings=("step announce failed",),
        )
        await storage.record([Succeeded("a", task.token, result)])

        assert await storage.get_result("a") == result
        stored = await storage.get_task("a")
        assert stored is not None
        assert (stored.status, stored.owner, stored.token) == (TaskStatus.SUCCESS, None, 1)
        assert await storage.get_dead("a") is None

    @promise("R10")
    async def test_a_run_that_its_worker_has_interrupted_for_good_is_charged_as_a_crash(
        self, storage: BaseStorage
    ) -> None:
        rule = BreakerRule(name="api", max_failures=1)
        await storage.enqueue_many([a_task("a", breakers=(rule,)), a_task("b", breakers=(rule,))])
        task = await claim_one(storage)
        await storage.record([Failed("a", task.token, an_error("stopped"), "crashed")])

        stored = await storage.get_dead_task("a")
        assert stored is not None
        assert (stored.attempts, stored.crashes) == (0, 1)
        (attempt,) = await storage.history("a")
        assert (attempt.outcome, attempt.error) == ("crashed", an_error("stopped"))
        letter = await storage.get_dead("a")
        assert letter is not None
        assert (letter.failure_reason, letter.attempt_count) == ("crashed", 1)
        assert (await claim_one(storage)).id == "b"

    @promise("R6", "R5")
    async def test_a_final_failure_is_a_result_and_a_dead_letter(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", queue="mail"))
        task = await claim_one(storage)
        first_failure = clock.now()
        await storage.record([Retried("a", task.token, an_error("first"), clock.now())])
        clock.advance(3)
        task = await claim_one(storage)
        await storage.record([Failed("a", task.token, an_error("second"), "permanent")])

        result = await storage.get_result("a")
        assert result is not None
        assert (result.status, result.error) == (TaskStatus.FAILED, an_error("second"))
        assert (result.attempts, result.reason) == (2, "permanent")
        dead_letter = await storage.get_dead("a")
        assert dead_letter is not None
        assert (dead_letter.task_id, dead_letter.func_path, dead_letter.queue) == (
            "a",
            "tasks.work",
            "mail",
        )
        assert (dead_letter.failure_reason, dead_letter.attempt_count) == ("permanent", 2)
        assert (dead_letter.first_failure, dead_letter.last_failure) == (first_failure, clock.now())
        assert dead_letter.error_details == "ValueError: second"

    @promise("R5")
    async def test_the_reason_of_a_cancelled_run_is_stored(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        await storage.record([Cancelled("a", task.token, "nothing to do")])

        result = await storage.get_result("a")
        assert result is not None
        assert (result.status, result.reason) == (TaskStatus.CANCELLED, "nothing to do")
        assert (result.attempts, result.started_at) == (1, task.started_at)
        assert await storage.get_dead("a") is None

    @promise("R12", "R3", "R2")
    async def test_a_repeating_task_goes_on_after_a_failure_with_a_next_eta(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", interval=5, unique="key"))
        task = await claim_one(storage)
        await storage.save_checkpoint("a", task.token, b"half")
        later = clock.now() + timedelta(seconds=5)
        outcome = Failed("a", task.token, an_error("broken"), "permanent", later)
        late = Failed("a", task.token + 1, an_error("late"), "permanent", later)

        assert await storage.record([outcome, late]) == [True, False]
        assert await storage.record([outcome]) == [True]
        assert await storage.reserve(1) == []
        result = await storage.get_result("a")
        assert result is not None
        assert (result.status, result.reason, result.attempts) == (
            TaskStatus.FAILED,
            "permanent",
            1,
        )
        assert result.error == an_error("broken")
        waiting = await storage.get_task("a")
        assert waiting is not None
        assert (waiting.status, waiting.attempts, waiting.crashes, waiting.eta) == (
            TaskStatus.PENDING,
            0,
            0,
            later,
        )
        assert await storage.list_dead() == []
        assert await storage.load_checkpoint("a") is None
        assert [each.error for each in await storage.history("a")] == [an_error("broken")]
        clock.advance(5)
        again = await claim_one(storage)
        assert (again.id, again.unique, again.token) == ("a", "key", task.token + 1)
        await storage.record([Succeeded("a", again.token, a_result(again), clock.now())])
        assert await storage.history("a") == []

    @promise("R12", "R8")
    async def test_a_task_that_was_cancelled_does_not_go_on_after_a_failure(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", interval=5))
        task = await claim_one(storage)
        await storage.cancel("a")
        await storage.record([Failed("a", task.token, an_error(), "permanent", clock.now())])

        clock.advance(60)
        assert await storage.reserve(1) == []
        assert await status_of(storage, "a") is TaskStatus.CANCELLED
        assert await storage.list_dead() == []

    @promise("R12")
    async def test_a_task_that_does_not_repeat_ends_in_spite_of_a_next_eta(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        await storage.record([Failed("a", task.token, an_error(), "permanent", clock.now())])

        assert await status_of(storage, "a") is TaskStatus.FAILED
        assert [letter.task_id for letter in await storage.list_dead()] == ["a"]

    @promise("R8")
    @pytest.mark.parametrize("kind", ALL_KINDS)
    async def test_a_task_that_was_cancelled_while_it_ran_does_not_run_again(
        self, storage: BaseStorage, clock: ManualClock, kind: OutcomeKind
    ) -> None:
        await storage.enqueue(a_task("a", interval=5))
        task = await claim_one(storage)
        await storage.cancel("a")
        outcome: Outcome = an_outcome(kind, task, clock.now())
        if isinstance(outcome, Succeeded):
            outcome = msgspec.structs.replace(outcome, next_eta=clock.now())

        assert await storage.record([outcome]) == [True]
        clock.advance(60)
        assert await storage.reserve(1) == []
        expected = AFTERWARDS[kind] if kind in FINAL_KINDS else TaskStatus.CANCELLED
        assert await status_of(storage, "a") is expected
        assert await storage.held_by(storage.owner) == {}

    @promise("R9")
    async def test_recording_and_claiming_in_one_step_equals_one_after_the_other(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many([a_task("a", priority=9), a_task("b"), a_task("c")])
        task = await claim_one(storage)
        recorded, claimed = await storage.record_and_reserve(
            [Retried("a", task.token, an_error(), clock.now())], 2
        )

        assert recorded == [True]
        assert [(task.id, task.token, task.attempts) for task in claimed] == [
            ("a", 2, 1),
            ("b", 1, 0),
        ]

    @promise("R9", "G2")
    async def test_a_recorded_outcome_frees_its_limit_for_the_claim_of_the_same_step(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue_many(some_tasks("ab", limits=(Limit(key="k", max_running=1),)))
        task = await claim_one(storage)
        _, claimed = await storage.record_and_reserve(
            [Succeeded("a", task.token, a_result(task))], 5
        )

        assert ids(claimed) == ["b"]

    @promise("R9", "R2")
    async def test_a_stale_outcome_does_not_stop_the_claim(self, storage: BaseStorage) -> None:
        await storage.enqueue(a_task("a"))
        recorded, claimed = await storage.record_and_reserve([Released("gone", 3)], 1)

        assert (recorded, ids(claimed)) == ([False], ["a"])

    @promise("R1")
    async def test_a_time_without_a_time_zone_is_refused_and_nothing_is_recorded(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many(some_tasks("ab"))
        a, b = await storage.reserve(2)
        naive = clock.now().replace(tzinfo=None)
        with pytest.raises(InvalidTask, match="has no time zone"):
            await storage.record(
                [Succeeded("a", a.token, a_result(a)), Snoozed("b", b.token, naive)]
            )

        assert await _statuses(storage) == [TaskStatus.RUNNING, TaskStatus.RUNNING]

    @promise("R5")
    async def test_an_error_over_the_payload_limit_is_stored_shortened(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("a"))
        task: Task = await claim_one(storage)
        await storage.record([Failed("a", task.token, an_error("x" * 2_000_000))])

        result = await storage.get_result("a")
        assert result is not None
        assert result.error is not None
        assert (result.status, result.error.error_type) == (TaskStatus.FAILED, "ValueError")


async def _statuses(storage: BaseStorage) -> list[TaskStatus]:
    return [task.status for task in await storage.list_tasks()]
