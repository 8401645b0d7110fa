"""What a worker sees of the others: stalled workers, stuck tasks, breakers that open and close.

Every worker looks, and tells its own listeners; a worker that nobody listens to does not look.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from datetime import datetime

from omniq import events
from omniq.circuit_breaker import BreakerState, change_of
from omniq.events import Dispatcher
from omniq.models import TaskStatus
from omniq.storage.base import BaseStorage
from omniq.storage.health import BreakerInfo, as_stuck, breakers_of, live_workers, stuck_from

_Claim = tuple[str, str]
"""Who holds a task, and its id."""

_SHARE = 50
"""Asking for the breakers takes at most one part in so many of the time."""


class Lookout:
    """Looks at the storage whenever it is asked to, and tells of what has changed since.

    `breakers` gives the names of those that this worker's tasks have passed.
    """

    def __init__(
        self, storage: BaseStorage, dispatcher: Dispatcher, breakers: Callable[[], Set[str]]
    ) -> None:
        self._storage = storage
        self._clock = storage.clock
        self._events = dispatcher
        self._breakers = breakers
        self._seen: dict[str, BreakerInfo] = {}
        self._rested_at = 0.0
        self._stalled: set[str] = set()
        self._held: set[_Claim] = set()
        self._look_again: dict[_Claim, datetime] = {}
        self._told: dict[str, int] = {}

    async def look_at_workers(self) -> None:
        """Tell of workers that are stalled, and of tasks that are stuck."""
        if not self._events.active:
            return
        workers = await live_workers(self._storage)
        for worker in workers:
            if worker.stalled and worker.id not in self._stalled:
                self._events.emit(
                    events.WorkerStalled(
                        owner=worker.id,
                        host=worker.host,
                        pid=worker.pid,
                        last_heartbeat=worker.last_heartbeat,
                        running=len(worker.running),
                    )
                )
        self._stalled = {worker.id for worker in workers if worker.stalled}
        held = {(worker.id, task_id) for worker in workers for task_id in worker.running}
        await self._look_at_tasks(held & self._held)
        self._held = held

    async def _look_at_tasks(self, held: set[_Claim]) -> None:
        """Look at those that were there the last time too, and at each only when it may be stuck.

        So short tasks cost nothing, and long ones are read once.
        """
        now = self._clock.now()
        again = {claim: self._look_again.get(claim, now) for claim in held}
        for claim in [claim for claim, at in again.items() if at <= now]:
            again[claim] = await self._look_at_task(claim[1], now)
        self._look_again = again
        ids = {task_id for _, task_id in held}
        self._told = {task_id: token for task_id, token in self._told.items() if task_id in ids}

    async def _look_at_task(self, task_id: str, now: datetime) -> datetime:
        """Tell of the task if it is stuck; when to look at it again."""
        task = await self._storage.get_task(task_id)
        if task is None or task.status is not TaskStatus.RUNNING:
            return now
        stuck_at = stuck_from(task, self._storage.settings.default_timeout)
        if stuck_at > now:
            return stuck_at
        if self._told.get(task_id) != task.token:
            self._told[task_id] = task.token
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

    async def look_at_breakers(self) -> None:
        """Tell of breakers that have opened, half-opened or closed.

        One that did both between two looks is told of as it is now.
        """
        names = self._breakers()
        began = self._clock.monotonic()
        if not names or not self._events.active or began < self._rested_at:
            return
        breakers = await breakers_of(self._storage)
        now = self._clock.monotonic()
        self._rested_at = now + (now - began) * _SHARE
        for breaker in breakers:
            if breaker.name in names:
                self._tell_change(breaker)

    def _tell_change(self, seen: BreakerInfo) -> None:
        before = self._seen.get(seen.name)
        was = BreakerState.CLOSED if before is None else before.state
        if before is not None and seen.opened_at != before.opened_at and was is BreakerState.OPEN:
            # Its probe failed between two looks: it has opened once more.
            was = BreakerState.HALF_OPEN
        self._seen[seen.name] = seen
        change = change_of(seen.name, was, seen.state, seen.failures, seen.reason)
        if change is not None:
            self._events.emit(change)
