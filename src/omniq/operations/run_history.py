"""How runs ended over a time range: rates, failures and percentiles, by function, queue or worker.

Reads the counts that workers store each minute, for the command line and the dashboard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta

import msgspec

from omniq.clock import from_micros, to_micros
from omniq.errors import InvalidValue
from omniq.models import Version
from omniq.storage.base import BaseStorage
from omniq.storage.run_counts import PeriodCounts, RunCounts, percentile
from omniq.text.to_json import JsonRecord


class TimeRange(msgspec.Struct, frozen=True):
    """A time range that ends now. `step`: seconds per point; `hours`: it uses the counts per hour."""

    name: str
    text: str
    seconds: int
    step: int
    hours: bool = False


RANGES = {
    each.name: each
    for each in (
        TimeRange("15m", "15 minutes", 900, 60),
        TimeRange("1h", "hour", 3_600, 60),
        TimeRange("6h", "6 hours", 21_600, 300),
        TimeRange("24h", "24 hours", 86_400, 900),
        TimeRange("3d", "3 days", 259_200, 3_600, True),
        TimeRange("7d", "7 days", 604_800, 3_600, True),
        TimeRange("30d", "30 days", 2_592_000, 14_400, True),
    )
}
DEFAULT_RANGE = "1h"

_MANY_HOURS = 4 * 3_600
"""Seconds. The parts of a range of this length are summed from whole hours where it has them."""


class RunFigures(JsonRecord, msgspec.Struct, frozen=True, kw_only=True):
    """Figures of some runs: their outcomes, and percentiles of waiting times and durations in seconds.

    `failed` counts runs whose tasks failed for good, `retried` those that failed and are retried. `busy_seconds` is the
    sum of all durations.
    """

    runs: int
    succeeded: int
    failed: int
    retried: int
    stopped: int
    busy_seconds: float
    wait_p50: float | None
    wait_p95: float | None
    wait_p99: float | None
    run_p50: float | None
    run_p95: float | None
    run_p99: float | None

    @classmethod
    def of(cls, counts: RunCounts) -> RunFigures:
        """The figures of these counts."""
        return cls(
            runs=counts.runs,
            succeeded=counts.succeeded,
            failed=counts.failed,
            retried=counts.retried,
            stopped=counts.stopped,
            busy_seconds=counts.seconds,
            wait_p50=percentile(counts.wait, 0.5),
            wait_p95=percentile(counts.wait, 0.95),
            wait_p99=percentile(counts.wait, 0.99),
            run_p50=percentile(counts.run, 0.5),
            run_p95=percentile(counts.run, 0.95),
            run_p99=percentile(counts.run, 0.99),
        )

    @property
    def errors(self) -> int:
        """The runs that failed, whether they are retried or not."""
        return self.failed + self.retried

    @property
    def error_share(self) -> float:
        """The fraction of runs that failed."""
        return self.errors / self.runs if self.runs else 0.0


class HistoryPoint(JsonRecord, msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one point, which begins at `at`."""

    at: datetime
    seconds: int
    figures: RunFigures


class History(JsonRecord, msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a time range: in total, at each point, and by function, queue and worker.

    The current minute is left out. `workers` are those of ranges up to 24 hours, if they were asked for. `versions` are those that were first started in the range.
    """

    range: str
    since: datetime
    until: datetime
    step: int
    total: RunFigures
    points: tuple[HistoryPoint, ...]
    functions: dict[str, RunFigures] = {}
    queues: dict[str, RunFigures] = {}
    workers: dict[str, RunFigures] = {}
    versions: tuple[Version, ...] = ()


def range_of(name: str) -> TimeRange:
    """The range of that name; raises `InvalidValue` if there is none."""
    try:
        return RANGES[name]
    except KeyError:
        raise InvalidValue(f"range {name}: expected one of {', '.join(RANGES)}") from None


async def run_history(
    storage: BaseStorage,
    span: TimeRange,
    *,
    function: str | None = None,
    queue: str | None = None,
    worker: str | None = None,
    parts: bool = False,
    workers: bool = False,
) -> History:
    """The history of a range: of all runs, or of one function, queue or worker.

    With `parts`, also the sum of each function and queue; with `workers`, that of each worker too, which reads
    more.
    """
    until = _floor(storage.clock.now(), 60)
    since = _floor(until - timedelta(seconds=span.seconds), span.step)
    chosen = function is not None or queue is not None
    # The counts per hour do not say which worker ran what, and a range of few hours has few of them.
    is_long = span.seconds >= _MANY_HOURS and not span.hours
    by_hour = parts and is_long and not (workers or chosen or worker)
    periods = await storage.run_counts(
        since,
        until,
        hours=span.hours,
        only_totals=by_hour or not (parts or chosen or worker),
        function=function,
        queue=queue,
    )
    summed = await _by_hour(storage, since, until) if by_hour else periods
    counts_of = _choice(function, queue, worker)
    points: dict[int, RunCounts] = {}
    total = RunCounts()
    for period in periods:
        counts = counts_of(period)
        if counts is not None:
            points.setdefault(period.start - period.start % span.step, RunCounts()).add(counts)
            total.add(counts)
    starts = range(to_micros(since) // 1_000_000, to_micros(until) // 1_000_000, span.step)
    versions = await storage.versions()
    return History(
        range=span.name,
        since=since,
        until=until,
        step=span.step,
        total=RunFigures.of(total),
        points=tuple(
            HistoryPoint(
                at=from_micros(start * 1_000_000),
                seconds=span.step,
                figures=RunFigures.of(points.get(start, RunCounts())),
            )
            for start in starts
        ),
        versions=tuple(each for each in versions if each.started_at >= since),
        **(_parts(summed, function, queue) if parts else {}),
    )


async def _by_hour(storage: BaseStorage, since: datetime, until: datetime) -> list[PeriodCounts]:
    """The counts of a range, of its whole hours by the hour: they are many fewer than the minutes."""
    first = _floor(since + timedelta(seconds=3_599), 3_600)
    if first >= until:
        return await storage.run_counts(since, until)
    head = await storage.run_counts(since, first)
    return [*head, *await storage.run_counts(first, until, hours=True)]


def _choice(
    function: str | None, queue: str | None, worker: str | None
) -> Callable[[PeriodCounts], RunCounts | None]:
    if worker is not None:
        return lambda period: period.workers.get(worker)
    if function is None and queue is None:
        return lambda period: period.total

    def chosen(period: PeriodCounts) -> RunCounts | None:
        total = None
        for line in period.functions:
            if function in (None, line.func_path) and queue in (None, line.queue):
                total = total or RunCounts()
                total.add(line.counts)
        return total

    return chosen


def _parts(
    periods: Iterable[PeriodCounts], function: str | None, queue: str | None
) -> dict[str, dict[str, RunFigures]]:
    """The sums of each function, queue and worker; of one function's queues, or of one queue's functions."""
    sums: dict[str, dict[str, RunCounts]] = {"functions": {}, "queues": {}, "workers": {}}
    for period in periods:
        for line in period.functions:
            if function in (None, line.func_path) and queue in (None, line.queue):
                sums["functions"].setdefault(line.func_path, RunCounts()).add(line.counts)
                sums["queues"].setdefault(line.queue, RunCounts()).add(line.counts)
        if function is None and queue is None:
            for name, counts in period.workers.items():
                sums["workers"].setdefault(name, RunCounts()).add(counts)
    return {
        part: {name: RunFigures.of(counts) for name, counts in sorted(found.items())}
        for part, found in sums.items()
    }


def _floor(instant: datetime, seconds: int) -> datetime:
    whole = int(instant.timestamp())
    return datetime.fromtimestamp(whole - whole % seconds, UTC)


async def known_names(storage: BaseStorage, days: int = 30) -> tuple[list[str], list[str]]:
    """The functions and the queues that had a run in these days, both sorted."""
    now = storage.clock.now()
    periods = await storage.run_counts(now - timedelta(days=days), now, hours=True)
    lines = [line for period in periods for line in period.functions]
    return sorted({line.func_path for line in lines}), sorted({line.queue for line in lines})
