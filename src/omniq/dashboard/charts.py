"""Charts as SVG: sparklines, bars over time and lines over time, with ticks and texts for each point."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from omniq.models import Version
from omniq.operations.formatting import format_duration
from omniq.operations.run_history import History, RunFigures

Series = Sequence[tuple[float, float]]
"""(time in seconds, value), in order of time."""

WIDTH, HEIGHT = 720, 150
_TIME_TICKS = 4
_MAX_SPARK_POINTS = 40


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """A line, the area under it, and the value at its top edge. Empty without data."""

    width: int
    height: int
    line: str
    area: str
    top: float


class Bar(msgspec.Struct, frozen=True):
    """A part of a bar: its kind and position."""

    kind: str
    x: float
    y: float
    width: float
    height: float


class Slot(msgspec.Struct, frozen=True):
    """The position of one point, and the text that is shown for it."""

    x: float
    width: float
    at: datetime
    text: str


class Mark(msgspec.Struct, frozen=True):
    """A vertical line at the first start of a version."""

    x: float
    text: str


class TimeChart(msgspec.Struct, frozen=True, kw_only=True):
    """Bars or lines over a time range. `ticks` are texts from top to bottom, `times` from left to right."""

    title: str
    keys: tuple[tuple[str, str], ...]
    ticks: tuple[str, str, str]
    times: tuple[tuple[float, datetime], ...]
    day_names: bool
    slots: tuple[Slot, ...]
    bars: tuple[Bar, ...] = ()
    lines: tuple[tuple[str, str], ...] = ()
    marks: tuple[Mark, ...] = ()
    is_empty: bool = False


class Slice(msgspec.Struct, frozen=True):
    """A part of a stacked bar: its left edge and its width, in percent."""

    name: str
    count: int
    x: float
    width: float


def chart(
    series: Series, *, span: float, width: int, height: int, top: float | None = None
) -> Chart:
    """The last `span` seconds of a series, the newest value at the right edge."""
    ceiling = nice_ceiling(max((value for _, value in series), default=0)) if top is None else top
    if not series:
        return Chart(width=width, height=height, line="", area="", top=ceiling)
    newest = series[-1][0]
    # Every n-th point, counted from the first one, so that a new point does not change the others.
    every = max(1, len(series) // _MAX_SPARK_POINTS)
    points = [
        (
            width * (1 - (newest - at) / span),
            height - 1 - (height - 2) * min(1.0, value / ceiling),
        )
        for number, (at, value) in enumerate(series)
        if newest - at <= span and (number % every == 0 or number == len(series) - 1)
    ]
    line = "M" + "L".join(f"{x:.0f} {y:.0f}" for x, y in points)
    area = f"{line}L{points[-1][0]:.0f} {height}L{points[0][0]:.0f} {height}Z"
    return Chart(width=width, height=height, line=line, area=area, top=ceiling)


def outcome_chart(history: History, title: str, kinds: Sequence[str]) -> TimeChart:
    """Runs per minute by outcome, as stacked bars."""
    minutes = history.step / 60
    values = [
        [(kind, getattr(point.figures, kind) / minutes) for kind in kinds]
        for point in history.points
    ]
    top = nice_ceiling(max((sum(value for _, value in each) for each in values), default=0))
    bars: list[Bar] = []
    step = WIDTH / max(1, len(values))
    for number, parts in enumerate(values):
        y = float(HEIGHT)
        for kind, value in parts:
            height = HEIGHT * value / top
            if value:
                # Keep a single failure among thousands of runs visible.
                height = max(height, 1.5)
                y -= height
                bars.append(
                    Bar(
                        kind,
                        round(number * step, 1),
                        round(y, 1),
                        round(step * 0.86, 1),
                        round(height, 1),
                    )
                )
    return TimeChart(
        title=title,
        keys=tuple((kind, kind) for kind in kinds),
        ticks=(f"{_number(top)}/min", _number(top / 2), "0"),
        slots=_slots(history, lambda figures: _outcome_text(figures, kinds)),
        bars=tuple(bars),
        is_empty=not bars,
        **_axis(history),
    )


def percentile_chart(history: History, title: str, prefix: str) -> TimeChart:
    """The percentiles of waiting times (`wait`) or of durations (`run`), as lines."""
    names = [f"{prefix}_{part}" for part in ("p99", "p95", "p50")]
    known = [
        value
        for point in history.points
        for name in names
        if (value := getattr(point.figures, name)) is not None
    ]
    top = nice_duration(max(known, default=0))
    return TimeChart(
        title=title,
        keys=tuple((name[-3:], name[-3:]) for name in reversed(names)),
        ticks=(format_duration(top), format_duration(top / 2), "0"),
        slots=_slots(history, lambda figures: _percentile_text(figures, prefix)),
        lines=tuple((name[-3:], _line(history, name, top)) for name in names),
        is_empty=not known,
        **_axis(history),
    )


def _line(history: History, name: str, top: float) -> str:
    """A path through the points that have a value; a gap where there is none."""
    step, path, is_down = WIDTH / max(1, len(history.points)), [], False
    for number, point in enumerate(history.points):
        value = getattr(point.figures, name)
        if value is None:
            is_down = False
            continue
        x, y = (number + 0.5) * step, HEIGHT - (HEIGHT - 2) * min(1.0, value / top)
        # A point without neighbours is a short line, so that it can be seen.
        path.append(f"L{x:.1f} {y:.1f}" if is_down else f"M{x - step / 4:.1f} {y:.1f}H{x:.1f}")
        is_down = True
    return "".join(path)


def _axis(history: History) -> dict[str, Any]:
    span = history.until - history.since
    times = tuple(
        (round(100 * number / _TIME_TICKS, 1), history.since + span * number / _TIME_TICKS)
        for number in range(_TIME_TICKS + 1)
    )
    marks = tuple(
        Mark(
            round(WIDTH * ((version.started_at - history.since) / span), 1), _version_text(version)
        )
        for version in history.versions
    )
    return {"times": times, "marks": marks, "day_names": span > timedelta(days=2)}


def _slots(history: History, text: Callable[[RunFigures], str]) -> tuple[Slot, ...]:
    step = WIDTH / max(1, len(history.points))
    return tuple(
        Slot(round(number * step, 1), round(step, 1), point.at, text(point.figures))
        for number, point in enumerate(history.points)
    )


def _outcome_text(figures: RunFigures, kinds: Sequence[str]) -> str:
    if not figures.runs:
        return "no runs"
    return ", ".join(f"{getattr(figures, kind):,} {kind}" for kind in kinds)


def _percentile_text(figures: RunFigures, prefix: str) -> str:
    values = [(part, getattr(figures, f"{prefix}_{part}")) for part in ("p50", "p95", "p99")]
    if values[0][1] is None:
        return "no runs"
    return ", ".join(f"{part} {format_duration(value)}" for part, value in values)


def _version_text(version: Version) -> str:
    return f"first start of {version.code or 'this code'} with omniq {version.omniq}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"


def stacked(counts: Sequence[tuple[str, int]]) -> list[Slice]:
    """The parts of a stacked bar. A part that is not zero has a visible width.

    >>> [(each.name, each.x, each.width) for each in stacked([("a", 3), ("b", 1), ("c", 0)])]
    [('a', 0.0, 75.0), ('b', 75.0, 25.0)]
    """
    shares = [
        (name, count, max(count / _total(counts) * 100, 0.6)) for name, count in counts if count
    ]
    scale = 100 / sum(share for _, _, share in shares) if shares else 1
    slices, x = [], 0.0
    for name, count, share in shares:
        slices.append(Slice(name, count, round(x, 2), round(share * scale, 2)))
        x += share * scale
    return slices


def nice_ceiling(value: float) -> float:
    """The next larger round number for an axis.

    >>> [nice_ceiling(value) for value in (0, 0.3, 7, 23, 480)]
    [1.0, 0.5, 10.0, 25.0, 500.0]
    """
    if value <= 0:
        return 1.0
    magnitude = 10.0 ** math.floor(math.log10(value))
    return next(step * magnitude for step in (1, 2, 2.5, 5, 10) if step * magnitude >= value)


def nice_duration(seconds: float) -> float:
    """The next larger duration for an axis: a round number of its unit.

    >>> [nice_duration(value) for value in (0.3, 7, 70, 480, 5_000)]
    [0.5, 10.0, 120, 600, 7200]
    """
    steps = [step * unit for unit in (60, 3_600, 86_400) for step in (1, 2, 4, 10, 20, 30)]
    if seconds <= 30:
        return nice_ceiling(seconds)
    return next((step for step in sorted(steps) if step >= seconds), nice_ceiling(seconds))


def bars_of(counts: Sequence[int]) -> Chart:
    """A small chart of counts, one bar for each, as a path."""
    top, step = max([*counts, 1]), 120 / max(1, len(counts))
    area = "".join(
        f"M{number * step:.0f} 28V{28 - 26 * count / top:.0f}h{step * 0.8:.0f}V28Z"
        for number, count in enumerate(counts)
        if count
    )
    return Chart(width=120, height=28, line="", area=area, top=top)


def _total(counts: Sequence[tuple[str, int]]) -> int:
    return sum(count for _, count in counts) or 1
