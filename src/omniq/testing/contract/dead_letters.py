"""Dead letters: stored until they are retried or deleted, and retried in one step."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import msgspec
import pytest

from omniq.errors import DuplicateTask, InvalidTask, InvalidValue, QueueFull
from omniq.models import TaskStatus
from omniq.outcomes import Failed, Released, Retried, Succeeded
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
    visible_state,
)
from omniq.testing.contract.claim import UNDECODABLE_ARGS, FailingSerializer

_MICROSECOND = timedelta(microseconds=1)


async def _make_dead_letter(storage: BaseStorage, task_id: str, reason: str = "exhausted") -> None:
    """Claim the next task, which must have this id, and record its final failure."""
    task = await claim_one(storage)
    assert task.id == task_id
    await storage.record([Failed(task_id, task.token, an_error(), reason)])


class DeadLetterContract(ContractPart):
    """D1 to D5."""

    @promise("D1")
    async def test_a_retried_dead_letter_is_the_same_task_without_attempts_or_history(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", args=(1,), attempts=2, queue="mail"))
        await _make_dead_letter(storage, "a")
        clock.advance(5)

        assert await storage.retry_dead("a")
        task = await storage.get_task("a")
        assert task is not None
        assert (task.status, task.attempts, task.crashes) == (TaskStatus.PENDING, 0, 0)
        assert (task.eta, task.owner, task.args) == (clock.now(), None, (1,))
        assert await storage.get_dead("a") is None
        assert await storage.get_result("a") is None
        assert await storage.history("a") == []
        assert ids(await storage.reserve(1, queues=["mail"])) == ["a"]

    @promise("D5")
    async def test_a_dead_letter_with_another_call_or_from_the_start_is_another_occurrence(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("a"))
        await _make_dead_letter(storage, "a")
        await storage.retry_dead("a")
        retried = await claim_one(storage)
        await storage.record([Failed("a", retried.token, an_error(), "exhausted")])
        await storage.retry_dead("a", from_start=True)
        restarted = await claim_one(storage)
        await storage.record([Failed("a", restarted.token, an_error(), "exhausted")])
        await storage.retry_dead("a", task=msgspec.structs.replace(a_task("a"), args=(2,)))
        edited = await claim_one(storage)

        assert retried.occurrence == 0
        assert 0 < restarted.occurrence < edited.occurrence

    @promise("D1")
    async def test_a_retried_dead_letter_is_counted_as_waiting(self, storage: BaseStorage) -> None:
        await storage.enqueue(a_task("a"))
        await _make_dead_letter(storage, "a")
        await storage.retry_dead("a")
        stats = await storage.stats()

        assert (stats.dead, stats.by_status[TaskStatus.PENDING]) == (0, 1)
        assert stats.by_status[TaskStatus.FAILED] == 0

    @promise("D1")
    async def test_a_dead_letter_is_retried_after_its_result_was_purged(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", args=("kept",)))
        await _make_dead_letter(storage, "a")
        await storage.purge_results(clock.now() + _MICROSECOND)

        assert await storage.retry_dead("a")
        assert (await claim_one(storage)).args == ("kept",)

    @promise("D1")
    async def test_a_task_may_become_a_dead_letter_and_be_retried_repeatedly(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("a"))
        for _ in range(3):
            await _make_dead_letter(storage, "a")
            assert await storage.retry_dead("a")
        task = await claim_one(storage)
        await storage.record([Succeeded("a", task.token, a_result(task))])

        assert task.token == 4
        assert await status_of(storage, "a") is TaskStatus.SUCCESS
        assert await storage.list_dead() == []

    @promise("D1")
    async def test_a_dead_letter_is_retried_with_other_arguments(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("a", args=(1,), kwargs={"k": 1}))
        await _make_dead_letter(storage, "a")
        edited = a_task("a", args=(2,), kwargs={"k": 2})

        assert await storage.retry_dead("a", task=edited)
        task = await claim_one(storage)
        assert (task.args, task.kwargs, task.token) == ((2,), {"k": 2}, 2)
        assert not await storage.retry_dead("a", task=edited)

    @promise("D1", "C9")
    async def test_an_undecodable_task_is_retried_with_arguments_that_can_be_decoded(
        self, open_another: OpenAnother
    ) -> None:
        storage = await open_another(serializer=FailingSerializer())
        await storage.enqueue(a_task("a", args=UNDECODABLE_ARGS))
        await storage.reserve(1)

        assert await storage.retry_dead("a", task=a_task("a", args=("whole",)))
        assert (await claim_one(storage)).args == ("whole",)

    @promise("D1")
    async def test_a_bad_replacement_is_refused_and_the_dead_letter_stays(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("a"))
        await _make_dead_letter(storage, "a")
        before = await visible_state(storage)

        with pytest.raises(InvalidTask, match="cannot replace task a"):
            await storage.retry_dead("a", task=a_task("b"))
        with pytest.raises(InvalidTask, match="change its arguments only"):
            await storage.retry_dead("a", task=a_task("a", func_path="tasks.other"))
        with pytest.raises(InvalidTask):
            await storage.retry_dead("a", task=a_task("a", args=(object(),)))
        with pytest.raises(InvalidTask):
            await storage.retry_dead("a", task=a_task("a", max_retries=-1))
        assert await visible_state(storage) == before

    @promise("D1")
    async def test_the_task_of_a_dead_letter_is_found_after_its_result_was_purged(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", args=("kept",)))
        assert await storage.get_dead_task("a") is None
        await _make_dead_letter(storage, "a")
        await storage.purge_results(clock.now() + _MICROSECOND)
        task = await storage.get_dead_task("a")

        assert task is not None
        assert (task.id, task.args, task.status) == ("a", ("kept",), TaskStatus.FAILED)
        await storage.delete_dead("a")
        assert await storage.get_dead_task("a") is None

    @promise("D1", "R8")
    async def test_a_retried_dead_letter_is_no_longer_cancelled(self, storage: BaseStorage) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        await storage.cancel("a")
        await storage.record([Failed("a", task.token, an_error())])
        await storage.retry_dead("a")
        task = await claim_one(storage)

        assert not task.cancel_requested
        assert (await storage.renew()).cancelled == frozenset()
        await storage.record([Released("a", task.token)])
        assert await status_of(storage, "a") is TaskStatus.PENDING

    @promise("D2")
    async def test_a_second_retry_of_a_dead_letter_returns_false(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("a"))
        await _make_dead_letter(storage, "a")

        assert [await storage.retry_dead("a"), await storage.retry_dead("a")] == [True, False]

    @promise("D2")
    async def test_one_of_many_concurrent_retries_of_a_dead_letter_returns_true(
        self, open_another: OpenAnother
    ) -> None:
        owners = [await open_another() for _ in range(4)]
        await owners[0].enqueue(a_task("a"))
        await _make_dead_letter(owners[0], "a")
        replies = await asyncio.gather(*(owner.retry_dead("a") for owner in owners * 2))

        assert replies.count(True) == 1
        assert ids(await owners[0].reserve(10)) == ["a"]

    @promise("D2")
    async def test_only_a_dead_letter_is_retried(self, storage: BaseStorage) -> None:
        await storage.enqueue(a_task("a"))

        assert not await storage.retry_dead("a")
        await storage.mark_done("a", a_result(await claim_one(storage)))
        assert not await storage.retry_dead("a")
        assert not await storage.retry_dead("unknown")
        with pytest.raises(InvalidTask):
            await storage.retry_dead("../x")

    @promise("D3", "E3")
    async def test_a_dead_letter_stays_when_its_unique_key_is_taken(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("a", unique="key"))
        await _make_dead_letter(storage, "a")
        await storage.enqueue(a_task("b", unique="key"))

        with pytest.raises(DuplicateTask) as refused:
            await storage.retry_dead("a")
        assert refused.value.task_id == "b"
        assert await storage.get_dead("a") is not None
        assert await status_of(storage, "a") is TaskStatus.FAILED
        await storage.mark_done("b", a_result(await claim_one(storage)))
        assert await storage.retry_dead("a")
        assert await storage.enqueue(a_task("c", unique="key")) == "a"

    @promise("D3", "E5")
    async def test_a_dead_letter_stays_when_the_queue_is_full(
        self, open_another: OpenAnother
    ) -> None:
        storage = await open_another(max_pending=1)
        await storage.enqueue(a_task("a"))
        await _make_dead_letter(storage, "a")
        await storage.enqueue(a_task("b"))

        with pytest.raises(QueueFull):
            await storage.retry_dead("a")
        assert await storage.get_dead("a") is not None
        await storage.reserve(1)
        assert await storage.retry_dead("a")

    @promise("D4")
    async def test_a_deleted_dead_letter_is_gone_and_its_result_stays(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        await _make_dead_letter(storage, "a")

        assert await storage.delete_dead("a")
        assert not await storage.delete_dead("a")
        assert await storage.get_dead("a") is None
        assert await status_of(storage, "a") is TaskStatus.FAILED
        with pytest.raises(DuplicateTask):
            await storage.enqueue(a_task("a"))
        await storage.purge_results(clock.now() + _MICROSECOND)
        assert await storage.enqueue(a_task("a")) == "a"

    async def test_a_purge_deletes_dead_letters_whose_last_failure_was_before_the_instant(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many(some_tasks("ab"))
        await _make_dead_letter(storage, "a")
        clock.advance(5)
        await _make_dead_letter(storage, "b")

        assert await storage.purge_dead(clock.now() - timedelta(seconds=5)) == 0
        assert await storage.purge_dead(clock.now()) == 1
        assert [dead_letter.task_id for dead_letter in await storage.list_dead()] == ["b"]

    async def test_dead_letters_are_listed_in_pages_by_function_and_by_reason(
        self, storage: BaseStorage
    ) -> None:
        for number in range(12):
            task_id = f"t{number:02}"
            await storage.enqueue(a_task(task_id, func_path=f"tasks.f{number % 2}"))
            await _make_dead_letter(storage, task_id, reason=f"reason {number % 3}")
        every_id = [dead_letter.task_id for dead_letter in await storage.list_dead()]
        first = await storage.list_dead(limit=5)
        rest = await storage.list_dead(after=first[-1].task_id)
        filtered = await storage.list_dead(func_path="tasks.f1", reason="reason 2")

        assert every_id == [f"t{number:02}" for number in range(12)]
        assert [dead_letter.task_id for dead_letter in [*first, *rest]] == every_id
        assert [dead_letter.task_id for dead_letter in filtered] == ["t05", "t11"]
        assert await storage.list_dead(limit=0) == []
        with pytest.raises(InvalidValue):
            await storage.list_dead(limit=-1)

    async def test_dead_letters_are_listed_by_the_time_of_their_last_failure(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        began = clock.now()
        for number in range(6):
            await storage.enqueue(a_task(f"t{number}"))
            await _make_dead_letter(storage, f"t{number}")
            clock.advance(10)
        at = [began + timedelta(seconds=10 * number) for number in range(6)]
        later = await storage.list_dead(since=at[2])
        earlier = await storage.list_dead(until=at[2])
        between = await storage.list_dead(since=at[1], until=at[5], limit=2)
        rest = await storage.list_dead(since=at[1], until=at[5], after=between[-1].task_id)

        assert [dead_letter.task_id for dead_letter in later] == ["t2", "t3", "t4", "t5"]
        assert [dead_letter.task_id for dead_letter in earlier] == ["t0", "t1"]
        assert [dead_letter.task_id for dead_letter in between] == ["t1", "t2"]
        assert [dead_letter.task_id for dead_letter in rest] == ["t3", "t4"]
        with pytest.raises(InvalidValue):
            await storage.list_dead(since=clock.now().replace(tzinfo=None))

    @promise("Q6", "T4")
    @pytest.mark.parametrize("result_ttl", [0, 60])
    async def test_a_dead_letter_keeps_its_history_when_its_result_is_gone(
        self, storage: BaseStorage, clock: ManualClock, result_ttl: float
    ) -> None:
        await storage.enqueue(a_task("a", result_ttl=result_ttl))
        task = await claim_one(storage)
        first = an_error("first", traceback="first traceback")
        await storage.record([Retried("a", task.token, first, clock.now())])
        await _make_dead_letter(storage, "a")
        clock.advance(61)
        await storage.purge_expired()
        history = await storage.history("a")

        assert await storage.get_task("a") is None
        assert [attempt.number for attempt in history] == [1, 2]
        assert history[0].error == first
        await storage.delete_dead("a")
        assert await storage.history("a") == []

    @promise("R2")
    async def test_a_late_outcome_is_refused_after_the_dead_letter_was_retried(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        late = await open_another()
        await storage.enqueue(a_task("a"))
        task = await claim_one(late)
        clock.advance(LEASE)
        await storage.give_back_abandoned(max_crashes=1)
        await storage.retry_dead("a")

        assert await late.record([Succeeded("a", task.token, a_result(task))]) == [False]
        assert await status_of(storage, "a") is TaskStatus.PENDING
