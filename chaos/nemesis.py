"""Does harm to the processes of a real run, writes down what and when, and lets them recover."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from chaos import processes
from chaos.checker import Promises, check
from chaos.history import Event, read_history
from chaos.processes import LEASE, MANY_CRASHES, POLL, Fork, Nursery
from chaos.stores import BACKENDS, TRANSACTIONAL, Store
from chaos.verdict import Verdict

_LONGEST_LIFE = {"file": 0.5, "sqlite": 0.5, "redis": 0.7, "postgres": 1.0}
"""Seconds a victim lives at most: about as long to connect as to work."""

_VICTIMS = 3
_MORTALS = 4
_STEADY = 2
STOP_SECONDS = LEASE * 1.6
_POINT_PATIENCE = 4.0
DRAIN_SECONDS = 120.0

SOURCES = Path(__file__).parents[1] / "src" / "omniq"


class Harm(msgspec.Struct, frozen=True, kw_only=True):
    """How much of each to do."""

    kills: int = 1000
    stops: int = 50
    restarts: int = 20
    point_kills: int = 20
    slack: float = 0.25
    """Seconds above lease and poll within which what a killed worker held must run again."""


def failpoints_of(backend: str) -> tuple[str, ...]:
    """The names of all places in the sources that a run on this backend can pass."""
    named = re.compile(r'\bhit\("([a-z_.]+)"\)')
    names = {name for path in SOURCES.rglob("*.py") for name in named.findall(path.read_text())}
    others = {*BACKENDS} - {backend}
    if backend not in TRANSACTIONAL:
        others.add("transaction")
    return tuple(sorted(name for name in names if name.split(".")[0] not in others))


class Run:
    """One backend under all kinds of harm, one after the other, and the history of that."""

    def __init__(self, store: Store, folder: Path, seed: int, harm: Harm) -> None:
        self._draw = random.Random(seed)
        self._nursery = Nursery(store, folder, seed)
        self._folder = folder
        self._store = store
        self._harm = harm
        self._steady: list[Fork] = []
        self.deaths: dict[str, int] = {}
        """How many workers died at each failpoint."""
        self.seconds: dict[str, float] = {}

    @property
    def events(self) -> list[Event]:
        return read_history([self._folder / "events"])

    @property
    def promises(self) -> Promises:
        harm = self._harm
        at_least = {"kill": harm.kills, "stop": harm.stops}
        if self._store.server is not None:
            at_least["restart"] = harm.restarts
        return Promises(
            max_crashes=MANY_CRASHES,
            recovery=LEASE + POLL + harm.slack,
            drain=DRAIN_SECONDS,
            at_least=at_least,
            failpoints=failpoints_of(self._store.backend) if harm.point_kills else (),
            passes=harm.point_kills,
        )

    def play(self) -> Verdict:
        """Do all the harm, let the fleet recover, and judge its history."""
        self._await(self._nursery.fork("founder", processes.founder), "the founder")
        try:
            steady = partial(processes.worker, places="*=count", notes_resources=True)
            self._steady = [self._nursery.fork("steady", steady) for _ in range(_STEADY)]
            self._steady.append(self._nursery.fork("metronome", processes.metronome))
            self._timed("kills", self._kill_at_random)
            self._timed("failpoints", self._kill_at_failpoints)
            self._timed("stops", self._stop_past_the_lease)
            if self._store.server is not None:
                self._timed("restarts", self._restart_the_server)
            self._timed("drain", self._drain)
        finally:
            for fork in self._steady:
                self._end(fork)
        self._await(self._nursery.fork("reader", processes.reader), "the reader")
        return check(self.events, self.promises)

    def _timed(self, name: str, harm: Callable[[], None]) -> None:
        began = time.monotonic()
        harm()
        self.seconds[name] = time.monotonic() - began

    # Harm

    def _kill(self, fork: Fork) -> None:
        self._nursery.journal.note("kill", value=fork.name)
        fork.signal(signal.SIGKILL)
        fork.wait(10)

    def _kill_at_random(self) -> None:
        """Workers and now and then the producer, each at an instant of its short life."""
        kills = self._harm.kills
        if not kills:
            return
        planner = partial(processes.planner, seconds=max(5.0, kills * 0.05))
        self._await(self._nursery.fork("planner", planner), "the planner")
        producer = self._nursery.fork("producer", processes.producer)
        alive: list[tuple[float, Fork]] = []
        longest = _LONGEST_LIFE[self._store.backend]
        for number in range(kills):
            while len(alive) < _VICTIMS:
                victim = self._nursery.fork("victim", processes.worker)
                alive.append((time.monotonic() + self._draw.uniform(0, longest), victim))
            alive.sort(key=lambda one: one[0])
            due, victim = alive.pop(0)
            if number % 50 == 49:
                alive.insert(0, (due, victim))
                due, victim = time.monotonic(), producer
            time.sleep(max(0.0, due - time.monotonic()))
            self._kill(victim)
            if victim is producer:
                producer = self._nursery.fork("producer", processes.producer)
        for _, victim in alive:
            self._kill(victim)
        self._end(producer)

    def _kill_at_failpoints(self) -> None:
        """Workers that kill themselves at one place each, at one of the first times they pass it."""
        times = self._harm.point_kills
        if not times:
            return
        producer = self._nursery.fork("producer", processes.producer)
        for name in failpoints_of(self._store.backend):
            if "schedule" in name:
                planner = partial(processes.planner, seconds=times * 1.5)
                self._await(self._nursery.fork("planner", planner), "the planner")
            self.deaths[name] = 0
            for _ in range(0, times, _MORTALS):
                self.deaths[name] += self._die_at(name)
        self._end(producer)

    def _die_at(self, name: str) -> int:
        """How many of some processes died there within the time they were given."""
        role = processes.producer if "enqueue" in name else processes.worker
        places = [f"{name}=kill@{self._draw.randint(1, 3)}, *=count" for _ in range(_MORTALS)]
        forks = [self._nursery.fork("mortal", partial(role, places=rule)) for rule in places]
        deadline = time.monotonic() + _POINT_PATIENCE
        while not all(fork.has_ended for fork in forks) and time.monotonic() < deadline:
            time.sleep(0.005)
        deaths = 0
        for fork in forks:
            if fork.was_killed:
                deaths += 1
                self._nursery.journal.note("kill", value=fork.name)
            else:
                self._kill(fork)
        self._nursery.journal.note("passed", value={name: deaths})
        return deaths

    def _stop_past_the_lease(self) -> None:
        """Workers that stand still, several at a time, until others have taken over."""
        stops = self._harm.stops
        if not stops:
            return
        victims = [self._nursery.fork("pausing", processes.worker) for _ in range(5)]
        done = 0
        while done < stops:
            tasks = self._nursery.fork("sleepers", processes.sleeper_tasks)
            self._await(tasks, "the producer")
            time.sleep(LEASE / 2)
            for victim in victims:
                self._nursery.journal.note("stop", value=victim.name, until=STOP_SECONDS)
                victim.signal(signal.SIGSTOP)
                time.sleep(self._draw.uniform(0, 0.05))
            time.sleep(STOP_SECONDS)
            for victim in victims:
                victim.signal(signal.SIGCONT)
                self._nursery.journal.note("cont", value=victim.name)
            done += len(victims)
            time.sleep(LEASE)
        for victim in victims:
            self._end(victim)

    def _restart_the_server(self) -> None:
        """SIGKILL to the server, and the same data again a moment later, under load."""
        producer = self._nursery.fork("producer", processes.producer)
        for _ in range(self._harm.restarts):
            time.sleep(self._draw.uniform(0.3, 1.0))
            self._restart()
        time.sleep(1)
        self._end(producer)

    def _restart(self) -> None:
        server = self._store.server
        assert server is not None
        began = time.monotonic()
        server.kill()
        time.sleep(self._draw.uniform(0, 0.5))
        server.start()
        away = time.monotonic() - began
        self._nursery.journal.note("restart", value="server", until=away)

    # And its end

    def _drain(self) -> None:
        self._nursery.journal.note("calm")
        waiter = partial(processes.waiter, seconds=DRAIN_SECONDS)
        fork = self._nursery.fork("waiter", waiter)
        fork.wait(DRAIN_SECONDS + 10)
        self._kill_quietly(fork)

    def _end(self, fork: Fork) -> None:
        self._nursery.journal.note("term", value=fork.name)
        fork.signal(signal.SIGTERM)
        if not fork.wait(15):
            self._kill(fork)

    def _await(self, fork: Fork, who: str) -> None:
        if not fork.wait(120) or fork.status:
            self._kill_quietly(fork)
            log = "\n".join(processes.lines_of(self._folder / "log")[-20:])
            raise RuntimeError(f"{who} failed:\n{log}")

    def _kill_quietly(self, fork: Fork) -> None:
        if not fork.has_ended:
            fork.signal(signal.SIGKILL)
            fork.wait(10)
