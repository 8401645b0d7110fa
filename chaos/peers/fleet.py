"""One round: a producer, workers that are killed whole and started again, and what they wrote down."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from chaos.peers.counting import Count, Kill, Left, Note, count, read_notes, unfinished
from omniq.testing.servers import PostgresServer, RedisServer

ROOT = Path(__file__).parents[2]
WORKERS, CONCURRENCY = 3, 4
PATIENCE = 120.0
"""Seconds after the last kill; what comes back later than that is not waited for."""
_START_SECONDS = 60.0
_BETWEEN_KILLS = (1.0, 2.0)
_SLACK, _GLANCE, _STILL_SECONDS = 6.0, 12.0, 4.0


class RoundFailed(Exception):
    """The queue did not even run; the end of its own words is in the message."""


@dataclass(frozen=True)
class Round:
    """What is played: an adapter, its interpreter and its settings."""

    adapter: str
    python: Path
    server: str
    settings: dict[str, object]
    returns_after: float | None
    """Seconds after which its documentation says that a dead worker's tasks are run again."""
    kills: int
    seed: int


class Fleet:
    """The processes of one round. Each is a session, so that all it has started dies with it."""

    def __init__(self, played: Round, folder: Path, url: str) -> None:
        self._folder = folder
        self._notes = folder / "notes"
        self._command = [str(played.python), "-m", "chaos.peers.workload", played.adapter]
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._surroundings = os.environ | {
            "PATH": f"{played.python.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PEER_URL": url,
            "PEER_NOTES": str(self._notes),
            "PEER_SETTINGS": json.dumps(played.settings),
            "PEER_CONCURRENCY": str(CONCURRENCY),
            "PEER_SEED": str(played.seed),
        }

    def notes(self) -> list[Note]:
        return read_notes(self._notes)

    def start(self, verb: str) -> int:
        """The session of a new process that does `verb` of the adapter."""
        with (self._folder / f"{verb}.log").open("ab") as log:
            child = subprocess.Popen(
                [*self._command, verb],
                env=self._surroundings,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._children[child.pid] = child
        return child.pid

    def kill(self, session: int) -> None:
        """SIGKILL to all processes of the session, until none is left."""
        while alive := _processes(session):
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._children[session].poll()
            time.sleep(0.002)
        self._children.pop(session).wait()

    def end(self, session: int) -> None:
        """SIGTERM to its first process, and wait."""
        self._children[session].terminate()
        self._children[session].wait(_START_SECONDS)

    def has_ended(self, session: int) -> bool:
        return self._children[session].poll() is not None

    def left(self) -> Left:
        """What the store says about the tasks it still has."""
        done = subprocess.run(
            [*self._command, "left"],
            env=self._surroundings,
            cwd=self._folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=_START_SECONDS,
        )
        if done.returncode:
            raise RoundFailed(done.stderr[-2000:])
        words = (line.split() for line in done.stdout.splitlines())
        return {task_id: state for state, task_id in words}

    def close(self) -> None:
        for session in list(self._children):
            self.kill(session)

    def last_words(self) -> str:
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in logs)


def play(played: Round, folder: Path) -> Count:
    """Kill and count, on a server and a store that nobody else uses. The folder keeps the logs."""
    with _store(played.server, folder) as url:
        fleet = Fleet(played, folder, url)
        try:
            return _play(fleet, played)
        finally:
            fleet.close()


def _play(fleet: Fleet, played: Round) -> Count:
    producer = fleet.start("produce")
    _wait_for(fleet, lambda notes: any(note.what == "acknowledged" for note in notes))
    workers = [fleet.start("work") for _ in range(WORKERS)]
    draw, kills = random.Random(played.seed), list[Kill]()
    while len(kills) < played.kills:
        # How long a worker takes to start is no part of this: all are at work before one dies.
        _wait_for(fleet, lambda notes: _began(notes) >= set(workers))
        time.sleep(draw.uniform(*_BETWEEN_KILLS))
        victim = draw.choice(workers)
        fleet.kill(victim)
        kills.append(Kill(victim, time.monotonic()))
        workers[workers.index(victim)] = fleet.start("work")
    os.kill(producer, signal.SIGUSR1)
    _wait_for_what_comes_back(fleet, played.returns_after)
    fleet.end(producer)
    _wait_until_nothing_changes(fleet)
    left = fleet.left()
    return count(fleet.notes(), kills, left)


def _wait_for(fleet: Fleet, is_so: Callable[[list[Note]], bool]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not is_so(fleet.notes()):
        if time.monotonic() > deadline:
            raise RoundFailed(fleet.last_words())
        time.sleep(0.05)


def _wait_for_what_comes_back(fleet: Fleet, returns_after: float | None) -> None:
    """At least as long as the documentation says, so that what is done twice is seen as well."""
    last_kill = time.monotonic()
    # What never comes back by itself, or in hours, need not be waited for.
    is_worth_it = returns_after is not None and returns_after <= PATIENCE
    shortest = _SLACK + returns_after if returns_after is not None and is_worth_it else _GLANCE
    while (waited := time.monotonic() - last_kill) < (PATIENCE if is_worth_it else shortest):
        before = {note.task_id for note in fleet.notes() if note.at < last_kill}
        if waited > shortest and not before & unfinished(fleet.notes()):
            break
        time.sleep(0.5)


def _wait_until_nothing_changes(fleet: Fleet) -> None:
    known, since = unfinished(fleet.notes()), time.monotonic()
    while known and time.monotonic() < since + _STILL_SECONDS:
        time.sleep(0.1)
        if (now := unfinished(fleet.notes())) != known:
            known, since = now, time.monotonic()


def _began(notes: list[Note]) -> set[int]:
    """The sessions in which a task has been started."""
    return {note.session for note in notes if note.what == "start"}


def _processes(session: int) -> list[int]:
    found = []
    for entry in os.scandir("/proc"):
        with suppress(ValueError, OSError):
            # The name of the program may contain anything; what follows its bracket does not.
            state, _, _, sid = Path(entry, "stat").read_text().rpartition(")")[2].split()[:4]
            if int(sid) == session and state != "Z":
                found.append(int(entry.name))
    return found


@contextmanager
def _store(kind: str, folder: Path) -> Iterator[str]:
    match kind:
        case "Redis":
            with RedisServer(durable=True) as server:
                yield server.url
        case "PostgreSQL":
            with PostgresServer(durable=True) as server:
                yield server.url
        case _:
            yield f"sqlite:///{folder}/store.db"
