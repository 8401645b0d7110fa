"""What every worker does besides its tasks: recover tasks of dead workers and their hooks, purge old records, store progress.

There is no leader and no lock: when two workers do the same at the same time, the storage contract
ensures that it takes effect once. What fails is reported, and retried in its next round.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta

from omniq.clock import Clock
from omniq.concurrency.backoff import backoff
from omniq.events import (
    Dispatcher,
    OrphanedStateDeleted,
    TaskDead,
    TasksGivenBack,
    TasksLeft,
)
from omniq.models import Progress, TaskStatus
from omniq.storage.base import BaseStorage
from omniq.worker.dead_hooks import DeadHooks
from omniq.worker.fleet_alerts import FleetAlerts
from omniq.worker.lease_watch import LeaseWatch
from omniq.worker.problems import ProblemReports
from omniq.worker.run_recorder import RunRecorder

_JITTER = 0.2
_SHORTEST_PAUSE = 0.05
_PURGE_EVERY = 30.0
_PROGRESS_EVERY = 0.5
_BREAKERS_EVERY = 1.0
_WORKERS_EVERY = 5.0
_PAUSES_EVERY = 5.0
_HOOKS_EVERY = 15.0
_FLOWS_EVERY = 1.0
_ORPHANS_EVERY, _ORPHAN_AGE = 600.0, timedelta(days=1)
_LONGEST_BACKOFF = 5.0


class Maintenance:
    """Repeats its activities until it is cancelled."""

    def __init__(
        self,
        storage: BaseStorage,
        events: Dispatcher,
        alerts: FleetAlerts,
        hooks: DeadHooks,
        watch: LeaseWatch,
        *,
        lease: float,
        poll_interval: float,
        problems: ProblemReports | None = None,
    ) -> None:
        self._storage = storage
        self._watch = watch
        self._clock: Clock = storage.clock
        self._events = events
        self._problems = problems or ProblemReports(events, storage.clock)
        self._alerts = alerts
        self._hooks = hooks
        self.history = RunRecorder(storage.clock)
        self._lease = lease
        # As often as the worker polls: what a dead worker held runs again within its lease and one
        # poll interval.
        self._recover_every = max(_SHORTEST_PAUSE, min(lease / 3, poll_interval))
        self._lock = threading.Lock()
        self._progress: dict[str, Progress] = {}

    def report(self, progress: Progress) -> None:
        """Hold the newest progress of a task for the next round. From any thread."""
        with self._lock:
            self._progress[progress.task_id] = progress

    async def run(self) -> None:
        """Repeat all activities, each at its interval."""
        # Together where that is often enough: a storage that commits in batches reads once for all of them.
        together, apart = [self.recover], []
        if self._recover_every < _FLOWS_EVERY:
            apart.append(self._every(_FLOWS_EVERY, self.advance_flows))
        else:
            together.append(self.advance_flows)
        if _FLOWS_EVERY <= self._recover_every <= _PAUSES_EVERY:
            together.append(self.resume_due)
        else:
            apart.append(self._every(_PAUSES_EVERY, self.resume_due))
        await asyncio.gather(
            self._every(self._recover_every, *together),
            *apart,
            self._every(max(self._lease, _PURGE_EVERY), self.purge),
            self._every(_ORPHANS_EVERY, self.purge_orphans),
            self._every(_PROGRESS_EVERY, self.store_progress),
            self._every(_BREAKERS_EVERY, self._alerts.check_breakers),
            self._every(_WORKERS_EVERY, self._alerts.check_workers),
            self._every(min(self._lease, _HOOKS_EVERY), self._hooks.take_lost),
            self._repeat(self.store_history),
        )

    async def recover(self) -> None:
        """Release what workers without a lease still hold."""
        if not self._watch.may_recover:
            return
        self._watch.owner = self._storage.owner
        owners: dict[str, int] = {}
        given_back = await self._storage.give_back_abandoned(why_ended=self._watch.why_ended)
        for back in given_back:
            owners[back.owner] = owners.get(back.owner, 0) + 1
        for owner, count in owners.items():
            self._events.emit(TasksGivenBack(owner=owner, count=count))
        dead = [back.task_id for back in given_back if back.status is TaskStatus.FAILED]
        for task_id in dead:
            await self._report_crashed(task_id)
        if dead:
            await self._hooks.take_lost()

    async def _report_crashed(self, task_id: str) -> None:
        """Report a task that has crashed too many workers: none of them could report its failure."""
        task = await self._storage.get_dead_task(task_id)
        if task is None:
            # A caller has retried or deleted it since.
            return
        self._events.emit(
            TaskDead(
                id=task.id,
                func_path=task.func_path,
                queue=task.queue,
                attempt=task.attempts + task.crashes,
                reason="crashed",
            )
        )

    async def advance_flows(self) -> None:
        """Do what the ends of records have left to do, and what of workflows is due."""
        while await self._storage.advance_flows():
            pass

    async def resume_due(self) -> None:
        """End the pauses whose time has come."""
        await self._storage.resume_due()

    async def purge(self) -> None:
        """Delete finished tasks whose retention has ended."""
        await self._storage.purge_expired()

    async def purge_orphans(self) -> None:
        """Delete old checkpoints of tasks that are neither alive nor dead letters, and old requests to workers."""
        older_than = self._clock.now() - _ORPHAN_AGE
        await self._storage.purge_requests(older_than)
        if count := await self._storage.purge_checkpoints(older_than):
            self._events.emit(OrphanedStateDeleted(count=count, older_than=older_than))

    async def store_progress(self) -> None:
        """Store the progress that running tasks have reported."""
        with self._lock:
            reports, self._progress = self._progress, {}
        if not reports:
            return
        try:
            await self._storage.report_progress(list(reports.values()))
        except BaseException:
            # For the next round, except where a task has reported something newer since.
            with self._lock:
                self._progress = {**reports, **self._progress}
            raise

    async def store_history(self) -> None:
        """Wait for the end of a minute, and store how the runs in it ended."""
        await self.history.run(self._storage)

    async def store_rest(self) -> None:
        """Store the last progress, and how all runs ended until now: the worker stops."""
        await self.store_progress()
        await self.history.store_all(self._storage)

    async def _repeat(self, activity: Callable[[], Awaitable[None]]) -> None:
        """Repeat an activity that waits by itself."""
        while True:
            try:
                await activity()
            except Exception as error:
                self._problems.report(activity.__name__, error)
                await self._clock.sleep(_LONGEST_BACKOFF)

    async def _every(self, seconds: float, *activities: Callable[[], Awaitable[None]]) -> None:
        """Repeat activities, all at the same time."""
        pause, failures = seconds, 0
        while True:
            # Jitter, so that workers that were started together do not do it all at the same time.
            await self._clock.sleep(pause * (1 - _JITTER * self._clock.random()))
            if all(await asyncio.gather(*map(self._succeeds, activities))):
                pause, failures = seconds, 0
            else:
                failures += 1
                pause = max(seconds, backoff(failures, first=seconds, longest=_LONGEST_BACKOFF))

    async def _succeeds(self, activity: Callable[[], Awaitable[None]]) -> bool:
        try:
            await activity()
        except Exception as error:
            self._problems.report(activity.__name__, error)
            return False
        return True


async def tasks_left(storage: BaseStorage) -> TasksLeft | None:
    """The warning before a storage that is not persistent is closed with tasks; None without any."""
    # A server that writes nothing to disk still outlives the process.
    if storage.capabilities.reach != "process":
        return None
    count = await storage.count_waiting()
    return TasksLeft(storage=storage.capabilities.name, count=count) if count else None
