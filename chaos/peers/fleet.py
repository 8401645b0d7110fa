"""One round: a producer, workers that are killed and replaced, and the events they recorded."""

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
"""Longest wait in seconds after the last kill."""
_START_SECONDS = 60.0
_BETWEEN_KILLS = (1.0, 2.0)
_SLACK, _SHORT_WAIT, _STILL_SECONDS = 6.0, 12.0, 4.0


class RoundFailed(Exception):
    """The queue did not run; the end of its logs is in the message."""


@dataclass(frozen=True)
class Round:
    """One round: an adapter, its interpreter and its settings."""

    adapter: str
    python: Path
    server: str
    settings: dict[str, object]
    returns_after: float | None
    """Seconds after which its documentation says that a dead worker's tasks run again."""
    kills: int
    seed: int


class Fleet:
    """The processes of one round. Each is a session, so that its children die with it."""

    def __init__(self, setup: Round, folder: Path, url: str) -> None:
        self._folder = folder
        self._notes = folder / "notes"
        self._command = [str(setup.python), "-m", "chaos.peers.workload", setup.adapter]
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._environment = os.environ | {
            "PATH": f"{setup.python.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PEER_URL": url,
            "PEER_NOTES": str(self._notes),
            "PEER_SETTINGS": json.dumps(setup.settings),
            "PEER_CONCURRENCY": str(CONCURRENCY),
            "PEER_SEED": str(setup.seed),
        }

    def notes(self) -> list[Note]:
        return read_notes(self._notes)

    def start(self, verb: str) -> int:
        """Start a process that runs `verb` of the adapter; return its session."""
        with (self._folder / f"{verb}.log").open("ab") as log:
            child = subprocess.Popen(
                [*self._command, verb],
                env=self._environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._children[child.pid] = child
        return child.pid

    def kill(self, session: int) -> None:
        """Send SIGKILL to all processes of the session until none is left."""
        while alive := _processes(session):
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._children[session].poll()
            time.sleep(0.002)
        self._children.pop(session).wait()

    def end(self, session: int) -> None:
        """Send SIGTERM to its first process, and wait."""
        self._children[session].terminate()
        self._children[session].wait(_START_SECONDS)

    def has_ended(self, session: int) -> bool:
        return self._children[session].poll() is not None

    def left(self) -> Left:
        """Return the tasks that the store still has, with their states."""
        done = subprocess.run(
            [*self._command, "left"],
            env=self._environment,
            cwd=self._folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=_START_SECONDS,
        )
        if done.returncode:
            raise RoundFailed(done.stderr[-2000:])
        fields = (line.split() for line in done.stdout.splitlines())
        return {task_id: state for state, task_id in fields}

    def close(self) -> None:
        for session in list(self._children):
            self.kill(session)

    def log_tails(self) -> str:
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in logs)


def run_round(setup: Round, folder: Path) -> Count:
    """Kill and count, on a dedicated server and store. The folder has the logs."""
    with _store(setup.server, folder) as url:
        fleet = Fleet(setup, folder, url)
        try:
            return _run(fleet, setup)
        finally:
            fleet.close()


def _run(fleet: Fleet, setup: Round) -> Count:
    producer = fleet.start("produce")
    _wait_for(fleet, lambda notes: any(note.what == "acknowledged" for note in notes))
    workers = [fleet.start("work") for _ in range(WORKERS)]
    draw, kills = random.Random(setup.seed), list[Kill]()
    while len(kills) < setup.kills:
        # Start-up times do not count: all workers have started tasks before one is killed.
        _wait_for(fleet, lambda notes: _busy_sessions(notes) >= set(workers))
        time.sleep(draw.uniform(*_BETWEEN_KILLS))
        victim = draw.choice(workers)
        fleet.kill(victim)
        kills.append(Kill(victim, time.monotonic()))
        workers[workers.index(victim)] = fleet.start("work")
    os.kill(producer, signal.SIGUSR1)
    _wait_for_recovery(fleet, setup.returns_after)
    fleet.end(producer)
    _wait_until_stable(fleet)
    left = fleet.left()
    return count(fleet.notes(), kills, left)


def _wait_for(fleet: Fleet, condition: Callable[[list[Note]], bool]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not condition(fleet.notes()):
        if time.monotonic() > deadline:
            raise RoundFailed(fleet.log_tails())
        time.sleep(0.05)


def _wait_for_recovery(fleet: Fleet, returns_after: float | None) -> None:
    """Wait at least as long as the documentation says, so that second runs are counted as well."""
    last_kill = time.monotonic()
    # Do not wait for tasks that return never, or only after hours.
    does_return = returns_after is not None and returns_after <= PATIENCE
    shortest = _SLACK + returns_after if returns_after is not None and does_return else _SHORT_WAIT
    while (waited := time.monotonic() - last_kill) < (PATIENCE if does_return else shortest):
        before = {note.task_id for note in fleet.notes() if note.at < last_kill}
        if waited > shortest and not before & unfinished(fleet.notes()):
            break
        time.sleep(0.5)


def _wait_until_stable(fleet: Fleet) -> None:
    known, since = unfinished(fleet.notes()), time.monotonic()
    while known and time.monotonic() < since + _STILL_SECONDS:
        time.sleep(0.1)
        if (now := unfinished(fleet.notes())) != known:
            known, since = now, time.monotonic()


def _busy_sessions(notes: list[Note]) -> set[int]:
    """Return the sessions in which a task has started."""
    return {note.session for note in notes if note.what == "start"}


def _processes(session: int) -> list[int]:
    found = []
    for entry in os.scandir("/proc"):
        with suppress(ValueError, OSError):
            # The program name may contain anything; the fields follow its closing bracket.
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
