"""Charts as SVG paths: areas, lines and stacked bars."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

Series = Sequence[tuple[float, float]]
"""(time in seconds, value), in order of time."""


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """A line, the area under it, and the value at its top edge. Empty without data."""

    width: int
    height: int
    line: str
    area: str
    top: float


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
    points = [
        (
            width * (1 - (newest - at) / span),
            height - 1 - (height - 2) * min(1.0, value / ceiling),
        )
        for at, value in series
        if newest - at <= span
    ]
    line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    area = f"{line}L{points[-1][0]:.1f} {height}L{points[0][0]:.1f} {height}Z"
    return Chart(width=width, height=height, line=line, area=area, top=ceiling)


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


def _total(counts: Sequence[tuple[str, int]]) -> int:
    return sum(count for _, count in counts) or 1
