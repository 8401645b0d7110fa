"""Counts the runs of a worker in memory, and stores the counts of each minute.

A run costs an addition. What is stored does not depend on the number of runs: one small document a minute,
none for a minute without runs.
"""

from __future__ import annotations

from collections import deque

from omniq.clock import Clock
from omniq.models import Task
from omniq.outcomes import Failed, Outcome, Retried, Succeeded
from omniq.run_counts import MAX_LINES, OTHERS, FunctionCounts, PeriodCounts, RunCounts
from omniq.storage.base import BaseStorage

_MINUTE = 60
_MAX_HELD = 60
"""Minutes that are held while the storage does not respond."""

_LONGEST_JITTER = 3.0
_MERGE_STEPS, _PURGE_STEPS = 20, 4
"""Steps of each kind in one minute, at most: each is short, so that claims run in between."""


class RunRecorder:
    """Counts runs on the pool's event loop, by function and queue."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._minute = self._this_minute()
        self._lines: dict[tuple[str, str], RunCounts] = {}
        self._held: deque[PeriodCounts] = deque(maxlen=_MAX_HELD)

    def ran(self, task: Task, seconds: float, outcome: Outcome) -> None:
        """Count a run that has ended."""
        counts = self._lines.get((task.func_path, task.queue))
        if counts is None:
            counts = self._new_line(task)
        kind = type(outcome)
        if kind is Succeeded:
            counts.succeeded += 1
        elif kind is Retried:
            counts.retried += 1
        elif kind is Failed:
            counts.failed += 1
        else:
            counts.stopped += 1
            return
        started = task.started_at
        waited = (
            0.0 if started is None else (started - (task.eta or task.created_at)).total_seconds()
        )
        counts.observe(waited, seconds)

    def _new_line(self, task: Task) -> RunCounts:
        key = (task.func_path, task.queue) if len(self._lines) < MAX_LINES else (OTHERS, OTHERS)
        return self._lines.setdefault(key, RunCounts())

    async def run(self, storage: BaseStorage) -> None:
        """Store the counts after the end of each minute, and merge those of all workers."""
        await self._clock.sleep(self._until_next_minute())
        self.end_minute()
        # Jitter, so that not all workers write in the same second.
        await self._clock.sleep(_LONGEST_JITTER * self._clock.random())
        await self.store(storage)
        for _ in range(_MERGE_STEPS):
            if not await storage.merge_run_counts():
                break
        for _ in range(_PURGE_STEPS):
            if not await storage.purge_run_counts():
                break

    async def store_all(self, storage: BaseStorage) -> None:
        """Store everything, also the minute that has not ended: the worker stops."""
        self.end_minute()
        await self.store(storage)

    def end_minute(self) -> None:
        """Begin to count the next minute."""
        lines, self._lines = self._lines, {}
        start, self._minute = self._minute, self._this_minute()
        if not lines:
            return
        minute = PeriodCounts(start, RunCounts())
        for (func_path, queue), counts in lines.items():
            minute.functions.append(FunctionCounts(func_path, queue, counts))
            minute.total.add(counts)
        if self._held and self._held[-1].start == start:
            self._held[-1].add(minute)
        else:
            self._held.append(minute)

    async def store(self, storage: BaseStorage) -> None:
        """Store the minutes that have ended; they are held until that has succeeded."""
        minutes = list(self._held)
        if not minutes:
            return
        await storage.add_run_counts(minutes)
        for minute in minutes:
            if self._held and self._held[0] is minute:
                self._held.popleft()

    def _this_minute(self) -> int:
        seconds = self._clock.micros() // 1_000_000
        return seconds - seconds % _MINUTE

    def _until_next_minute(self) -> float:
        return _MINUTE - self._clock.micros() % (_MINUTE * 1_000_000) / 1_000_000
