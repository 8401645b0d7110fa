"""Counts the runs of a worker in memory, and stores the counts of each minute.

Outcomes are counted exactly. The durations of a function that runs often are sampled, so that a run costs
a dictionary lookup and an addition. The size of the stored data does not depend on the number of runs: one small document
per minute, and none for a minute without runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Self

from omniq._version import __version__
from omniq.clock import Clock
from omniq.models import Task, Version
from omniq.outcomes import Failed, Outcome, Retried, Succeeded
from omniq.storage.base import BaseStorage
from omniq.storage.run_counts import MAX_LINES, OTHERS, FunctionCounts, PeriodCounts, RunCounts
from omniq.worker.code_version import code_version

_MINUTE = 60
_MEASURED = 1_000
"""The number of runs of a function per minute that are all measured; of further runs, one in `_SKIPPED` + 1 is."""

_SKIPPED = 31
_MAX_HELD = 60
"""The most minutes that are kept in memory while the storage does not respond."""

_LONGEST_JITTER = 3.0
_PURGE_EVERY = 600
_MERGE_STEPS, _PURGE_STEPS = 20, 4
"""The most steps of each kind per minute: each is short, so that claims run in between."""


class Line:
    """The counts of one function in one queue.

    Of `skipped` successful runs that are counted and not measured, `left` remain before the next measured one.
    """

    __slots__ = ("counts", "left", "measured", "skipped")

    def __init__(self) -> None:
        self.counts = RunCounts()
        self.measured = self.left = self.skipped = 0


class RunRecorder:
    """Counts runs on the pool's event loop, by function and queue."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._minute = self._this_minute()
        self.lines: dict[tuple[str, str], Line] = {}
        self._held: deque[PeriodCounts] = deque(maxlen=_MAX_HELD)
        self._modules: tuple[str, ...] = ()
        self._has_noted_version = False

    def for_modules(self, modules: Iterable[str] | None) -> Self:
        """Also store which version of these modules the worker has started with."""
        self._modules = tuple(modules or ())
        return self

    def ran(self, task: Task, seconds: float, outcome: Outcome) -> None:
        """Count a run that has ended, and measure it."""
        line = self.lines.get((task.func_path, task.queue)) or self._new_line(task)
        counts, kind, weight = line.counts, type(outcome), 1
        if kind is Succeeded:
            weight += line.skipped
            counts.succeeded += weight
            line.measured += 1
            line.left = line.skipped = _SKIPPED if line.measured >= _MEASURED else 0
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
        counts.observe(waited, seconds, weight)

    def _new_line(self, task: Task) -> Line:
        key = (task.func_path, task.queue) if len(self.lines) < MAX_LINES else (OTHERS, OTHERS)
        return self.lines.setdefault(key, Line())

    async def run(self, storage: BaseStorage) -> None:
        """Store the counts after the end of each minute, and merge those of all workers."""
        await self._note_version(storage)
        await self._clock.sleep(self._until_next_minute())
        self.end_minute()
        # Jitter, so that not all workers write in the same second.
        await self._clock.sleep(_LONGEST_JITTER * self._clock.random())
        await self.store(storage)
        for _ in range(_MERGE_STEPS):
            if not await storage.merge_run_counts():
                break
        if self._minute % _PURGE_EVERY == 0:
            for _ in range(_PURGE_STEPS):
                if not await storage.purge_run_counts():
                    break

    async def _note_version(self, storage: BaseStorage) -> None:
        if self._has_noted_version:
            return
        code = storage.settings.app_version or code_version(self._modules)
        now = storage.clock.now()
        await storage.note_version(Version(code=code, omniq=__version__, started_at=now))
        self._has_noted_version = True

    async def store_all(self, storage: BaseStorage) -> None:
        """Store all counts, including those of the current minute: the worker stops."""
        self.end_minute()
        await self.store(storage)

    def end_minute(self) -> None:
        """Begin to count the next minute."""
        lines = list(self.lines.items())
        # Emptied, not replaced: the pool has a reference to it.
        self.lines.clear()
        start, self._minute = self._minute, self._this_minute()
        if not lines:
            return
        minute = PeriodCounts(start, RunCounts())
        for (func_path, queue), line in lines:
            line.counts.succeeded += line.skipped - line.left
            minute.functions.append(FunctionCounts(func_path, queue, line.counts))
            minute.total.add(line.counts)
        if self._held and self._held[-1].start == start:
            self._held[-1].add(minute)
        else:
            self._held.append(minute)

    async def store(self, storage: BaseStorage) -> None:
        """Store the minutes that have ended; they are kept in memory until this succeeds."""
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
