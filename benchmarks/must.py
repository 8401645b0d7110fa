"""What omniq must show: each line with its bound, and what the numbers say to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.measurements import Numbers
from benchmarks.roster import OMNIQ, Peer

MILLION = 1_000_000
POSTGRES_REST = ("procrastinate", "saq", "chancy")
REDIS_FIVE = ("taskiq", "huey", "saq", "arq", "dramatiq")


@dataclass(frozen=True)
class Line:
    """One figure. `value` is None while something of it has not been measured."""

    figure: str
    against: str
    bound: float
    stretch: float
    value: float | None
    unit: str = "×"
    is_at_most: bool = False

    @property
    def holds(self) -> bool | None:
        if self.value is None:
            return None
        return self.value <= self.bound if self.is_at_most else self.value >= self.bound

    @property
    def must(self) -> str:
        sign = "≤" if self.is_at_most else "≥"
        return f"{sign} {in_unit(self.bound, self.unit)}"


def in_unit(value: float, unit: str) -> str:
    """
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


class Judge:
    """Puts numbers and peers together to lines."""

    def __init__(self, numbers: Numbers, peers: dict[str, Peer]) -> None:
        self._numbers = numbers
        self._peers = peers

    def lines(self) -> list[Line]:
        parts = (
            self._drains,
            self._enqueues,
            self._latencies,
            self._shares,
            self._growth,
            self._costs,
        )
        return [line for part in parts for line in part()]

    def _drains(self) -> Iterator[Line]:
        pick = self._against
        yield pick("PostgreSQL drain", "postgres", "drain", ["pgqueuer"], 1.6, 2.2)
        yield pick("PostgreSQL drain, next", "postgres", "drain", POSTGRES_REST, 10, 15)
        yield pick("Redis drain", "redis", "drain", REDIS_FIVE, 8, 14)
        yield pick("Redis drain, fsync always", "redis-always", "drain", REDIS_FIVE, 8, 14)
        yield pick("SQLite drain, `power`", "sqlite-power", "drain", ["huey"], 6, 12)
        yield pick("SQLite drain, `os`", "sqlite-os", "drain", ["queue_sqlite"], 4, 8)
        yield pick("files drain, `os`, 20,000 queued", "file-os", "drain", ["huey"], 50, 100)
        ratio = self._numbers.ratio
        yield Line(
            "files drain, `power`",
            "raw loop, one fsync'd file a task",
            *(2, 8, ratio("file-power", "drain", "raw")),
        )
        yield Line(
            "memory drain, stock loop",
            "`create_task` and callback",
            *(0.17, 0.3, ratio("memory", "drain", "bare")),
        )

    def _enqueues(self) -> Iterator[Line]:
        everyone = list(self._peers)
        for store, title in (("postgres", "PostgreSQL"), ("redis", "Redis")):
            yield self._against(f"{title} bulk enqueue", store, "bulk", everyone, 1.5, 2.5)
        for store, title in (("sqlite-power", "SQLite"), ("file-os", "files")):
            # None of the peers there has a bulk enqueue: this is its loop of single ones.
            yield self._against(
                f"{title} bulk enqueue", store, "bulk", everyone, 1.5, 2.5, theirs="single"
            )
        awaited = [name for name, peer in self._peers.items() if peer.is_async]
        for store, title in (("postgres", "PostgreSQL"), ("redis", "Redis")):
            yield self._against(f"{title}, 100 enqueue at once", store, "together", awaited, 3, 8)
            yield self._against(f"{title} awaited enqueue", store, "single", awaited, 1, 1.3)

    def _latencies(self) -> Iterator[Line]:
        for store, title, names, bound, stretch in (
            ("postgres", "PostgreSQL", ["pgqueuer"], 0.7, 0.5),
            ("redis", "Redis", list(self._peers), 1.2, 1.0),
        ):
            yield self._against(
                f"{title} idle latency, p50",
                store,
                "latency",
                names,
                bound,
                stretch,
                is_at_most=True,
            )

    def _shares(self) -> Iterator[Line]:
        for store in ("postgres", "redis", "sqlite-power", "sqlite-os", "file-power", "file-os"):
            share = self._numbers.ratio(store, "drain", "raw")
            yield Line(f"{store} drain", "raw driver, batches of 100", 0.3, 0.5, share, "%")
        for store in ("postgres", "redis"):
            ratio = self._numbers.ratio(store, "processes", OMNIQ, "drain")
            yield Line(f"{store} drain, two workers", "one worker", 1.4, 1.8, ratio)

    def _growth(self) -> Iterator[Line]:
        for store in ("postgres", "redis", "sqlite-power"):
            for stage in ("queued", "finished", "delayed"):
                share = self._numbers.middle(store, OMNIQ, f"growth_{stage}_{MILLION}")
                yield Line(f"{store} drain beside 1 M {stage}", "alone", 0.8, 0.95, share)

    def _costs(self) -> Iterator[Line]:
        for store in ("postgres", "redis", "sqlite-power"):
            cpu = self._numbers.middle(store, OMNIQ, "cpu")
            yield Line(f"{store} worker CPU a task", "", 25, 15, cpu, "µs", is_at_most=True)
        for store in ("postgres", "redis", "sqlite-power"):
            rss = self._numbers.middle(store, OMNIQ, "rss")
            yield Line(f"{store} idle worker RSS", "", 45, 35, rss, "MB", is_at_most=True)

    def _against(
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
    ) -> Line:
        """omniq beside the best of those peers there."""
        peers: list[Peer] = [self._peers[name] for name in names if name in self._peers]
        best = self._numbers.best(store, theirs or figure, peers, least=is_at_most)
        value = None if best is None else self._numbers.ratio(store, figure, best, theirs)
        against = (best or ", ".join(names[:5])) + (", one by one" if theirs else "")
        return Line(title, against, bound, stretch, value, is_at_most=is_at_most)


def judge(numbers: Numbers, peers: dict[str, Peer]) -> list[Line]:
    return Judge(numbers, peers).lines()
