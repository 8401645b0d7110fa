"""Progress: the newest report of a running task, accepted only from its current claim."""

from __future__ import annotations

import pytest

from omniq.models import Progress
from omniq.storage.base import BaseStorage
from omniq.testing.builders import FINAL_KINDS, OutcomeKind, a_task, an_outcome, some_tasks
from omniq.testing.clock import ManualClock
from omniq.testing.contract._suite import LEASE, ContractPart, OpenAnother, claim_one, promise


class ProgressContract(ContractPart):
    """P1 to P3."""

    @promise("P1", "P3")
    async def test_the_newest_progress_report_is_stored(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        reader = await open_another()
        await storage.enqueue_many(some_tasks("ab"))
        await storage.reserve(2)
        half = Progress(task_id="a", token=1, fraction=0.5, message="half ✓")
        done = Progress(task_id="b", token=1, fraction=1.0)
        await storage.report_progress([Progress(task_id="a", token=1, fraction=0.1), half, done])

        assert await reader.get_progress("a") == half
        assert await reader.progress_of(["a", "b", "unknown"]) == {"a": half, "b": done}
        assert await reader.get_progress("b") == done
        assert await reader.get_progress("unknown") is None

    @promise("P1")
    async def test_a_progress_report_of_another_claim_is_dropped(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await storage.enqueue(a_task("a"))
        await storage.reserve(1)
        report = Progress(task_id="a", token=1, fraction=0.5)
        await other.report_progress([report])
        await storage.report_progress([Progress(task_id="a", token=2, fraction=0.5)])
        await storage.report_progress([Progress(task_id="unknown", token=1, fraction=0.5)])
        assert await storage.get_progress("a") is None
        clock.advance(LEASE)
        await other.give_back_abandoned()
        await storage.report_progress([report])

        assert await storage.get_progress("a") is None

    @promise("P2")
    @pytest.mark.parametrize("kind", FINAL_KINDS)
    async def test_progress_is_deleted_when_the_task_ends(
        self, storage: BaseStorage, clock: ManualClock, kind: OutcomeKind
    ) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        await storage.report_progress([Progress(task_id="a", token=1, fraction=0.5)])
        await storage.record([an_outcome(kind, task, clock.now())])

        assert await storage.get_progress("a") is None

    async def test_an_empty_progress_report_has_no_effect(self, storage: BaseStorage) -> None:
        await storage.report_progress([])
