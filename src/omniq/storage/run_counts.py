"""How many runs ended in which way, how long they took, and how long their tasks had waited.

Durations are counted in a fixed set of ranges, so that the counts of many workers and minutes can be
added up, and percentiles be read from the sum.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import msgspec

BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3_600.0, 21_600.0, 86_400.0),
)
"""The upper ends of the ranges in seconds. The last range, above all of them, has no end."""

OTHERS = "(others)"
"""In place of a function and a queue: those that are not counted separately, because there are too many."""

MAX_LINES = 500
"""The pairs of a function and a queue that are counted separately."""


class RunCounts(msgspec.Struct, array_like=True):
    """Counts of runs. `failed` runs were the last of their tasks; `retried` ones failed and are repeated.

    `stopped`: cancelled, snoozed or released. `seconds` is the sum of all run times. `wait` and `run` count
    runs by how long the task had been due, and by how long the run took: for each of `BOUNDS`, up to the
    last range that has any.
    """

    succeeded: int = 0
    failed: int = 0
    retried: int = 0
    stopped: int = 0
    seconds: float = 0.0
    wait: list[int] = []
    run: list[int] = []

    @property
    def runs(self) -> int:
        """The number of runs."""
        return self.succeeded + self.failed + self.retried + self.stopped

    @property
    def errors(self) -> int:
        """The number of runs that failed, for good or to be repeated."""
        return self.failed + self.retried

    def add(self, other: RunCounts) -> None:
        """Add the counts of another."""
        self.succeeded += other.succeeded
        self.failed += other.failed
        self.retried += other.retried
        self.stopped += other.stopped
        self.seconds += other.seconds
        _add_ranges(self.wait, other.wait)
        _add_ranges(self.run, other.run)

    def observe(self, waited: float, seconds: float, runs: int = 1) -> None:
        """Count runs in the ranges of a waiting time and of a duration."""
        self.seconds += seconds * runs
        _count(self.wait, waited, runs)
        _count(self.run, seconds, runs)


class FunctionCounts(msgspec.Struct, array_like=True):
    """The counts of one function in one queue."""

    func_path: str
    queue: str
    counts: RunCounts


class PeriodCounts(msgspec.Struct, array_like=True):
    """The counts of a minute or an hour: all runs, each function in each queue, and each worker.

    `start` is the first second of the period, since 1970. `workers` is empty for an hour.
    """

    start: int
    total: RunCounts
    functions: list[FunctionCounts] = []
    workers: dict[str, RunCounts] = {}

    def add(self, other: PeriodCounts) -> None:
        """Add the counts of another period, or of the same period of another worker."""
        self.total.add(other.total)
        lines = {(line.func_path, line.queue): line for line in self.functions}
        for line in other.functions:
            key = (line.func_path, line.queue)
            if key not in lines and len(lines) >= MAX_LINES:
                key = (OTHERS, OTHERS)
            if key not in lines:
                lines[key] = FunctionCounts(*key, RunCounts())
                self.functions.append(lines[key])
            lines[key].counts.add(line.counts)
        for worker, counts in other.workers.items():
            self.workers.setdefault(worker, RunCounts()).add(counts)


def percentile(ranges: Sequence[int], fraction: float) -> float | None:
    """The seconds that the given part of the runs did not exceed; None without runs.

    Within its range it is interpolated, so it is at most the width of a range wrong.

    >>> percentile([0, 0, 0, 10], 0.5), percentile([], 0.5)
    (0.0075, None)
    """
    total = sum(ranges)
    if not total:
        return None
    rank, below = fraction * total, 0
    for number, count in enumerate(ranges):
        if count and below + count >= rank:
            low = BOUNDS[number - 1] if number else 0.0
            high = BOUNDS[number] if number < len(BOUNDS) else BOUNDS[-1]
            return low + (high - low) * max(0.0, rank - below) / count
        below += count
    return BOUNDS[-1]


def total_of(periods: Iterable[PeriodCounts]) -> RunCounts:
    """The sum of all runs of these periods."""
    total = RunCounts()
    for period in periods:
        total.add(period.total)
    return total


def _count(ranges: list[int], seconds: float, runs: int) -> None:
    number = bisect_left(BOUNDS, seconds)
    if number >= len(ranges):
        ranges.extend([0] * (number + 1 - len(ranges)))
    ranges[number] += runs


def _add_ranges(ranges: list[int], others: list[int]) -> None:
    if len(others) > len(ranges):
        ranges.extend([0] * (len(others) - len(ranges)))
    for number, count in enumerate(others):
        if count:
            ranges[number] += count
