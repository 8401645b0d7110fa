"""Injects faults into the processes of a real run, records them, and waits for recovery."""

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
from chaos.processes import LEASE, MANY_CRASHES, POLL, Fork, ProcessFactory
from chaos.stores import BACKENDS, TRANSACTIONAL, Store
from chaos.verdict import Verdict

_LONGEST_LIFE = {
    "file": 0.5,
    "sqlite": 0.5,
    "redis": 0.7,
    "postgres": 1.0,
    "nats": 1.0,
    "s3": 1.5,
}
"""Longest life of a victim in seconds: about as long to connect as to work."""

_VICTIMS = 3
_FAILPOINT_WORKERS = 4
_STEADY = 2
STOP_SECONDS = LEASE * 1.6
_POINT_PATIENCE = 4.0
DRAIN_SECONDS = 120.0

SOURCES = Path(__file__).parents[1] / "src" / "omniq"


class FaultPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How many faults of each kind to inject."""

    kills: int = 1000
    stops: int = 50
    restarts: int = 20
    point_kills: int = 20
    slack: float = 0.25
    """Seconds added to lease and poll interval, within which a killed worker's tasks must run."""


def failpoints_of(backend: str) -> tuple[str, ...]:
    """Return the names of all failpoints in the sources that a run on this backend can pass."""
    named = re.compile(r'\bhit\("([a-z_.]+)"\)')
    names = {name for path in SOURCES.rglob("*.py") for name in named.findall(path.read_text())}
    others = {*BACKENDS, "log"} - {backend}
    if backend in ("nats", "s3"):
        others.remove("log")
    if backend not in TRANSACTIONAL:
        others.add("transaction")
    return tuple(sorted(name for name in names if name.split(".")[0] not in others))


class Run:
    """One backend under all kinds of faults, one after the other, and its history."""

    def __init__(self, store: Store, folder: Path, seed: int, plan: FaultPlan) -> None:
        self._draw = random.Random(seed)
        self._factory = ProcessFactory(store, folder, seed)
        self._folder = folder
        self._store = store
        self._plan = plan
        self._steady: list[Fork] = []
        self.deaths: dict[str, int] = {}
        """How many workers died at each failpoint."""
        self.seconds: dict[str, float] = {}

    @property
    def events(self) -> list[Event]:
        return read_history([self._folder / "events"])

    @property
    def promises(self) -> Promises:
        plan = self._plan
        at_least = {"kill": plan.kills, "stop": plan.stops}
        if self._store.server is not None:
            at_least["restart"] = plan.restarts
        return Promises(
            max_crashes=MANY_CRASHES,
            recovery=LEASE + self._store.lease_margin + POLL + plan.slack,
            drain=DRAIN_SECONDS,
            at_least=at_least,
            failpoints=failpoints_of(self._store.backend) if plan.point_kills else (),
            passes=plan.point_kills,
        )

    def execute(self) -> Verdict:
        """Inject all faults, wait for recovery, and check the history."""
        self._await(self._factory.fork("setup", processes.create_store), "creating the store")
        try:
            steady = partial(processes.worker, failpoint_rules="*=count", notes_resources=True)
            self._steady = [self._factory.fork("steady", steady) for _ in range(_STEADY)]
            self._steady.append(self._factory.fork("stall_detector", processes.stall_detector))
            self._timed("kills", self._kill_at_random)
            self._timed("failpoints", self._kill_at_failpoints)
            self._timed("stops", self._stop_past_the_lease)
            if self._store.server is not None:
                self._timed("restarts", self._restart_the_server)
            self._timed("drain", self._drain)
        finally:
            for fork in self._steady:
                self._end(fork)
        self._await(self._factory.fork("reader", processes.reader), "the reader")
        return check(self.events, self.promises)

    def _timed(self, name: str, phase: Callable[[], None]) -> None:
        began = time.monotonic()
        phase()
        self.seconds[name] = time.monotonic() - began

    # Faults

    def _kill(self, fork: Fork) -> None:
        self._factory.journal.note("kill", value=fork.name)
        fork.signal(signal.SIGKILL)
        fork.wait(10)

    def _kill_at_random(self) -> None:
        """Kill workers, and sometimes the producer, each at a random instant of its life."""
        kills = self._plan.kills
        if not kills:
            return
        planner = partial(processes.planner, seconds=max(5.0, kills * 0.05))
        self._await(self._factory.fork("planner", planner), "the planner")
        producer = self._factory.fork("producer", processes.producer)
        alive: list[tuple[float, Fork]] = []
        longest = _LONGEST_LIFE[self._store.backend]
        for number in range(kills):
            while len(alive) < _VICTIMS:
                victim = self._factory.fork("victim", processes.worker)
                alive.append((time.monotonic() + self._draw.uniform(0, longest), victim))
            alive.sort(key=lambda one: one[0])
            due, victim = alive.pop(0)
            if number % 50 == 49:
                alive.insert(0, (due, victim))
                due, victim = time.monotonic(), producer
            time.sleep(max(0.0, due - time.monotonic()))
            self._kill(victim)
            if victim is producer:
                producer = self._factory.fork("producer", processes.producer)
        for _, victim in alive:
            self._kill(victim)
        self._end(producer)

    def _kill_at_failpoints(self) -> None:
        """Start workers that kill themselves at one failpoint, at one of its first three passes."""
        times = self._plan.point_kills
        if not times:
            return
        producer = self._factory.fork("producer", processes.producer)
        for name in failpoints_of(self._store.backend):
            if "schedule" in name:
                planner = partial(processes.planner, seconds=times * 1.5)
                self._await(self._factory.fork("planner", planner), "the planner")
            self.deaths[name] = 0
            for _ in range(0, times, _FAILPOINT_WORKERS):
                self.deaths[name] += self._die_at(name)
        self._end(producer)

    def _die_at(self, name: str) -> int:
        """Start some processes that die at a failpoint; return how many died in time."""
        role = processes.producer if "enqueue" in name else processes.worker
        failpoint_rules = [
            f"{name}=kill@{self._draw.randint(1, 3)}, *=count" for _ in range(_FAILPOINT_WORKERS)
        ]
        forks = [
            self._factory.fork("failpoint", partial(role, failpoint_rules=rule))
            for rule in failpoint_rules
        ]
        deadline = time.monotonic() + _POINT_PATIENCE
        while not all(fork.has_ended for fork in forks) and time.monotonic() < deadline:
            time.sleep(0.005)
        deaths = 0
        for fork in forks:
            if fork.was_killed:
                deaths += 1
                self._factory.journal.note("kill", value=fork.name)
            else:
                self._kill(fork)
        self._factory.journal.note("passed", value={name: deaths})
        return deaths

    def _stop_past_the_lease(self) -> None:
        """Stop several workers at a time until other workers have recovered their tasks."""
        stops = self._plan.stops
        if not stops:
            return
        victims = [self._factory.fork("pausing", processes.worker) for _ in range(5)]
        done = 0
        while done < stops:
            tasks = self._factory.fork("sleepers", processes.sleeper_tasks)
            self._await(tasks, "the producer")
            time.sleep(LEASE / 2)
            for victim in victims:
                self._factory.journal.note("stop", value=victim.name, until=STOP_SECONDS)
                victim.signal(signal.SIGSTOP)
                time.sleep(self._draw.uniform(0, 0.05))
            time.sleep(STOP_SECONDS)
            for victim in victims:
                victim.signal(signal.SIGCONT)
                self._factory.journal.note("cont", value=victim.name)
            done += len(victims)
            time.sleep(LEASE)
        for victim in victims:
            self._end(victim)

    def _restart_the_server(self) -> None:
        """Kill the server under load, and restart it with the same data."""
        producer = self._factory.fork("producer", processes.producer)
        for _ in range(self._plan.restarts):
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
        self._factory.journal.note("restart", value="server", until=away)

    # The end of the run

    def _drain(self) -> None:
        self._factory.journal.note("calm")
        waiter = partial(processes.waiter, seconds=DRAIN_SECONDS)
        fork = self._factory.fork("waiter", waiter)
        fork.wait(DRAIN_SECONDS + 10)
        self._kill_quietly(fork)

    def _end(self, fork: Fork) -> None:
        self._factory.journal.note("term", value=fork.name)
        fork.signal(signal.SIGTERM)
        if not fork.wait(15):
            self._kill(fork)

    def _await(self, fork: Fork, description: str) -> None:
        if not fork.wait(120) or fork.status:
            self._kill_quietly(fork)
            log = "\n".join(processes.lines_of(self._folder / "log")[-20:])
            raise RuntimeError(f"{description} failed:\n{log}")

    def _kill_quietly(self, fork: Fork) -> None:
        if not fork.has_ended:
            fork.signal(signal.SIGKILL)
            fork.wait(10)
