"""Counts the recorded events: lost tasks, tasks that ran twice, and recovery times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

Left = dict[str, str]
"""The tasks that a store still has after a round: `held` or `failed`, by id."""


class Note(NamedTuple):
    """`acknowledged` by the producer, or `start` or `end` of a run in a worker's session."""

    what: str
    task_id: str
    at: float
    session: int


class Kill(NamedTuple):
    """The death of a worker; nothing of that session runs afterwards."""

    session: int
    at: float


@dataclass(frozen=True)
class Count:
    """The counts of a round; counts of tasks, unless noted.

    An acknowledged task is in exactly one of `finished`, `held` (the store has it and will run it
    again automatically, after the end of the round), `failed` (given up, stored for inspection) and
    `lost` (no trace).
    """

    kills: int
    acknowledged: int
    finished: int
    held: int
    failed: int
    lost: int
    interrupted: int
    """Runs that a kill ended."""
    started_again: int
    ran_twice: int
    """Tasks with two or more complete runs."""
    recoveries: int
    recovery_p50: float | None
    recovery_max: float | None
    """Seconds from the kill to the next start of a task that was running."""


def read_notes(path: Path) -> list[Note]:
    """Return all complete lines of the file, by time."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    fields = (line.split() for line in lines)
    notes = [Note(what, task_id, float(at), int(sid)) for what, task_id, at, sid in fields]
    return sorted(notes, key=lambda note: note.at)


def unfinished(notes: Iterable[Note]) -> set[str]:
    """Return the tasks that were acknowledged and have not finished a run."""
    notes = list(notes)
    return _ids(notes, "acknowledged") - _ids(notes, "end")


def count(notes: list[Note], kills: list[Kill], left: Left) -> Count:
    """Count the events; `left` are the tasks that the store still has."""
    taken, waiting = _ids(notes, "acknowledged"), unfinished(notes)
    states = [left.get(task_id, "lost") for task_id in waiting]
    interrupted = list(_interrupted(notes, kills))
    back = [seconds for seconds in interrupted if seconds is not None]
    return Count(
        kills=len(kills),
        acknowledged=len(taken),
        finished=len(taken) - len(waiting),
        held=states.count("held"),
        failed=states.count("failed"),
        lost=states.count("lost"),
        interrupted=len(interrupted),
        started_again=len(_more_than_once(notes, "start")),
        ran_twice=len(_more_than_once(notes, "end")),
        recoveries=len(back),
        recovery_p50=round(median(back), 2) if back else None,
        recovery_max=round(max(back), 2) if back else None,
    )


def _interrupted(notes: list[Note], kills: list[Kill]) -> Iterable[float | None]:
    """Yield, for each run that a kill ended, the seconds to the next start of its task, or None."""
    deaths = {kill.session: kill.at for kill in kills}
    ended = {(note.task_id, note.session) for note in notes if note.what == "end"}
    starts = [note for note in notes if note.what == "start"]
    for run in starts:
        died = deaths.get(run.session)
        if died is not None and (run.task_id, run.session) not in ended:
            again = (
                note.at - died
                for note in starts
                if note.task_id == run.task_id and note.session != run.session and note.at > died
            )
            yield next(again, None)


def _ids(notes: Iterable[Note], what: str) -> set[str]:
    return {note.task_id for note in notes if note.what == what}


def _more_than_once(notes: list[Note], what: str) -> set[str]:
    ids = [note.task_id for note in notes if note.what == what]
    return {task_id for task_id in ids if ids.count(task_id) > 1}
