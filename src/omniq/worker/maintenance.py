"""The chores of every worker: recover what others dropped, forget what is old, pass on progress.

No leader and no lock: each chore goes through the storage contract, where two that do it at once
do it once. A chore that fails is told of, and tried again at its next turn.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta

from omniq.clock import Clock
from omniq.events import ChoreFailed, Dispatcher, TaskDead, TasksGivenBack, TasksLeft
from omniq.models import Progress, TaskError, TaskStatus
from omniq.storage.base import BaseStorage
from omniq.worker.failure_hooks import Hooks
from omniq.worker.fleet_alerts import Lookout

_JITTER = 0.2
_SHORTEST_TURN = 0.05
_PURGE_EVERY = 10.0
_PROGRESS_EVERY = 0.5
_BREAKERS_EVERY = 1.0
_WORKERS_EVERY = 5.0
_ORPHANS_EVERY, _ORPHAN_AGE = 600.0, timedelta(days=1)
_LONGEST_BACKOFF = 5.0


class Maintenance:
    """Loops over the chores until it is cancelled."""

    def __init__(
        self,
        storage: BaseStorage,
        events: Dispatcher,
        lookout: Lookout,
        hooks: Hooks,
        *,
        lease: float,
        poll_interval: float,
    ) -> None:
        self._storage = storage
        self._clock: Clock = storage.clock
        self._events = events
        self._lookout = lookout
        self._hooks = hooks
        self._lease = lease
        # As often as the worker polls: what a dead worker held runs again within its lease and one
        # poll interval.
        self._recover_every = max(_SHORTEST_TURN, min(lease / 3, poll_interval))
        self._lock = threading.Lock()
        self._progress: dict[str, Progress] = {}

    def report(self, progress: Progress) -> None:
        """Keep the newest progress of a task for the next turn. From any thread."""
        with self._lock:
            self._progress[progress.task_id] = progress

    async def run(self) -> None:
        """Do all chores again and again."""
        await asyncio.gather(
            self._every(self._recover_every, self.recover),
            self._every(max(self._lease, _PURGE_EVERY), self.purge),
            self._every(_ORPHANS_EVERY, self.purge_orphans),
            self._every(_PROGRESS_EVERY, self.pass_on_progress),
            self._every(_BREAKERS_EVERY, self._lookout.look_at_breakers),
            self._every(_WORKERS_EVERY, self._lookout.look_at_workers),
        )

    async def recover(self) -> None:
        """Give back what workers without a lease still hold."""
        owners: dict[str, int] = {}
        given_back = await self._storage.give_back_abandoned()
        for back in given_back:
            owners[back.owner] = owners.get(back.owner, 0) + 1
        for owner, count in owners.items():
            self._events.emit(TasksGivenBack(owner=owner, count=count))
        for back in given_back:
            if back.status is TaskStatus.FAILED:
                await self._tell_death(back.task_id)

    async def _tell_death(self, task_id: str) -> None:
        """The task has taken too many workers with it: nobody else is there to tell of its end."""
        task = await self._storage.get_dead_task(task_id)
        if task is None:
            # Somebody has been quicker: it is retried, or deleted.
            return
        history = await self._storage.history(task_id)
        error = history[-1].error if history else None
        self._events.emit(
            TaskDead(
                id=task.id,
                func_path=task.func_path,
                queue=task.queue,
                attempt=task.attempts,
                reason="crashed",
            )
        )
        self._hooks.died(task, error or TaskError("its worker was lost", error_type="WorkerLost"))

    async def purge(self) -> None:
        """Forget finished tasks whose time is over."""
        await self._storage.purge_expired()

    async def purge_orphans(self) -> None:
        """Forget old checkpoints of tasks that are neither alive nor dead letters."""
        await self._storage.purge_checkpoints(self._clock.now() - _ORPHAN_AGE)

    async def pass_on_progress(self) -> None:
        """Write down what running tasks have reported."""
        with self._lock:
            reports, self._progress = self._progress, {}
        if not reports:
            return
        try:
            await self._storage.report_progress(list(reports.values()))
        except BaseException:
            # For the next turn, but for tasks that have said something newer since.
            with self._lock:
                self._progress = {**reports, **self._progress}
            raise

    async def _every(self, seconds: float, chore: Callable[[], Awaitable[None]]) -> None:
        pause = seconds
        while True:
            # Jitter, so that workers that were started together do not come all at once.
            await self._clock.sleep(pause * (1 - _JITTER * self._clock.random()))
            try:
                await chore()
                pause = seconds
            except Exception as error:
                self._events.emit(ChoreFailed.of(chore.__name__, error))
                pause = max(seconds, min(pause * 2, _LONGEST_BACKOFF))


async def left_behind(storage: BaseStorage) -> TasksLeft | None:
    """What is to be said before a storage that keeps nothing is closed: how many tasks it held."""
    # A server that keeps nothing on disk still outlives the process.
    if storage.capabilities.reach != "process":
        return None
    count = await storage.count_waiting()
    return TasksLeft(storage=storage.capabilities.name, count=count) if count else None
