"""The targets of omniq: each figure with its bound and the measured value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.measurements import Numbers
from benchmarks.registry import OMNIQ, Peer

MILLION = 1_000_000
POSTGRES_REST = ("procrastinate", "saq", "chancy")
REDIS_FIVE = ("taskiq", "huey", "saq", "arq", "dramatiq")


@dataclass(frozen=True)
class Target:
    """One figure. `value` is None while a part of it has not been measured."""

    figure: str
    against: str
    bound: float
    stretch: float
    value: float | None
    unit: str = "×"
    is_at_most: bool = False

    @property
    def is_met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value <= self.bound if self.is_at_most else self.value >= self.bound

    @property
    def goal(self) -> str:
        sign = "≤" if self.is_at_most else "≥"
        return f"{sign} {in_unit(self.bound, self.unit)}"


def in_unit(value: float, unit: str) -> str:
    """Format a value with its unit.

    >>> in_unit(1.6, "×"), in_unit(0.3, "%"), in_unit(45, "MB")
    ('1.60 ×', '30 %', '45 MB')
    """
    match unit:
        case "%":
            return f"{value:.0%}".replace("%", " %")
        case "×":
            return f"{value:.2f} ×" if value < 20 else f"{value:,.0f} ×"
        case _:
            return f"{value:.3g} {unit}"


class Comparison:
    """Computes the targets from the measured numbers and the peers."""

    def __init__(self, numbers: Numbers, peers: dict[str, Peer]) -> None:
        self._numbers = numbers
        self._peers = peers

    def targets(self) -> list[Target]:
        parts = (
            self._drains,
            self._enqueues,
            self._latencies,
            self._shares,
            self._growth,
            self._costs,
        )
        return [target for part in parts for target in part()]

    def _drains(self) -> Iterator[Target]:
        compared = self._compared
        yield compared("PostgreSQL drain", "postgres", "drain", ["pgqueuer"], 1.6, 2.2)
        yield compared("PostgreSQL drain, next", "postgres", "drain", POSTGRES_REST, 10, 15)
        yield compared("Redis drain", "redis", "drain", REDIS_FIVE, 8, 14)
        yield compared("Redis drain, fsync always", "redis-always", "drain", REDIS_FIVE, 8, 14)
        yield compared("SQLite drain, `power`", "sqlite-power", "drain", ["huey"], 6, 12)
        yield compared("SQLite drain, `os`", "sqlite-os", "drain", ["queue_sqlite"], 4, 8)
        yield compared("files drain, `os`, 20,000 queued", "file-os", "drain", ["huey"], 50, 100)
        ratio = self._numbers.ratio
        yield Target(
            "files drain, `power`",
            "raw loop, one fsync'd file a task",
            *(2, 8, ratio("file-power", "drain", "raw")),
        )
        yield Target(
            "memory drain, stock loop",
            "`create_task` and callback",
            *(0.17, 0.3, ratio("memory", "drain", "bare")),
        )

    def _enqueues(self) -> Iterator[Target]:
        everyone = list(self._peers)
        for store, title in (("postgres", "PostgreSQL"), ("redis", "Redis")):
            yield self._compared(f"{title} bulk enqueue", store, "bulk", everyone, 1.5, 2.5)
        for store, title in (("sqlite-power", "SQLite"), ("file-os", "files")):
            # No peer there has a bulk enqueue: compare with its single enqueues in a loop.
            yield self._compared(
                f"{title} bulk enqueue", store, "bulk", everyone, 1.5, 2.5, theirs="single"
            )
        awaited = [name for name, peer in self._peers.items() if peer.is_async]
        for store, title in (("postgres", "PostgreSQL"), ("redis", "Redis")):
            yield self._compared(f"{title}, 100 enqueue at once", store, "together", awaited, 3, 8)
            yield self._compared(f"{title} awaited enqueue", store, "single", awaited, 1, 1.3)

    def _latencies(self) -> Iterator[Target]:
        for store, title, names, bound, stretch in (
            ("postgres", "PostgreSQL", ["pgqueuer"], 0.7, 0.5),
            ("redis", "Redis", list(self._peers), 1.2, 1.0),
        ):
            yield self._compared(
                f"{title} idle latency, p50",
                store,
                "latency",
                names,
                bound,
                stretch,
                is_at_most=True,
            )

    def _shares(self) -> Iterator[Target]:
        for store in ("postgres", "redis", "sqlite-power", "sqlite-os", "file-power", "file-os"):
            share = self._numbers.ratio(store, "drain", "raw")
            yield Target(f"{store} drain", "raw driver, batches of 100", 0.3, 0.5, share, "%")
        for store in ("postgres", "redis"):
            ratio = self._numbers.ratio(store, "processes", OMNIQ, "drain")
            yield Target(f"{store} drain, two workers", "one worker", 1.4, 1.8, ratio)

    def _growth(self) -> Iterator[Target]:
        for store in ("postgres", "redis", "sqlite-power"):
            for stage in ("queued", "finished", "delayed"):
                share = self._numbers.median(store, OMNIQ, f"growth_{stage}_{MILLION}")
                yield Target(f"{store} drain beside 1 M {stage}", "alone", 0.8, 0.95, share)

    def _costs(self) -> Iterator[Target]:
        for store in ("postgres", "redis", "sqlite-power"):
            cpu = self._numbers.median(store, OMNIQ, "cpu")
            yield Target(f"{store} worker CPU a task", "", 25, 15, cpu, "µs", is_at_most=True)
        for store in ("postgres", "redis", "sqlite-power"):
            rss = self._numbers.median(store, OMNIQ, "rss")
            yield Target(f"{store} idle worker RSS", "", 45, 35, rss, "MB", is_at_most=True)

    def _compared(
        self,
        title: str,
        store: str,
        figure: str,
        names: list[str] | tuple[str, ...],
        bound: float,
        stretch: float,
        *,
        theirs: str | None = None,
        is_at_most: bool = False,
    ) -> Target:
        """Compare omniq with the best of these peers on that store."""
        peers: list[Peer] = [self._peers[name] for name in names if name in self._peers]
        best = self._numbers.best(store, theirs or figure, peers, least=is_at_most)
        value = None if best is None else self._numbers.ratio(store, figure, best, theirs)
        against = (best or ", ".join(names[:5])) + (", one by one" if theirs else "")
        return Target(title, against, bound, stretch, value, is_at_most=is_at_most)


def check_targets(numbers: Numbers, peers: dict[str, Peer]) -> list[Target]:
    return Comparison(numbers, peers).targets()
