"""Outcomes that the store does not take. They are found one by one, and do not hold up the others.

An outcome is dropped only when the store has recorded it or has refused it as stale. So when a call that
records a batch fails, the batch is sent again. If renewals of the lease succeed meanwhile, the store is
reachable, and one of the outcomes may be the reason: they are then recorded one by one. What is refused
alone waits here, and is tried again after each renewal. When it is refused twice, and others are recorded
in between, something else is recorded in its place:

    the outcome, then the failure `unrecordable` with the store's words, then a release

A task that runs at most once is not released: it ends as a dead letter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from omniq.clock import Clock
from omniq.errors import LeaseLost, OmniqError, StorageError
from omniq.models import Task, TaskError
from omniq.outcomes import Failed, Outcome, Released
from omniq.storage.base import BaseStorage
from omniq.storage.claim_register import Claim
from omniq.worker.interruption import interruption
from omniq.worker.stats_recorder import StatsRecorder

_RENEWALS = 2
"""After that many renewals the store is reachable: the first one may have been under way before."""

_REFUSALS = 2
_WORDS = 200
"""Of what the store says, in an error that it has to take."""


class _Refusal(msgspec.Struct):
    """How often an outcome was refused alone, and how many others had been recorded at the first time.

    `replaced` is the outcome of the run, if another one is now recorded in its place.
    """

    outcome: Outcome
    task: Task | None
    replaced: Outcome | None = None
    times: int = 0
    recorded_before: int = 0


class RefusedOutcomes:
    """Finds and holds the outcomes that the store of one pool refuses."""

    def __init__(
        self,
        storage: BaseStorage,
        stats: StatsRecorder,
        report: Callable[[str, Exception], None],
        on_lease_lost: Callable[[LeaseLost], None],
    ) -> None:
        self._storage = storage
        self._clock: Clock = storage.clock
        self._stats = stats
        self._report = report
        self._on_lease_lost = on_lease_lost
        self._renewals = 0
        self._recorded = 0
        self._failed: dict[Claim, int] = {}
        self._refusals: dict[Claim, _Refusal] = {}
        self._is_due = False

    @property
    def waiting(self) -> list[Outcome]:
        """The outcomes that were refused alone."""
        return [refusal.outcome for refusal in self._refusals.values()]

    @property
    def are_due(self) -> bool:
        """Whether to try the waiting ones again: the store has answered since the last time."""
        return self._is_due and bool(self._refusals)

    def on_renewal(self) -> None:
        """The lease was renewed, so the store is reachable."""
        self._renewals += 1
        self._is_due = True

    def clear(self) -> None:
        """Forget everything: the lease was lost, and other workers have the tasks."""
        self._failed.clear()
        self._refusals.clear()

    def on_recorded(self, outcomes: Sequence[Outcome]) -> None:
        """The store has answered for these outcomes."""
        self._recorded += len(outcomes)
        if self._failed:
            for outcome in outcomes:
                self._failed.pop(_claim(outcome), None)

    def may_be_the_reason(self, outcomes: Sequence[Outcome], error: Exception) -> bool:
        """Whether a call that recorded these outcomes may have failed because of one of them."""
        if not outcomes:
            return False
        first = [self._failed.setdefault(_claim(each), self._renewals) for each in outcomes]
        return _was_not_sent(error) or min(first) + _RENEWALS <= self._renewals

    async def record_singly(self, outcomes: list[Outcome]) -> None:
        """Record them one by one until one is refused, which then waits here. The rest stays in the list."""
        while outcomes:
            outcome = outcomes[0]
            try:
                await self._record(outcome)
            except Exception as error:
                task = self._storage.register.task(outcome.task_id)
                self._refusals[_claim(outcome)] = refusal = _Refusal(outcome, task)
                self._note(refusal, error)
                del outcomes[0]
                return
            del outcomes[0]

    async def try_again(self) -> None:
        """Record the waiting ones, each alone."""
        self._is_due = False
        for claim, refusal in list(self._refusals.items()):
            try:
                await self._record(refusal.outcome, refusal.replaced)
            except Exception as error:
                self._note(refusal, error)
            else:
                self._refusals.pop(claim, None)

    async def _record(self, outcome: Outcome, replaced: Outcome | None = None) -> None:
        """Record it; in place of `replaced`, unless only the replies to that were lost."""
        try:
            if replaced is not None and (answer := await self._answer_to(replaced)) is not None:
                outcome, recorded = replaced, [answer]
            else:
                recorded = await self._storage.record([outcome])
        except LeaseLost as lost:
            # No refusal of this outcome: all claims have gone with the lease.
            self._on_lease_lost(lost)
            recorded = [False]
        self._stats.recorded([outcome], recorded)
        self.on_recorded([outcome])

    async def _answer_to(self, outcome: Outcome) -> bool | None:
        """Whether the outcome is recorded; None while its claim is current, so that it is not."""
        task = await self._storage.get_task(outcome.task_id)
        if task is None or task.token != outcome.token:
            # Nothing is stored of a task with `result_ttl=0` that has ended.
            return task is None
        return None if task.owner == self._storage.owner else True

    def _note(self, refusal: _Refusal, error: Exception) -> None:
        outcome = refusal.outcome
        self._report(f"record task {outcome.task_id}", error)
        refusal.times += 1
        if refusal.times == 1:
            refusal.recorded_before = self._recorded
        is_certain = refusal.times >= _REFUSALS and self._recorded > refusal.recorded_before
        if _was_not_sent(error) or is_certain:
            refusal.replaced = refusal.replaced or outcome
            replacing = self._in_place_of(outcome, refusal.task, error)
            if refusal.task is not None:
                replacing = self._stats.with_hook(replacing, refusal.task.func_path)
            refusal.outcome = replacing
            refusal.times = 0
            self._is_due = True

    def _in_place_of(self, outcome: Outcome, task: Task | None, error: Exception) -> Outcome:
        claim = outcome.task_id, outcome.token
        record = TaskError.from_exception(error, timestamp=self._clock.now())
        if not isinstance(outcome, Failed | Released) or (
            isinstance(outcome, Failed) and outcome.reason not in ("unrecordable", "crashed")
        ):
            return Failed(*claim, record, "unrecordable")
        if task is None or task.token != outcome.token:
            return Released(*claim)
        why = f"its outcome could not be recorded ({record.message[:_WORDS]})"
        return interruption(task, why, self._clock.now())


def _was_not_sent(error: Exception) -> bool:
    """Whether the outcome was refused before the store was asked: another try changes nothing."""
    return isinstance(error, OmniqError) and not isinstance(error, StorageError)


def _claim(outcome: Outcome) -> Claim:
    return (outcome.task_id, outcome.token)
