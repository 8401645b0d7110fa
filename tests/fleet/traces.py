"""Reads the traces that the tasks of `fleet_tasks` write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.acceptance.command import WorkerCommand


class Trace(NamedTuple):
    """One line: the process, the event, the task and the time (monotonic nanoseconds)."""

    pid: int
    what: str
    name: str
    at: int


def traces(folder: Path) -> list[Trace]:
    """Return all lines so far, ordered by time."""
    found = [
        Trace(int(path.stem), what, name, int(at))
        for path in folder.glob("*.trace")
        for what, name, at in (line.split() for line in path.read_text().splitlines())
    ]
    return sorted(found, key=lambda trace: trace.at)


def runs(folder: Path) -> Counter[str]:
    """Return how often each task has run to its end."""
    return Counter(trace.name for trace in traces(folder) if trace.what == "ran")


def have_run_since(
    folder: Path, workers: Sequence[WorkerCommand], moment: int, times: int = 1
) -> bool:
    """Whether each worker has noted that many tasks after that time."""
    since = Counter(trace.pid for trace in traces(folder) if trace.at > moment)
    return all(since[worker.process.pid] >= times for worker in workers)
