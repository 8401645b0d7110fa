"""Reports what a worker sees of the fleet: stalled workers, wrong clocks, stuck tasks, breakers.

Every worker checks, and emits events to its listeners; a worker without listeners does not check.
"""

from __future__ import annotations

from datetime import datetime

from omniq import events
from omniq.circuit_breaker import BreakerState, change_of
from omniq.events import Dispatcher
from omniq.models import TaskStatus, WorkerInfo
from omniq.operations.health import (
    BreakerInfo,
    as_stuck,
    breakers_of,
    clock_differences,
    live_workers,
    stuck_from,
)
from omniq.storage.base import BaseStorage
from omniq.worker.stats_recorder import StatsRecorder

_Claim = tuple[str, str]
"""The owner that holds a task, and the task's id."""

_SHARE = 50
"""Reading the breakers takes at most one part in `_SHARE` of the time."""


class FleetAlerts:
    """Emits an event for each change since its last check.

    Of the breakers, it reports those that this worker's tasks have passed (`stats.breakers`).
    """

    def __init__(self, storage: BaseStorage, dispatcher: Dispatcher, stats: StatsRecorder) -> None:
        self._storage = storage
        self._clock = storage.clock
        self._events = dispatcher
        self._stats = stats
        self._seen_breakers: dict[str, BreakerInfo] = {}
        self._read_breakers_at = 0.0
        self._stalled: set[str] = set()
        self._other_clocks: set[str] = set()
        self._held: set[_Claim] = set()
        self._check_at: dict[_Claim, datetime] = {}
        self._reported_stuck: dict[str, int] = {}

    async def check_workers(self) -> None:
        """Report workers that are stalled or have another time, and tasks that are stuck."""
        if not self._events.active:
            return
        workers = await live_workers(self._storage)
        for worker in workers:
            # A worker that looks at others is not stalled itself, although its own record may still say so.
            if worker.stalled and worker.id not in (*self._stalled, self._storage.owner):
                self._events.emit(
                    events.WorkerStalled(
                        owner=worker.id,
                        host=worker.host,
                        pid=worker.pid,
                        last_heartbeat=worker.last_heartbeat,
                        running=len(worker.running),
                        elapsed=(self._clock.now() - worker.last_heartbeat).total_seconds(),
                    )
                )
        self._stalled = {worker.id for worker in workers if worker.stalled}
        self._check_clocks(workers)
        held = {(worker.id, task_id) for worker in workers for task_id in worker.running}
        await self._check_tasks(held & self._held)
        self._held = held

    def _check_clocks(self, workers: list[WorkerInfo]) -> None:
        differing = clock_differences(self._storage, workers)
        for worker in workers:
            if worker.id in differing and worker.id not in self._other_clocks:
                self._events.emit(
                    events.ClockDiffers(
                        owner=worker.id,
                        host=worker.host,
                        pid=worker.pid,
                        seconds=round(differing[worker.id], 3),
                    )
                )
        self._other_clocks = set(differing)

    async def _check_tasks(self, held: set[_Claim]) -> None:
        """Check the tasks that the last check saw too, and each only when it may be stuck.

        So short tasks cost nothing, and long ones are read once.
        """
        now = self._clock.now()
        check_at = {claim: self._check_at.get(claim, now) for claim in held}
        for claim in [claim for claim, at in check_at.items() if at <= now]:
            check_at[claim] = await self._check_task(claim[1], now)
        self._check_at = check_at
        ids = {task_id for _, task_id in held}
        self._reported_stuck = {
            task_id: token for task_id, token in self._reported_stuck.items() if task_id in ids
        }

    async def _check_task(self, task_id: str, now: datetime) -> datetime:
        """Report the task if it is stuck; returns when to check it again."""
        task = await self._storage.get_task(task_id)
        if task is None or task.status is not TaskStatus.RUNNING:
            return now
        stuck_at = stuck_from(task, self._storage.settings)
        if stuck_at > now:
            return stuck_at
        if self._reported_stuck.get(task_id) != task.token:
            self._reported_stuck[task_id] = task.token
            stuck = as_stuck(task, now)
            self._events.emit(
                events.TaskStuck(
                    id=stuck.task_id,
                    func_path=stuck.func_path,
                    queue=stuck.queue,
                    attempt=stuck.attempt,
                    owner=stuck.owner,
                    seconds=round(stuck.seconds, 3),
                    deliveries=stuck.deliveries,
                )
            )
        return now

    async def check_breakers(self) -> None:
        """Report breakers that have opened, half-opened or closed.

        One that changed several times between two checks is reported in its present state.
        """
        names = self._stats.breakers
        began = self._clock.monotonic()
        if not names or not self._events.active or began < self._read_breakers_at:
            return
        breakers = await breakers_of(self._storage)
        now = self._clock.monotonic()
        self._read_breakers_at = now + (now - began) * _SHARE
        for breaker in breakers:
            if breaker.name in names:
                self._report_change(breaker)

    def _report_change(self, seen: BreakerInfo) -> None:
        before = self._seen_breakers.get(seen.name)
        was = BreakerState.CLOSED if before is None else before.state
        if before is not None and seen.opened_at != before.opened_at and was is BreakerState.OPEN:
            # Its probe failed between two checks: it has opened once more.
            was = BreakerState.HALF_OPEN
        self._seen_breakers[seen.name] = seen
        change = change_of(seen.name, was, seen.state, seen.failures, seen.reason)
        if change is not None:
            self._events.emit(change)
