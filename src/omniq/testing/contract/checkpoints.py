"""Checkpoints: the data that a task resumes from is stored as long as the task may resume."""

from __future__ import annotations

from datetime import timedelta

import pytest

from omniq.errors import SerializationError, StaleClaim
from omniq.models import TaskStatus
from omniq.outcomes import Failed
from omniq.settings import Settings
from omniq.storage.base import BaseStorage
from omniq.testing.builders import (
    RELEASING_KINDS,
    OutcomeKind,
    a_result,
    a_task,
    an_error,
    an_outcome,
)
from omniq.testing.clock import ManualClock
from omniq.testing.contract._suite import (
    LEASE,
    ContractPart,
    OpenAnother,
    claim_one,
    promise,
    status_of,
)


async def _claim_with_checkpoint(storage: BaseStorage, **fields: object) -> None:
    await storage.enqueue(a_task("a", **fields))
    task = await claim_one(storage)
    await storage.save_checkpoint("a", task.token, b"\0step 3\xff")


class CheckpointContract(ContractPart):
    """K1 to K4."""

    @promise("K1")
    async def test_the_current_claim_saves_checkpoints_and_the_newest_is_stored(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        reader = await open_another()
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)

        assert await reader.load_checkpoint("a") is None
        for checkpoint in (b"one", b"", b"\0two"):
            await storage.save_checkpoint("a", task.token, checkpoint)
            assert await reader.load_checkpoint("a") == checkpoint

    @promise("K1")
    async def test_another_claim_may_not_save_a_checkpoint(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await _claim_with_checkpoint(storage)

        for token in (0, 2):
            with pytest.raises(StaleClaim):
                await storage.save_checkpoint("a", token, b"bad")
        with pytest.raises(StaleClaim):
            await other.save_checkpoint("a", 1, b"bad")
        with pytest.raises(StaleClaim):
            await storage.save_checkpoint("unknown", 1, b"bad")
        clock.advance(LEASE)
        await other.give_back_abandoned()
        with pytest.raises(StaleClaim):
            await storage.save_checkpoint("a", 1, b"bad")
        assert await storage.load_checkpoint("a") == b"\0step 3\xff"

    @promise("K2")
    @pytest.mark.parametrize("kind", [*RELEASING_KINDS, "held"])
    async def test_a_checkpoint_survives_every_outcome_after_which_the_task_runs_again(
        self, storage: BaseStorage, clock: ManualClock, kind: OutcomeKind
    ) -> None:
        await _claim_with_checkpoint(storage)
        task = await storage.get_task("a")
        assert task is not None
        await storage.record([an_outcome(kind, task, clock.now())])

        assert await storage.load_checkpoint("a") == b"\0step 3\xff"

    @promise("K2")
    async def test_a_checkpoint_survives_the_loss_of_its_owner(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await _claim_with_checkpoint(storage)
        clock.advance(LEASE)
        await other.give_back_abandoned()
        task = await claim_one(other)

        assert await other.load_checkpoint("a") == b"\0step 3\xff"
        await other.save_checkpoint("a", task.token, b"step 4")
        assert await other.load_checkpoint("a") == b"step 4"

    @promise("K2")
    @pytest.mark.parametrize("kind", ["succeeded", "cancelled"])
    async def test_a_checkpoint_is_deleted_when_the_task_succeeds_or_is_cancelled(
        self, storage: BaseStorage, clock: ManualClock, kind: OutcomeKind
    ) -> None:
        await _claim_with_checkpoint(storage)
        task = await storage.get_task("a")
        assert task is not None
        await storage.record([an_outcome(kind, task, clock.now())])

        assert await storage.load_checkpoint("a") is None

    @promise("K2")
    async def test_a_checkpoint_is_deleted_when_a_run_of_a_repeating_task_succeeds(
        self, storage: BaseStorage
    ) -> None:
        await _claim_with_checkpoint(storage, interval=60)
        task = await storage.get_task("a")
        assert task is not None
        await storage.mark_done("a", a_result(task))

        assert await storage.load_checkpoint("a") is None

    @promise("K3")
    async def test_a_checkpoint_stays_with_a_dead_letter_and_is_loaded_after_its_retry(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await _claim_with_checkpoint(storage)
        await storage.record([Failed("a", 1, an_error())])
        await storage.purge_results(clock.now() + timedelta(days=1))
        dead_letter = await storage.get_dead("a")

        assert dead_letter is not None
        assert dead_letter.checkpoint == b"\0step 3\xff"
        await storage.retry_dead("a")
        assert await storage.load_checkpoint("a") == b"\0step 3\xff"

    @promise("K3")
    async def test_a_dead_letter_retried_from_the_start_has_no_checkpoint(
        self, storage: BaseStorage
    ) -> None:
        await _claim_with_checkpoint(storage)
        await storage.record([Failed("a", 1, an_error())])
        await storage.retry_dead("a", from_start=True)

        assert await storage.load_checkpoint("a") is None

    @promise("K3", "D4")
    async def test_a_checkpoint_is_deleted_with_its_dead_letter(self, storage: BaseStorage) -> None:
        await _claim_with_checkpoint(storage)
        await storage.record([Failed("a", 1, an_error())])
        await storage.delete_dead("a")

        assert await storage.load_checkpoint("a") is None

    @promise("K4")
    async def test_a_purge_keeps_checkpoints_of_live_tasks_and_dead_letters(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await _claim_with_checkpoint(storage)
        await storage.enqueue(a_task("b"))
        task = await claim_one(storage)
        await storage.save_checkpoint("b", task.token, b"b")
        await storage.record([Failed("b", task.token, an_error())])
        clock.advance(timedelta(days=400))

        assert await storage.purge_checkpoints(clock.now()) == 0
        assert await storage.load_checkpoint("a") == b"\0step 3\xff"
        assert await storage.load_checkpoint("b") == b"b"

    @promise("K1")
    async def test_a_checkpoint_over_the_payload_limit_is_refused(
        self, open_another: OpenAnother
    ) -> None:
        storage = await open_another(settings=Settings(max_payload=1000))
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        await storage.save_checkpoint("a", task.token, b"x" * 1000)

        with pytest.raises(SerializationError, match="more than max_payload 1000"):
            await storage.save_checkpoint("a", task.token, b"x" * 1001)
        assert await storage.load_checkpoint("a") == b"x" * 1000
        assert await status_of(storage, "a") is TaskStatus.RUNNING
