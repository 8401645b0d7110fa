"""Reads what the tasks of a fleet have left behind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple


class Trace(NamedTuple):
    """One line: in which process, what happened to whom, and when (monotonic nanoseconds)."""

    pid: int
    what: str
    name: str
    at: int


def traces(folder: Path) -> list[Trace]:
    """All lines so far, in the order of time."""
    found = [
        Trace(int(path.stem), what, name, int(at))
        for path in folder.glob("*.trace")
        for what, name, at in (line.split() for line in path.read_text().splitlines())
    ]
    return sorted(found, key=lambda trace: trace.at)


def runs(folder: Path) -> Counter[str]:
    """How often each task has run to its end."""
    return Counter(trace.name for trace in traces(folder) if trace.what == "ran")
