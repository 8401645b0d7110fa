"""The numbers of the runs, stored as JSON, from which the page can be generated again."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.registry import OMNIQ, Peer


class Numbers:
    """The measured values by store, subject (a peer, or `raw`) and figure: one for each round."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.about: dict[str, Any] = data.get("about", {})
        self.failures: dict[str, str] = data.get("failures", {})
        self._values: dict[str, dict[str, dict[str, list[float]]]] = data.get("values", {})

    @classmethod
    def read(cls, path: Path) -> Numbers:
        return cls(json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})

    def write(self, path: Path) -> None:
        data = {"about": self.about, "failures": self.failures, "values": self._values}
        path.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    def add(self, store: str, subject: str, measured: dict[str, float]) -> None:
        figures = self._values.setdefault(store, {}).setdefault(subject, {})
        for figure, value in measured.items():
            figures.setdefault(figure, []).append(_short(value))

    def update(self, newer: Numbers) -> None:
        """Replace the values that the newer run has measured, and the facts about the run."""
        servers = {**self.about.get("servers", {}), **newer.about.get("servers", {})}
        versions = {**self.about.get("versions", {}), **newer.about.get("versions", {})}
        measured = {**self.measured(), **newer.measured()}
        about = {"servers": servers, "versions": versions, "measured": measured}
        self.about = {**newer.about, **about}
        for store, subjects in newer._values.items():
            for subject, figures in subjects.items():
                self._values.setdefault(store, {}).setdefault(subject, {}).update(figures)
        remaining = {
            name: text
            for name, text in self.failures.items()
            if not newer.values(*name.split(" ", maxsplit=2))
        }
        self.failures = {**remaining, **newer.failures}

    def measured(self) -> dict[str, str]:
        """Return when and on which machine each store was measured last."""
        newest = f"{self.about.get('date', '?')}, {self.about.get('machine', '?')}"
        known: dict[str, str] = self.about.get("measured", {})
        return {store: known.get(store, newest) for store in self._values}

    def subjects(self, store: str) -> list[str]:
        return list(self._values.get(store, {}))

    def figures(self, store: str, subject: str) -> list[str]:
        return list(self._values.get(store, {}).get(subject, {}))

    def values(self, store: str, subject: str, figure: str) -> list[float]:
        return self._values.get(store, {}).get(subject, {}).get(figure, [])

    def median(self, store: str, subject: str, figure: str) -> float | None:
        values = self.values(store, subject, figure)
        return statistics.median(values) if values else None

    def ratio(self, store: str, figure: str, other: str, theirs: str | None = None) -> float | None:
        """Divide omniq's figure by another's, round by round: both had the same machine then."""
        ours, others = (
            self.values(store, OMNIQ, figure),
            self.values(store, other, theirs or figure),
        )
        if not ours or not others:
            return None
        if len(ours) != len(others):
            return statistics.median(ours) / statistics.median(others)
        return statistics.median(own / other for own, other in zip(ours, others, strict=True))

    def best(
        self, store: str, figure: str, peers: list[Peer], *, least: bool = False
    ) -> str | None:
        """Return the peer with the highest figure on that store, or the lowest."""
        found = {
            peer.name: value
            for peer in peers
            if peer.name != OMNIQ and (value := self.median(store, peer.name, figure)) is not None
        }
        if not found:
            return None
        return (min if least else max)(found, key=lambda name: found[name])


def _short(value: float) -> float:
    """Round to about four digits: more would only be noise in the file."""
    return float(f"{value:.4g}") if abs(value) < 1_000 else float(round(value))
