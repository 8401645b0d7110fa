"""The loop of a pool: records what finished, claims into the free slots, backs off on errors.

When it claims, and how many tasks, is decided by `Demand`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from omniq import events
from omniq.concurrency.backoff import backoff
from omniq.errors import LeaseLost, StorageError, StorageRefused, StoreWentBack
from omniq.events import Dispatcher
from omniq.models import Task
from omniq.outcomes import Outcome, Released
from omniq.storage.base import BaseStorage
from omniq.storage.claim_register import Claim, Hand
from omniq.storage.types import Renewal
from omniq.worker.batches import OpenBatch
from omniq.worker.demand import Call, Demand, Order, most_per_call
from omniq.worker.lease_watch import LeaseWatch
from omniq.worker.pool_events import PoolEvents
from omniq.worker.problems import ProblemReports
from omniq.worker.refused_outcomes import RefusedOutcomes
from omniq.worker.running_tasks import RunningTasks
from omniq.worker.stats_recorder import StatsRecorder
from omniq.worker.unknown_functions import UnknownFunctions
from omniq.worker.waiting_counter import WaitingCounter

_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.05, 5.0
_LONGEST_BACKOFF_AT_STOP = 0.25

_LISTEN_AGAIN = 1.0
"""Seconds until the loop waits for wake-ups again after the storage failed to deliver them."""

_REPORT_PAUSE = 60.0
"""Seconds between two searches for waiting tasks that no live worker runs."""


def _concurrent_calls(storage: BaseStorage) -> int:
    """How many calls are under way: a server works on one while this process is busy with the other."""
    can = storage.capabilities
    return 2 if can.reach == "fleet" and not can.slow_writes else 1


class ClaimLoop:
    """Calls `record_and_reserve` again and again, while there is something to record or to claim.

    `stop_requested` ends it once nothing runs any more; setting `wake` makes it check again. While
    `pool.is_recycling`, it claims nothing. Everything here happens on the pool's event loop.
    """

    def __init__(
        self,
        storage: BaseStorage,
        running: RunningTasks,
        stats: StatsRecorder,
        dispatcher: Dispatcher,
        pool: PoolEvents,
        unknown: UnknownFunctions,
        watch: LeaseWatch,
        problems: ProblemReports,
        *,
        concurrency: int,
        poll_interval: float,
        queues: tuple[str, ...] | None,
        wake: asyncio.Event,
        stop_requested: asyncio.Future[None],
    ) -> None:
        self._storage, self._clock = storage, storage.clock
        self._running = running
        self._stats = stats
        self._events = dispatcher
        self._pool, self._unknown, self._watch = pool, unknown, watch
        self._problems, self._report_failure = problems, problems.report
        self._concurrent_calls = _concurrent_calls(storage)
        self._most_per_call = most_per_call(concurrency, self._concurrent_calls)
        self._poll_interval = poll_interval
        self._queues = queues
        self._wake = wake
        self._stop_requested = stop_requested
        self._demand = Demand(
            concurrency=concurrency,
            most_per_call=self._most_per_call,
            poll_interval=poll_interval,
        )
        self._claim_sent = asyncio.Event()
        self.counter = WaitingCounter(storage, stats)
        self._failures = 0
        self._drained: asyncio.Future[None] | None = None
        self._refused = RefusedOutcomes(storage, stats, problems.report_final, self.on_lease_lost)
        self._recording: dict[Call, list[Outcome]] = {}

    async def run(self) -> None:
        """Record and claim until the pool is to stop and nothing is left to record."""
        if self._concurrent_calls == 1:
            await self._record_and_claim()
            return
        loops = [
            asyncio.ensure_future(self._record_and_claim()) for _ in range(self._concurrent_calls)
        ]
        try:
            await asyncio.gather(*loops)
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.wait(loops)

    async def _record_and_claim(self) -> None:
        """Make one call after the other. Each of the concurrent loops takes what there is to do."""
        running, demand, batches = self._running, self._demand, self._running.batches
        while True:
            self._wake.clear()
            while batches.are_full:
                # Called first: a storage that answers immediately would fill all slots before.
                await self._wake.wait()
                self._wake.clear()
            drained = self._drained
            if self._refused.are_due:
                await self._refused.try_again()
            # At most a part: a call that took everything would leave nothing for the other loop.
            batch = self._batch_to_fill() if batches.are_collected else None
            free = self._claimable() if batch is None else batch.missing
            outcomes = running.take_finished(max(self._most_per_call, batches.largest))
            claimed = await self._call(outcomes, free, batch) if outcomes or free else None
            if not (running.active or running.finished or demand.in_flight):
                if self._stop_requested.done():
                    # The other loop may be waiting for the end of this very call.
                    self._wake.set()
                    return
                if drained is not None and not drained.done():
                    if (free and claimed == 0 and batch is None) or self._pool.is_recycling:
                        drained.set_result(None)
                        self._drained = None
                    elif claimed is not None:
                        continue
            # Also if this loop was not woken: `wake` may have woken the other, when no slot was free.
            if running.finished or (not demand.is_idle and self._claimable()):
                continue
            # `until_drained` may have been called during this call, and its wake-up may have gone
            # to the other loop when that had no free slot: then claim once more and do not wait.
            if self._drained is drained:
                await self._wake.wait()

    def until_drained(self) -> asyncio.Future[None]:
        """Done when nothing is due and nothing runs, as seen by a claim sent after this call."""
        if self._drained is None:
            self._drained = asyncio.get_running_loop().create_future()
            self._wake.set()
        return self._drained

    def resize(self, concurrency: int) -> None:
        """Claim for this number of slots from now on."""
        self._most_per_call = most_per_call(concurrency, self._concurrent_calls)
        self._demand.resize(concurrency, self._most_per_call)
        self._wake.set()

    async def release_all(self) -> None:
        """Release what could be neither finished nor recorded, if the storage answers."""
        await self._running.outputs.store_rest()
        self._running.give_up_all("shutdown")
        outcomes = list(self._running.finished)  # a renewal may add to it meanwhile
        if outcomes:
            self._stats.recorded(outcomes, await self._storage.record(outcomes))
            self._running.take_finished()
        await self._refused.try_again()

    async def retire(self) -> None:
        """Leave the list of workers. What could not be released, other workers recover."""
        # Another pool on the same storage object is the same owner: what it runs stays with it, and it
        # releases what this one leaves behind.
        has_others = self._storage.register.has_others(self)
        self._storage.register.drop_all_of(self)
        if not has_others:
            await self._storage.retire()

    def _claimable(self) -> int:
        """How many tasks to claim now."""
        if self._stop_requested.done() or self._pool.is_recycling or self._demand.is_paused:
            return 0
        if self._running.unblocks_others:
            # A task that has just finished made others wait, at a limit or as a suspect.
            self._running.unblocks_others = False
            self._demand.wake_up()
        return self._demand.claimable(self._running.slots, even_if_idle=self._drained is not None)

    def _batch_to_fill(self) -> OpenBatch | None:
        """An open batch to claim tasks for now."""
        can_claim = not (self._pool.is_recycling or self._demand.is_paused)
        ends = self._drained is not None, self._stop_requested.done()
        return self._running.batch_to_fill(can_claim, *ends)

    async def _call(
        self, outcomes: list[Outcome], claims: int, batch: OpenBatch | None = None
    ) -> int | None:
        """Record the outcomes and claim up to `claims` tasks, in one step.

        Those for a batch have its slot. Returns how many were claimed; None when the call failed.
        """
        order = Order(claims, self._queues, self._unknown.runnable)
        if batch is not None:
            order = batch.claim(claims)
        call = Call(claims if batch is None else 0, min(len(outcomes), self._most_per_call))
        try:
            recorded, claimed = await self._send(call, outcomes, order)
        except LeaseLost as lost:
            await self._after_loss(outcomes, lost)
            return None
        except asyncio.CancelledError:
            # Out of time. They may have been recorded; to record them again does no harm.
            self._running.put_back(outcomes)
            raise
        except Exception as error:
            await self._after_failure(call, outcomes, error)
            return None
        finally:
            if batch is not None:
                batch.claim_ended()
        self._failures = 0
        self._watch.answered()
        self._stats.recorded(outcomes, recorded)
        self._refused.on_recorded(outcomes)
        if order.most:
            self._storage.register.pass_to(self, claimed)
            mine, released = self._unknown.split(claimed, order.runnable)
            self._running.put_back(released)
            self._after_claim(call, mine)
        return len(claimed)

    async def _send(
        self, call: Call, outcomes: list[Outcome], order: Order
    ) -> tuple[list[bool], list[Task]]:
        self._demand.sent(call)
        self._recording[call] = outcomes
        if call.claims:
            self._claim_sent.set()
        try:
            recorded, claimed = await self._storage.record_and_reserve(
                outcomes, order.most, queues=order.queues, runnable=order.runnable
            )
        except BaseException:
            self._demand.failed(call)
            raise
        finally:
            del self._recording[call]
        self._demand.replied(call, len(claimed), self._clock.monotonic())
        return recorded, claimed

    def _after_claim(self, call: Call, claimed: Sequence[Task]) -> None:
        if not claimed:
            self.counter.claimed(0)
            if self._events.wants(events.PollEmpty):
                self._events.emit(events.PollEmpty(owner=self._storage.owner))
            return
        self._stats.claimed(claimed)
        if self._storage.lease_remaining <= 0:
            # The claim took longer than the lease it was made under: others may have the tasks.
            self._running.put_back([Released(task.id, task.token) for task in claimed])
            return
        self._running.start(claimed)
        for task_id in call.cancelled:
            self._running.cancel(task_id)
        # After the tasks have started, which would have to wait for the count otherwise.
        self.counter.claimed(len(claimed))

    # When the storage fails

    async def _after_loss(self, outcomes: list[Outcome], lost: LeaseLost) -> None:
        # What had finished was released with the rest; another worker runs it again.
        self._stats.lost([*outcomes, *self._refused.waiting])
        self._refused.clear()
        self.on_lease_lost(lost)
        if self._failures:
            # The lease was lost again under a fresh id: do not claim in an endless loop.
            await self._back_off()
        self._failures += 1

    async def _after_failure(self, call: Call, outcomes: list[Outcome], error: Exception) -> None:
        self._report_failure("record and claim", error)
        if not self._storage.is_open or isinstance(error, StorageRefused):
            # The storage was closed under the pool, or the server refuses this worker for good.
            self._running.put_back(outcomes)
            raise error
        if self._stop_requested.done() and self._storage.lease_remaining <= 0:
            # A stop does not wait longer for an unreachable storage: others have the tasks by now.
            self._stats.lost(outcomes)
        elif self._refused.may_be_the_reason(outcomes, error):
            self._recording[call] = outcomes
            try:
                await self._refused.record_singly(outcomes)
            finally:
                del self._recording[call]
                self._running.put_back(outcomes)
        else:
            self._running.put_back(outcomes)
        await self._back_off()

    async def _back_off(self) -> None:
        """Pause, longer after each failure in a row; a request to stop ends the pause."""
        self._failures += 1
        pause = backoff(
            self._failures,
            first=_FIRST_BACKOFF,
            longest=_LONGEST_BACKOFF,
            jitter=self._clock.random(),
        )
        if self._stop_requested.done():
            await self._clock.sleep(min(pause, _LONGEST_BACKOFF_AT_STOP))
        else:
            await self._clock.wait(self._stop_requested, pause)
        self._wake_up()

    def _wake_up(self) -> None:
        self._demand.wake_up()
        self._wake.set()

    # Side loops

    async def listen(self) -> None:
        """Claim after each wake-up, and a polling interval after an empty claim."""
        timeout = self._poll_interval
        while True:
            began = self._clock.monotonic()
            try:
                await self._storage.wait_for_work(timeout)
            except StorageError as error:
                # No wake-up can arrive meanwhile, so the claim that follows must not wait for one.
                self._report_failure("listen", error)
                await self._clock.sleep(min(self._poll_interval, _LISTEN_AGAIN))
            now = self._clock.monotonic()
            until_poll = self._demand.until_poll(now)
            if now - began >= timeout and until_poll > 0:
                # No wake-up, and another claim has come back since the wait began.
                timeout = until_poll
                continue
            timeout = self._poll_interval
            if pause := self._demand.pause_before_wakeup(now - began):
                await self._clock.sleep(pause)
            await self._request_claim()

    async def _request_claim(self) -> None:
        was_wanted = self._demand.is_wanted
        self._wake_up()
        if was_wanted:
            # All slots are busy. Wait for the next claim, then claim once more: a wake-up meanwhile must
            # not be lost, and a storage that reports due tasks again and again must not cause spinning.
            self._claim_sent.clear()
            await self._claim_sent.wait()
            self._wake_up()

    async def end_unknown(self) -> bool:
        """End the tasks that no live worker has had for too long; returns whether there were any."""
        ended = await self._unknown.end_overdue()
        self._storage.register.pass_to(self, [task for task, _ in ended])
        for task, _ in ended:
            self._stats.not_started(task)
        self._running.put_back([outcome for _, outcome in ended])
        self._wake.set()
        return bool(ended)

    async def count_left(self) -> int:
        """How many tasks wait; reports which of their functions no live worker runs."""
        left = await self._storage.count_waiting()
        if left:
            await self._unknown.report_left()
        return left

    async def report_left_forever(self) -> None:
        """Report now and then, while tasks wait, which of their functions no live worker runs."""
        while True:
            await self._clock.sleep(_REPORT_PAUSE)
            if self._stats.queued:
                await self._unknown.report_left()

    def on_new_function(self) -> None:
        """Claim: this process has enqueued a function that the last claim may not have named."""
        self._wake_up()

    async def end_unknown_forever(self, pause: float) -> None:
        """Call `end_unknown` again and again."""
        while True:
            await self._clock.sleep(pause)
            await self.end_unknown()

    # Leases and cancellation

    def on_lease_lost(self, lost: LeaseLost) -> None:
        """Stop all runs: the lease has expired, and the storage has released the claims."""
        if isinstance(lost, StoreWentBack):
            # Emitted by the one worker that has raised the epoch.
            restored = events.StoreRestored(
                owner=lost.owner, epoch=lost.epoch, repeated=lost.is_repeated
            )
            self._events.emit(restored)
        self._events.emit(events.LeaseLoss(owner=self._storage.owner))
        self._running.stop_all("lease")
        # The operator paused the worker under its old id; this one has a fresh id.
        self._demand.resume()
        self._wake_up()

    def on_cancel(self, task_id: str) -> None:
        """Stop the task if it runs here, or as soon as a call in flight brings it."""
        self._running.cancel(task_id)
        for call in self._demand.in_flight:
            call.cancelled.append(task_id)

    def outcomes(self) -> list[Outcome]:
        """The outcomes that the store has not recorded yet."""
        outcomes = [*self._running.finished, *self._refused.waiting]
        for recording in self._recording.values():
            outcomes += recording
        return outcomes

    def hands(self) -> dict[Claim, Hand]:
        """The claims that this pool has, and who has each: a run, or an outcome that waits."""
        hands: dict[Claim, Hand] = {
            (outcome.task_id, outcome.token): "outcome" for outcome in self.outcomes()
        }
        for run in self._running.active.values():
            hands[run.task.id, run.task.token] = "run"
        return hands

    def on_renewal(self, renewal: Renewal, asked_at: int) -> None:
        """Do what the renewal asks for.

        Stop the cancelled tasks, pause or resume as the operator chose, and compare the claims: what
        the storage counts as this worker's and nothing here has, is released (its reply was lost, or the
        store went back); what runs here and is not this worker's, is stopped.
        """
        if not self._failures:
            self._problems.answered()
        if self._events.wants(events.LeaseRenewed):
            self._events.emit(events.LeaseRenewed(owner=self._storage.owner))
        if renewal.paused:
            self._demand.pause()
        elif self._demand.is_paused:
            self._demand.resume()
            self._wake.set()
        for task_id in renewal.cancelled:
            self._running.cancel(task_id)
        self._refused.on_renewal()
        differences = self._storage.register.compare(renewal.held, asked_at)
        for task_id, token in differences.lost:
            self._running.stop(task_id, token, "lease")
        if differences.unknown:
            self._storage.register.adopt(self, differences.unknown)
            self._running.put_back([Released(*claim) for claim in differences.unknown])
        if differences.unknown or self._refused.are_due:
            self._wake.set()
