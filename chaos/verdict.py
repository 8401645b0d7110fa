"""The outcome of the checks: counts, recovery times, and every broken promise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from chaos.history import Event


@dataclass(frozen=True)
class Violation:
    """A promise (I1 to I36 of the checker) that was broken, for which task or process, and how."""

    code: str
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.code} {self.subject}: {self.text}"


@dataclass
class Verdict:
    """The counts of a run, and its violations."""

    tasks: int = 0
    ok: int = 0
    dead: int = 0
    cancelled: int = 0
    unknown_resolved: int = 0
    runs: int = 0
    stale_refused: int = 0
    zombie_runs: int = 0
    recoveries: list[float] = field(default_factory=list)
    excluded_recoveries: list[float] = field(default_factory=list)
    """Recoveries while the store was blocked, for example by a stop inside a write of SQLite."""
    faults: dict[str, int] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    counter_example: list[Event] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether every promise was kept."""
        return not self.violations

    def count(self, *codes: str) -> int:
        """Return how often these promises were broken."""
        return sum(violation.code in codes for violation in self.violations)

    def recovery(self, share: float) -> float:
        """Return the time within which that share of killed workers' tasks was claimed again."""
        return percentile(self.recoveries, share)

    def lines(self) -> list[str]:
        """Return the verdict as lines of text."""
        broken = Counter(violation.code for violation in self.violations)
        lines = [
            f"{'ok' if self.is_good else 'BROKEN'}: tasks {self.tasks}, done {self.ok}, "
            f"dead letters {self.dead}, cancelled {self.cancelled}, runs {self.runs}",
            f"lost {broken['I1']}, phantom {broken['I2']}, duplicate outcomes {broken['I3']}, "
            f"overlapping leases {broken['I5']}, stale accepted {broken['I6']}, "
            f"stale refused {self.stale_refused}, zombie runs {self.zombie_runs}, "
            f"unknown resolved {self.unknown_resolved}",
            "faults: " + (", ".join(f"{k} {v}" for k, v in sorted(self.faults.items())) or "none"),
        ]
        if self.recoveries:
            p50, p99, most = (self.recovery(share) for share in (0.5, 0.99, 1.0))
            count = len(self.recoveries)
            lines.append(f"recovery of {count}: p50 {p50:.2f} s, p99 {p99:.2f} s, max {most:.2f} s")
        if self.excluded_recoveries:
            lines.append(
                f"recoveries counted separately {len(self.excluded_recoveries)}, max {max(self.excluded_recoveries):.2f} s"
            )
        return lines + [str(violation) for violation in self.violations[:20]]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of all values does not exceed.

    >>> percentile([3.0, 1.0, 2.0], 0.5)
    2.0
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0
