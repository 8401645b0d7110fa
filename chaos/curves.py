"""Memory, files and threads of long-lived processes over time, and whether any of them grew."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, linear_regression

from chaos.history import Event
from chaos.verdict import Violation

MEGABYTES_AN_HOUR = 2.0
WARM_UP = 10.0
"""Minutes that are not checked, or a third of a run that is shorter than three times that."""

LEAST_MINUTES = 20.0
"""A shorter measurement after the warm-up cannot be extrapolated to an hour."""

_SETTLED = 1.0
"""Minutes of warm-up after which connections and threads that are made on demand exist."""

_MORE_ROWS = 1.5


@dataclass
class Curve:
    """One process, by minutes since the run began."""

    minutes: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def after(self, minute: float) -> Curve:
        """Return the part of the curve from that minute on."""
        first = sum(at < minute for at in self.minutes)
        return Curve(
            self.minutes[first:], self.megabytes[first:], self.files[first:], self.threads[first:]
        )

    @property
    def slope(self) -> float:
        """Megabytes an hour, by least squares; 0 with fewer than two samples.

        >>> Curve([0, 1, 2], [50.0, 50.1, 50.2]).slope
        6.0
        """
        if len(self.minutes) < 2:
            return 0.0
        return round(linear_regression(self.minutes, self.megabytes).slope * 60, 3)


@dataclass
class Curves:
    """The measurements of a run: its steady processes, its rows, and the times of its faults."""

    minutes: float = 0.0
    processes: dict[str, Curve] = field(default_factory=lambda: defaultdict(Curve))
    rows: list[tuple[float, int]] = field(default_factory=list)
    harm: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def warm_up(self) -> float:
        return min(WARM_UP, self.minutes / 3)

    @property
    def is_long_enough_for_memory(self) -> bool:
        return self.minutes - self.warm_up >= LEAST_MINUTES

    def growth(self) -> Iterator[Violation]:
        """I19. Memory that grows by too much an hour; files, threads and rows that grow at all."""
        if self.warm_up < _SETTLED:
            return
        for process, whole in self.processes.items():
            curve = whole.after(self.warm_up)
            if self.is_long_enough_for_memory and curve.slope >= MEGABYTES_AN_HOUR:
                yield Violation("I19", process, f"grows by {curve.slope:.1f} MB an hour")
            for what, values in (("files", curve.files), ("threads", curve.threads)):
                most, least = levels(values)
                if least > most:
                    yield Violation("I19", process, f"{what}: up to {most}, then {least} at least")
        first_rows, last_rows = self.rows_kept()
        if last_rows > _MORE_ROWS * first_rows:
            yield Violation("I19", "rows", f"{first_rows:.0f}, then {last_rows:.0f}")

    def rows_kept(self) -> tuple[float, float]:
        """Return the mean number of rows in the first and the last quarter after the warm-up."""
        first, last = _ends([count for at, count in self.rows if at >= self.warm_up])
        return fmean(first), fmean(last)


def levels(values: Sequence[int]) -> tuple[int, int]:
    """Return the maximum of the first quarter and the minimum of the last, which must not exceed it.

    A leak is never released, and exceeds the highest earlier need.

    >>> levels([7, 9, 7, 8, 7, 9, 7, 9]), levels([7, 8, 9, 10, 11, 12, 13, 14])
    ((9, 7), (8, 13))
    """
    first, last = _ends(values)
    return max(first), min(last)


def _ends(values: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    quarter = max(1, len(values) // 4)
    return values[:quarter], values[-quarter:]


def curves_of(events: Iterable[Event]) -> Curves:
    """Return the curves of a history."""
    ordered = [event for event in events if event.what in ("sample", "rows", *_HARM)]
    began = next(event.at for event in ordered if event.what == "sample")
    curves = Curves()
    for event in ordered:
        minute = (event.at - began) / 60
        match event.what:
            case "sample":
                curves.minutes = minute
                _add(curves, minute, event)
            case "rows":
                curves.rows.append((minute, event.value))
            case harm:
                curves.harm[harm].append(minute)
    return curves


def _add(curves: Curves, minute: float, event: Event) -> None:
    for process, taken in event.value.items():
        curve = curves.processes[process]
        curve.minutes.append(minute)
        curve.megabytes.append(taken["megabytes"])
        curve.files.append(taken["files"])
        curve.threads.append(taken["threads"])


_HARM = ("kill", "stop", "restart")
