"""A pool's turns at the storage: record what finished, claim into what is free, wait for more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from omniq import events
from omniq.errors import LeaseLost, StorageError, StorageRefused
from omniq.events import Dispatcher
from omniq.models import Task, TaskError
from omniq.outcomes import Failed, Outcome, Released
from omniq.storage.base import BaseStorage
from omniq.storage.types import Renewal
from omniq.worker.pool_stats import Tally
from omniq.worker.running_tasks import Runs

_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.05, 5.0
_LONGEST_BACKOFF_AT_STOP = 0.25

_LISTEN_AGAIN = 1.0
_AT_ONCE = 0.001
_EMPTY_HINTS, _EMPTY_HINT_PAUSE = 3, 0.02
"""So many hints one right after the other that led to nothing are followed by a short rest."""

_MANY_SLOTS = 16

_COUNT_PAUSE, _COUNT_SHARE = 0.01, 50
"""Counting the queue takes at most one part in so many of the time."""


class _Turn:
    """A call that is under way: how many it claims, the slots that it may need, how many hints had
    been heard when it began, and the tasks that were cancelled since.
    """

    def __init__(self, claims: int, slots: int, hints: int) -> None:
        self.claims = claims
        self.slots = slots
        self.hints = hints
        self.cancelled: list[str] = []


class Turns:
    """Takes one turn after the other, for as long as there is something to do or to wait for.

    `stop_asked` ends it, once nothing runs any more; setting `wake` has it look again. While
    `is_recycling`, nothing more is claimed. Everything here happens on the pool's event loop.
    """

    def __init__(
        self,
        storage: BaseStorage,
        runs: Runs,
        tally: Tally,
        dispatcher: Dispatcher,
        *,
        concurrency: int,
        poll_interval: float,
        queues: tuple[str, ...] | None,
        wake: asyncio.Event,
        stop_asked: asyncio.Future[None],
        is_recycling: Callable[[], bool],
    ) -> None:
        self._storage = storage
        self._clock = storage.clock
        self._runs = runs
        self._tally = tally
        self._events = dispatcher
        self._concurrency = concurrency
        # A server works on one turn while this process or the network is busy with the other.
        self._lanes = 2 if storage.capabilities.reach == "fleet" else 1
        is_shared = self._lanes > 1 and concurrency >= _MANY_SLOTS
        self._portion = -(-concurrency // self._lanes) if is_shared else concurrency
        self._poll_interval = poll_interval
        self._queues = queues
        self._wake = wake
        self._stop_asked = stop_asked
        self._is_recycling = is_recycling
        self._may_claim = True
        self._is_asked = True
        self._is_plenty = False
        self._hints = 0
        self._claim_made = asyncio.Event()
        self._uncounted = asyncio.Event()
        self._asked_at = -poll_interval
        self._last_claimed = 0
        self._failures = 0
        self._drained: asyncio.Future[None] | None = None
        self._unknown: dict[str, int] = {}
        self._given_up: set[str] = set()
        self._under_way: set[_Turn] = set()
        self._under_way_at_renewal: set[_Turn] = set()
        self._is_paused = False

    async def run(self) -> None:
        """Take turns until the pool is to stop and nothing is left to record."""
        if self._lanes == 1:
            await self._take_turns()
            return
        lanes = [asyncio.ensure_future(self._take_turns()) for _ in range(self._lanes)]
        try:
            await asyncio.gather(*lanes)
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.wait(lanes)

    async def _take_turns(self) -> None:
        """Take one turn after the other. Several of these share the work as it comes."""
        runs = self._runs
        while True:
            self._wake.clear()
            drained = self._drained
            # One who took all that finished would leave nothing to do for the others meanwhile.
            outcomes = runs.take_finished(self._portion)
            free = self._free_slots()
            claimed = await self._turn(outcomes, free) if outcomes or free else None
            if not (runs.active or runs.finished or self._under_way):
                if self._stop_asked.done():
                    # The others may be waiting for the end of this very turn.
                    self._wake.set()
                    return
                if drained is not None and not drained.done():
                    if (free and claimed == 0) or self._is_recycling():
                        drained.set_result(None)
                        self._drained = None
                    elif claimed is not None:
                        continue
            # Not only when woken: it may have been another who was, when there was no slot free.
            if runs.finished or (self._may_claim and self._free_slots()):
                continue
            # Whoever asked for a last claim meanwhile may have woken one who had no slot for it.
            if self._drained is drained:
                await self._wake.wait()

    def until_drained(self) -> asyncio.Future[None]:
        """Done when nothing is due and nothing runs, seen by a claim made after this call."""
        if self._drained is None:
            self._drained = asyncio.get_running_loop().create_future()
            self._wake.set()
        return self._drained

    async def hand_back(self) -> None:
        """What could be neither finished nor recorded is given back, if the storage listens."""
        self._runs.give_up_all("shutdown")
        outcomes = self._runs.finished
        if outcomes:
            self._tally.recorded(outcomes, await self._storage.record(outcomes))
            self._runs.take_finished()

    async def retire(self) -> None:
        """Leave the list of workers, and what could not be handed back to whoever is on it."""
        own = self._given_up.union(outcome.task_id for outcome in self._runs.finished)
        # Another pool on the same storage object is the same owner: what it runs stays with it.
        if self._storage.claims.keys() <= own:
            await self._storage.retire()

    def _free_slots(self) -> int:
        """How many tasks to ask for: none while the last answer, that there are none, holds."""
        if self._stop_asked.done() or self._is_recycling() or self._is_paused:
            return 0
        if self._runs.frees_others:
            # What has just finished kept others waiting, at a limit or as a suspect.
            self._runs.frees_others = False
            self._expect_work()
        if not self._may_claim and self._drained is None:
            return 0
        if not self._is_plenty and any(turn.claims for turn in self._under_way):
            # Its answer says whether there is more.
            return 0
        # A turn under way has what it records or what it claims, whichever is more.
        taken = len(self._runs.active) + sum(turn.slots for turn in self._under_way)
        return max(0, min(self._concurrency - taken, self._portion))

    def _expect_work(self) -> None:
        """Claim again, also when a claim that is under way comes back with too little: it may have
        come before whatever makes us think so.
        """
        self._may_claim = self._is_asked = True
        self._hints += 1

    async def _turn(self, outcomes: list[Outcome], limit: int) -> int | None:
        """Record what finished and claim into the free slots, in one step; how many were claimed.

        None when that failed.
        """
        if limit:
            # A hint that comes from here on asks for another claim.
            self._is_asked = False
            self._claim_made.set()
        turn = _Turn(limit, max(limit, len(outcomes)), self._hints)
        try:
            recorded, claimed = await self._call(turn, outcomes)
        except LeaseLost:
            await self._after_loss(outcomes)
            return None
        except asyncio.CancelledError:
            # Out of time. Whether they were recorded is not known; recording them again does no harm.
            self._runs.put_back(outcomes)
            raise
        except Exception as error:
            await self._after_failure(outcomes, error)
            return None
        self._failures = 0
        self._tally.recorded(outcomes, recorded)
        if limit:
            self._after_claim(turn, claimed, limit)
        return len(claimed)

    async def _call(self, turn: _Turn, outcomes: list[Outcome]) -> tuple[list[bool], list[Task]]:
        self._under_way.add(turn)
        try:
            return await self._storage.record_and_reserve(
                outcomes, turn.claims, queues=self._queues
            )
        finally:
            self._under_way.discard(turn)

    def _after_claim(self, turn: _Turn, claimed: Sequence[Task], limit: int) -> None:
        self._is_plenty = len(claimed) == limit
        self._is_asked = self._is_asked or self._is_plenty
        if not self._is_plenty and turn.hints == self._hints:
            # Nothing more is due, until a hint or the next poll says so.
            self._may_claim = False
        self._asked_at = self._clock.monotonic()
        self._last_claimed = len(claimed)
        if not claimed:
            self._uncounted.set()
            if self._events.wants(events.PollEmpty):
                self._events.emit(events.PollEmpty(owner=self._storage.owner))
            return
        self._tally.claimed(claimed)
        if self._storage.lease_remaining <= 0:
            # The claim took longer than the lease it was made under: others may have the tasks.
            self._runs.put_back([Released(task.id, task.token) for task in claimed])
            return
        start = self._runs.start
        for task in claimed:
            start(task)
        for task_id in turn.cancelled:
            self._runs.cancel(task_id)
        # After the tasks, which would have to wait for it otherwise.
        self._uncounted.set()

    # When the storage does not do as it should

    async def _after_loss(self, outcomes: list[Outcome]) -> None:
        # What had finished was given back with the rest; another worker runs it again.
        self._tally.lost(outcomes)
        self.on_loss()
        if self._failures:
            # Lost again under its fresh id: not to be asked for without end.
            await self._back_off()
        self._failures += 1

    async def _after_failure(self, outcomes: list[Outcome], error: Exception) -> None:
        self._tell_failure("turn", error)
        if not self._storage.is_open or isinstance(error, StorageRefused):
            # Closed under the pool, or the server turns us away for good: nobody to turn to.
            self._tally.lost(outcomes)
            raise error
        if self._stop_asked.done() and self._storage.lease_remaining <= 0:
            # Nobody may wait longer for a storage that is away: others have the tasks by now.
            self._tally.lost(outcomes)
            self._given_up.update(outcome.task_id for outcome in outcomes)
        elif isinstance(error, StorageError):
            self._runs.put_back(outcomes)
        else:
            with suppress(StorageError):
                await self._record_singly(outcomes)
        await self._back_off()

    async def _record_singly(self, outcomes: list[Outcome]) -> None:
        """Find the outcome that cannot be recorded, so that it holds up no others."""
        while outcomes:
            outcome = outcomes[0]
            try:
                self._tally.recorded([outcome], await self._storage.record([outcome]))
            except (StorageError, asyncio.CancelledError):
                self._runs.put_back(outcomes)
                raise
            except Exception as error:
                self._tell_failure(f"record task {outcome.task_id}", error)
                await self._record_failure(outcome, error)
            del outcomes[0]

    async def _record_failure(self, outcome: Outcome, error: Exception) -> None:
        record = TaskError.from_exception(error, timestamp=self._clock.now())
        failed = Failed(outcome.task_id, outcome.token, record, "unrecordable")
        try:
            self._tally.recorded([failed], await self._storage.record([failed]))
        except Exception as second:
            # The claim stays with this worker, and is given back when it ends.
            self._tell_failure(f"record task {outcome.task_id}", second)
            self._given_up.add(outcome.task_id)

    async def _back_off(self) -> None:
        """Wait a little, longer each time; to be asked to stop cuts it short."""
        self._failures += 1
        longest = min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2 ** min(self._failures, 10))
        pause = longest * (0.5 + self._clock.random() / 2)
        if self._stop_asked.done():
            await self._clock.sleep(min(pause, _LONGEST_BACKOFF_AT_STOP))
        else:
            await self._clock.wait(self._stop_asked, pause)
        self._expect_work()
        self._wake.set()

    def _tell_failure(self, chore: str, error: Exception) -> None:
        self._events.emit(events.ChoreFailed.of(chore, error))

    # Side loops

    async def listen(self) -> None:
        """Let the next turn claim when there may be work, and a poll interval after an empty claim."""
        pause, empty_hints = self._poll_interval, 0
        while True:
            began = self._clock.monotonic()
            try:
                await self._storage.wait_for_work(pause)
            except StorageError as error:
                # Nobody listens meanwhile, so the claim that follows must not wait for a hint.
                self._tell_failure("listen", error)
                await self._clock.sleep(min(self._poll_interval, _LISTEN_AGAIN))
            now = self._clock.monotonic()
            early = self._asked_at + self._poll_interval - now
            if now - began >= pause and early > 0:
                # No hint, and another claim came back empty since the wait began.
                pause = early
                continue
            pause = self._poll_interval
            is_idle_hint = now - began < _AT_ONCE and not self._last_claimed
            empty_hints = empty_hints + 1 if is_idle_hint else 0
            if empty_hints > _EMPTY_HINTS:
                await self._clock.sleep(_EMPTY_HINT_PAUSE)
            await self._ask_for_claim()

    async def _ask_for_claim(self) -> None:
        was_asked = self._is_asked
        self._expect_work()
        self._wake.set()
        if was_asked:
            # Not heeded yet, since all slots are busy. Claimed once more afterwards: what was
            # hinted at meanwhile must not be lost, and a storage that has due work and says so at
            # once, again and again, must not keep this loop spinning.
            self._claim_made.clear()
            await self._claim_made.wait()
            self._expect_work()
            self._wake.set()

    async def count_queue(self) -> None:
        """Keep count of what waits, as of the last claim, at a small part of the storage's time."""
        while True:
            await self._uncounted.wait()
            self._uncounted.clear()
            began = self._clock.monotonic()
            self._tally.queued = await self._storage.count_waiting()
            took = self._clock.monotonic() - began
            await self._clock.sleep(max(_COUNT_PAUSE, took * _COUNT_SHARE))

    # Leases and cancellation

    def on_loss(self) -> None:
        """The lease is gone, and what was held has been given back: stop running it."""
        self._events.emit(events.LeaseLoss(owner=self._storage.owner))
        self._runs.stop_all("lease")
        # Whoever was paused is no more: this worker has a fresh id.
        self._is_paused = False
        self._expect_work()
        self._wake.set()

    def on_cancel(self, task_id: str) -> None:
        """Somebody cancelled that task; it may be ours, or be on its way to us."""
        self._runs.cancel(task_id)
        for turn in self._under_way:
            turn.cancelled.append(task_id)

    def on_renewal(self, renewal: Renewal) -> None:
        """Stop what was cancelled; give back what the storage says is ours and nobody here knows.

        Claim nothing more, or claim again, as an operator wants it.
        """
        if self._is_paused and not renewal.paused:
            self._expect_work()
            self._wake.set()
        self._is_paused = renewal.paused
        for task_id in renewal.cancelled:
            self._runs.cancel(task_id)
        known = self._storage.claims
        unknown = {
            task_id: token for task_id, token in renewal.held.items() if known.get(task_id) != token
        }
        # Only what was unknown the last time too, and not while a turn of then still waits for its
        # reply: that may be the very claim.
        is_same_turn = bool(self._under_way & self._under_way_at_renewal)
        self._under_way_at_renewal = set(self._under_way)
        lost = [Released(*claim) for claim in unknown.items() if claim in self._unknown.items()]
        if lost and not is_same_turn:
            self._runs.put_back([*lost])
            self._wake.set()
        self._unknown = unknown
