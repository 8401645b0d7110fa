"""Fires schedules: a loop in every worker. There is no leader; the storage decides which is first.

A worker that sees a due nominal time enqueues its task and advances the schedule, in one step that
fails if the schedule was changed since it was read. The task's id is derived from the schedule's id
and the nominal time, so that a step whose reply was lost can be repeated.
"""

from __future__ import annotations

from collections import deque
from datetime import datetime

from omniq.concurrency.backoff import backoff
from omniq.errors import NotSealed
from omniq.events import Dispatcher, ScheduleFired, ScheduleMissed
from omniq.failpoints import hit
from omniq.models import Schedule
from omniq.scheduling.due_times import Firing, due, task_at, task_id_at
from omniq.storage.base import BaseStorage
from omniq.worker.problems import ProblemReports

_SHARE = 20
"""Reading many schedules takes at most one part in `_SHARE` of the time."""

_LONGEST_BACKOFF = 5.0


class ScheduleLoop:
    """Checks all schedules when one is due, when one was changed, and every `poll_interval`."""

    def __init__(
        self,
        storage: BaseStorage,
        events: Dispatcher,
        poll_interval: float,
        problems: ProblemReports | None = None,
    ) -> None:
        self._storage = storage
        self._clock = storage.clock
        self._events = events
        self._problems = problems or ProblemReports(events, storage.clock)
        self._poll_interval = poll_interval
        self._failures = 0
        self._reported: dict[str, int] = {}

    async def run(self) -> None:
        """Fire what is due, again and again, until cancelled."""
        await self._report_older()
        while True:
            with self._storage.listen_for_schedules() as changed:
                began = self._clock.monotonic()
                pause = await self.fire_due()
                rest = min((self._clock.monotonic() - began) * _SHARE, self._poll_interval)
                await self._clock.sleep(rest)
                await self._clock.wait(changed, max(0.0, pause - rest))

    async def _report_older(self) -> None:
        """Report the schedules that an older omniq has stored: none of them fires until it is sealed."""
        try:
            older = await self._storage.older_documents(max_pages=0)
        except Exception as error:
            self._problems.report("schedules", error)
            return
        for each in older:
            self._problems.report(f"schedule {each.id}", NotSealed(each.id))

    async def fire_due(self) -> float:
        """Fire all that is due; returns in how many seconds to check again. Never raises."""
        try:
            schedules = await self._storage.list_schedules()
        except Exception as error:
            self._problems.report("schedules", error)
            self._failures += 1
            return backoff(self._failures - 1, first=self._poll_interval, longest=_LONGEST_BACKOFF)
        self._failures = 0
        upcoming = [await self._fire(schedule) for schedule in schedules]
        # The wall clock may be set meanwhile: never wait longer than a polling interval.
        return min([self._poll_interval, *(pause for pause in upcoming if pause is not None)])

    async def _fire(self, schedule: Schedule) -> float | None:
        """Fire one schedule as far as it is due; returns the seconds until its next time.

        One that cannot be fired does not hold up others, and is reported once.
        """
        schedule_id, version = schedule.id, schedule.version
        try:
            current: Schedule | None = schedule
            missed: deque[datetime] = deque()
            while current is not None:
                firing = due(current, self._clock.now(), missed)
                if firing is None:
                    break
                before = current.version
                is_fired = await self._step(current, firing)
                # Advanced by this worker, or by another one that was faster.
                current = await self._storage.get_schedule(schedule_id)
                if current is None or current.version != before + 1:
                    # Changed in another way: its times may be others.
                    missed.clear()
                if not is_fired and current is not None and current.version == before:
                    # Not due by the store's clock, which is behind this worker's: later.
                    return self._poll_interval
        except Exception as error:
            if self._reported.get(schedule_id) != version:
                self._reported[schedule_id] = version
                self._problems.report(f"schedule {schedule_id}", error)
            return None
        if current is None or current.paused or current.next_at is None:
            return None
        return max(0.0, (current.next_at - self._clock.now()).total_seconds())

    async def _step(self, schedule: Schedule, firing: Firing) -> bool:
        """Fire one nominal time, or skip those that were missed; False if it was not done."""
        nominal, advanced, passed = firing
        now, task = self._clock.now(), None
        if nominal is not None:
            task = task_at(schedule, nominal, now)
            if schedule.overlap == "cancel_old" and schedule.last_at is not None:
                # Before the next one exists: if the worker dies in between, a run that the schedule
                # does not allow has ended.
                await self._storage.cancel(task_id_at(schedule.id, schedule.last_at))
        hit("schedule.before_fire")
        if not await self._storage.fire_schedule(schedule, advanced, task, passed=passed):
            return False
        hit("schedule.after_fire")
        if nominal != schedule.next_at:
            since = schedule.next_at or now
            self._events.emit(ScheduleMissed(schedule_id=schedule.id, since=since))
        if nominal is not None and task is not None:
            late = max(0.0, (now - nominal).total_seconds())
            self._events.emit(
                ScheduleFired(schedule_id=schedule.id, nominal=nominal, id=task.id, late=late)
            )
        return True
