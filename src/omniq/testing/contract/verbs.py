"""The eight single-task verbs: what each does, and that it equals its batch verb."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from omniq.errors import InvalidTask, StaleClaim
from omniq.models import Task, TaskStatus
from omniq.outcomes import Failed, Rescheduled, Retried, Succeeded
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
    status_of,
)


async def _stored_state(storage: BaseStorage, task_id: str) -> dict[str, Any]:
    """Return what the storage has stored about a task, without its id."""
    task = await storage.get_task(task_id)
    result = await storage.get_result(task_id)
    dead_letter = await storage.get_dead(task_id)
    return {
        "task": task and msgspec.structs.replace(task, id="x", created_at=task.eta),
        "result": result and msgspec.structs.replace(result, task_id="x"),
        "dead_letter": dead_letter and msgspec.structs.replace(dead_letter, task_id="x"),
        "history": await storage.history(task_id),
        "held": task_id in await storage.held_by(storage.owner),
    }


class VerbContract(ContractPart):
    """M1 to M5."""

    async def test_dequeue_equals_reserve_of_one_task(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many(some_tasks("ab"))
        one = await storage.dequeue(clock.now())
        (other,) = await storage.reserve(1, clock.now())

        assert one is not None
        assert (one.id, other.id) == ("a", "b")
        assert msgspec.structs.replace(one, id="b", created_at=other.created_at) == other
        assert await storage.dequeue(clock.now()) is None

    async def test_dequeue_returns_at_most_one_task_that_is_due(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        now = clock.now()
        await storage.enqueue(a_task("late", eta=now + timedelta(seconds=1)))
        await storage.enqueue(a_task("due", eta=now))
        first = await storage.dequeue(now)

        assert first is not None
        assert first.id == "due"
        assert await storage.dequeue(now) is None

    async def test_dequeue_returns_the_earliest_eta_first_and_equal_etas_in_order_of_enqueue(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        now = clock.now()
        for task_id, age in [("c", 1), ("d", 1), ("a", 9), ("e", 1), ("b", 5)]:
            await storage.enqueue(a_task(task_id, eta=now - timedelta(seconds=age)))
        order = [await storage.dequeue(now) for _ in range(5)]

        assert [task.id for task in order if task is not None] == ["a", "b", "c", "d", "e"]

    async def test_mark_done_equals_recording_a_success(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        a, b = await _claim_two(storage)
        clock.advance(1)
        await storage.mark_done("a", a_result(a, "value"))
        complete = a_result(
            b, "value", attempts=1, started_at=b.started_at, finished_at=clock.now()
        )
        await storage.record([Succeeded("b", b.token, complete)])

        assert await _stored_state(storage, "a") == await _stored_state(storage, "b")

    async def test_mark_failed_without_a_retry_equals_recording_a_failure(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        _, b = await _claim_two(storage)
        clock.advance(1)
        await storage.mark_failed("a", an_error(), will_retry=False)
        await storage.record([Failed("b", b.token, an_error(timestamp=clock.now()))])

        assert await _stored_state(storage, "a") == await _stored_state(storage, "b")

    async def test_mark_failed_with_a_retry_equals_recording_a_held_retry(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        _, b = await _claim_two(storage)
        await storage.mark_failed("a", an_error(), will_retry=True)
        await storage.record([Retried("b", b.token, an_error(timestamp=clock.now()))])

        assert await _stored_state(storage, "a") == await _stored_state(storage, "b")

    async def test_mark_failed_and_reschedule_equal_recording_a_retry_in_one_step(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        _, b = await _claim_two(storage)
        eta = clock.now() + timedelta(seconds=7)
        await storage.mark_failed("a", an_error(), will_retry=True)
        await storage.reschedule("a", eta)
        await storage.record([Retried("b", b.token, an_error(timestamp=clock.now()), eta)])

        assert await _stored_state(storage, "a") == await _stored_state(storage, "b")
        assert ids(await storage.reserve(5, eta)) == ["a", "b"]

    async def test_reschedule_equals_recording_a_reschedule(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        _, b = await _claim_two(storage)
        eta = clock.now() + timedelta(seconds=7)
        await storage.reschedule("a", eta)
        await storage.record([Rescheduled("b", b.token, eta)])

        assert await _stored_state(storage, "a") == await _stored_state(storage, "b")
        assert await status_of(storage, "a") is TaskStatus.PENDING

    async def test_a_retry_and_a_success_of_one_claim_in_one_step_are_both_recorded(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        claimed = await claim_one(storage)
        failure = Retried("a", claimed.token, an_error(timestamp=clock.now()))
        success = Succeeded("a", claimed.token, a_result(claimed))

        assert await storage.record([failure, success]) == [True, True]
        task = await storage.get_task("a")
        assert task is not None
        assert (task.status, task.attempts) == (TaskStatus.SUCCESS, 1)

    @promise("M1")
    async def test_mark_running_changes_nothing(self, storage: BaseStorage) -> None:
        await storage.enqueue(a_task("a"))
        claimed = await claim_one(storage)
        await storage.mark_running("a")

        assert await storage.get_task("a") == claimed

    @promise("M1")
    async def test_every_verb_is_refused_to_an_object_without_the_claim(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await storage.enqueue_many(some_tasks("ab"))
        task = await claim_one(storage)

        for task_id in ("a", "b", "unknown"):
            with pytest.raises(StaleClaim):
                await other.mark_running(task_id)
            with pytest.raises(StaleClaim):
                await other.mark_done(task_id, a_result(task))
            with pytest.raises(StaleClaim):
                await other.mark_failed(task_id, an_error(), will_retry=True)
            with pytest.raises(StaleClaim):
                await other.mark_failed(task_id, an_error(), will_retry=False)
            with pytest.raises(StaleClaim):
                await other.reschedule(task_id, clock.now())
        assert await storage.get_task("a") == task

    @promise("M1")
    async def test_a_claim_that_was_given_back_is_refused(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        clock.advance(LEASE)
        await other.give_back_abandoned()

        with pytest.raises(StaleClaim) as refused:
            await storage.mark_done("a", a_result(task))
        assert (refused.value.task_id, refused.value.token) == ("a", 1)
        assert await status_of(storage, "a") is TaskStatus.RETRYING

    @promise("M1")
    async def test_a_finished_claim_cannot_be_finished_again(self, storage: BaseStorage) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        await storage.mark_done("a", a_result(task, "first"))

        with pytest.raises(StaleClaim):
            await storage.mark_done("a", a_result(task, "second"))
        with pytest.raises(StaleClaim):
            await storage.mark_failed("a", an_error(), will_retry=False)
        result = await storage.get_result("a")
        assert result is not None
        assert result.result == "first"

    async def test_mark_done_accepts_only_a_successful_result_of_the_same_task(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)

        with pytest.raises(InvalidTask):
            await storage.mark_done("a", a_result(a_task("b")))
        failed = msgspec.structs.replace(a_result(task), status=TaskStatus.FAILED)
        with pytest.raises(InvalidTask):
            await storage.mark_done("a", failed)
        assert await status_of(storage, "a") is TaskStatus.RUNNING

    @promise("M2")
    async def test_a_repeating_task_is_pending_again_with_no_attempts(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", interval=60))
        task = await claim_one(storage)
        await storage.record([Retried("a", task.token, an_error(), clock.now())])
        task = await claim_one(storage)
        assert task.attempts == 1
        await storage.mark_done("a", a_result(task, 1))

        waiting = await storage.get_task("a")
        assert waiting is not None
        assert (waiting.status, waiting.attempts) == (TaskStatus.PENDING, 0)
        assert waiting.eta == clock.now() + timedelta(seconds=60)
        assert await storage.history("a") == []
        assert await storage.reserve(1) == []
        clock.advance(60)
        assert (await claim_one(storage)).token == 3

    @promise("M2")
    async def test_a_cron_task_is_pending_again_at_its_next_cron_time(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", cron="30 12 * * *", tz="UTC"))
        await storage.mark_done("a", a_result(await claim_one(storage)))
        waiting = await storage.get_task("a")

        assert waiting is not None
        assert waiting.eta == clock.now().replace(hour=12, minute=30)

    @promise("M2")
    async def test_the_newest_result_of_a_repeating_task_stays_available(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", interval=60))
        seen = []
        for number in (1, 2):
            task = await claim_one(storage)
            await storage.mark_done("a", a_result(task, number))
            result = await storage.get_result("a")
            seen.append(result and result.result)
            clock.advance(60)
        task = await claim_one(storage)
        while_running = await storage.get_result("a")
        await storage.mark_failed("a", an_error(), will_retry=False)
        afterwards = await storage.get_result("a")

        assert seen == [1, 2]
        assert while_running is not None
        assert while_running.result == 2
        assert afterwards is not None
        assert afterwards.status is TaskStatus.FAILED

    @promise("M3", "C5")
    async def test_a_failure_to_be_retried_is_held_until_it_is_rescheduled(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        await storage.reserve(1)
        await storage.mark_failed("a", an_error("no luck"), will_retry=True)
        clock.advance(LEASE / 2)

        held = await storage.get_task("a")
        assert held is not None
        assert (held.status, held.attempts, held.owner) == (TaskStatus.RETRYING, 1, storage.owner)
        assert await storage.dequeue(clock.now() + timedelta(days=1)) is None
        await storage.reschedule("a", clock.now() + timedelta(seconds=5))
        assert await storage.dequeue(clock.now()) is None
        task = await storage.dequeue(clock.now() + timedelta(seconds=5))
        assert task is not None
        assert (task.id, task.attempts, task.token) == ("a", 1, 2)

    @promise("M3", "R4")
    async def test_marking_a_failure_twice_charges_it_once(self, storage: BaseStorage) -> None:
        await storage.enqueue(a_task("a"))
        await storage.reserve(1)
        await storage.mark_failed("a", an_error(), will_retry=True)
        await storage.mark_failed("a", an_error(), will_retry=True)
        await storage.mark_failed("a", an_error(), will_retry=False)

        result = await storage.get_result("a")
        assert result is not None
        assert (result.status, result.attempts) == (TaskStatus.FAILED, 1)
        assert len(await storage.history("a")) == 1

    @promise("M4")
    async def test_the_error_of_a_final_failure_is_stored(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        await storage.reserve(1)
        error = an_error("no such user", traceback="Traceback …", category="permanent")
        await storage.mark_failed("a", error, will_retry=False)

        result = await storage.get_result("a")
        assert result is not None
        assert result.status is TaskStatus.FAILED
        assert result.error is not None
        assert result.error.to_record() == {**error.to_record(), "timestamp": clock.now()}
        assert await storage.reserve(1, clock.now() + timedelta(days=1)) == []

    @promise("M5")
    async def test_a_repeating_task_can_be_rescheduled_after_it_was_done(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", interval=60))
        await storage.mark_done("a", a_result(await claim_one(storage), "kept"))
        await storage.reschedule("a", clock.now() + timedelta(seconds=5))

        clock.advance(5)
        result = await storage.get_result("a")
        assert result is not None
        assert result.result == "kept"
        assert ids(await storage.reserve(1)) == ["a"]

    @promise("M5")
    async def test_a_repeating_task_can_be_postponed_after_it_was_done(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", interval=60))
        await storage.mark_done("a", a_result(await claim_one(storage)))
        await storage.reschedule("a", clock.now() + timedelta(seconds=100))

        clock.advance(60)
        assert await storage.reserve(1) == []
        clock.advance(40)
        assert ids(await storage.reserve(1)) == ["a"]

    @promise("M5", "R2")
    async def test_a_repeating_task_that_another_owner_has_claimed_is_not_rescheduled(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await storage.enqueue(a_task("a", interval=5))
        await storage.mark_done("a", a_result(await claim_one(storage)))
        clock.advance(5)
        claimed = await claim_one(other)

        with pytest.raises(StaleClaim):
            await storage.reschedule("a", clock.now())
        assert await storage.get_task("a") == claimed

    @promise("M5")
    async def test_a_finished_task_is_not_rescheduled(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        await storage.mark_done("a", a_result(await claim_one(storage)))

        with pytest.raises(StaleClaim):
            await storage.reschedule("a", clock.now())
        assert await status_of(storage, "a") is TaskStatus.SUCCESS


async def _claim_two(storage: BaseStorage) -> tuple[Task, Task]:
    await storage.enqueue_many(some_tasks("ab"))
    a, b = await storage.reserve(2)
    return a, b
