"""The figures of a peer on a store, one run at a time. Every run has an empty store."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import Failed, Producer, Workers, cpu_seconds, process_tree
from benchmarks.start_times import CAPACITY
from benchmarks.stores import Store

FIRST_START_SECONDS, POLL_SECONDS, REST_SECONDS = 30.0, 0.01, 1.0
STALLED_NANOSECONDS = 1_000_000_000

Measured = dict[str, float]


@dataclass(frozen=True)
class Scale:
    """The size and the longest time of one run: a slow peer is cut off, and its rate counts."""

    tasks: int
    seconds: float
    latencies: int = 70


@dataclass(frozen=True)
class Bench:
    """One peer on one store."""

    peer: str
    python: Path
    store: Store
    scale: Scale

    def enqueue(self, figure: str) -> Measured:
        """Measure tasks a second. Half the time is enough, since no worker has to start."""
        with self.store.fresh():
            producer = self.producer(figure, seconds=self.scale.seconds / 2)
            return {figure: producer.answer()}

    def drain(self, processes: int = 1) -> Measured:
        """Measure tasks a second from the first start to the last, and the CPU time of each."""
        with self.store.fresh():
            queued = self.fill()
            self.store.finish_background_work()
            found = self.watch(queued, self.scale.seconds, processes)
            self.check(queued)
        return found if processes == 1 else {"processes": found["drain"]}

    def fill(
        self, count: int | None = None, seconds: float | None = None, *, how: str = "fill"
    ) -> int:
        """Queue tasks in the fastest way the peer has; return how many were queued."""
        return int(self.producer(how, count, seconds).answer())

    def latency(self) -> Measured:
        with self.store.fresh():
            producer = self.producer("latency", self.scale.latencies, seconds=20)
            producer.await_line()
            try:
                with Workers(self.python, self.peer, self.store) as workers:
                    self.await_first_start(workers)
                    time.sleep(REST_SECONDS)
                    resident = workers.resident_megabytes()
                    producer.go()
                    found = producer.answer()
            except Failed:
                producer.close()
                raise
            self.check(self.scale.latencies)
        return {"latency": statistics.median(found), "rss": resident}

    def watch(
        self, count: int, seconds: float, processes: int = 1, *, among: int | None = None
    ) -> Measured:
        """Run workers until `count` tasks have started (of those `among`) or the time is over.

        With `among`, the store is used again: workers get the time to shut down properly.
        """
        is_patient, among = among is not None, among or count
        start_times = self.store.start_times
        with Workers(
            self.python, self.peer, self.store, processes, is_patient=is_patient
        ) as workers:
            self.await_first_start(workers)
            began, seen = time.monotonic(), start_times.count_started(among)
            worker, server = workers.cpu_seconds(), self._server_seconds()
            while (
                ran := start_times.count_started(among)
            ) < count and time.monotonic() < began + seconds:
                workers.check()
                time.sleep(POLL_SECONDS)
            worker, server = workers.cpu_seconds() - worker, self._server_seconds() - server
            ended = time.monotonic_ns()
        times = start_times.times(among)[: max(count, 2)]
        if len(times) < 2 or (ran < count and ended - times[-1] > STALLED_NANOSECONDS):
            raise Failed(f"{ran} of {count} tasks ran, then none for a second")
        costing = max(1, ran - seen)
        return {
            "drain": (len(times) - 1) / (times[-1] - times[0]) * 1e9,
            "cpu": worker / costing * 1e6,
            "server_cpu": server / costing * 1e6,
            "ran": ran,
        }

    def producer(
        self, figure: str, count: int | None = None, seconds: float | None = None
    ) -> Producer:
        count = self.scale.tasks if count is None else count
        seconds = self.scale.seconds if seconds is None else seconds
        return Producer(self.python, self.peer, self.store, figure, count, seconds)

    def await_first_start(self, workers: Workers) -> None:
        until = time.monotonic() + FIRST_START_SECONDS
        while not self.store.start_times.count_started(CAPACITY):
            workers.check()
            if time.monotonic() > until:
                raise Failed(f"no task started in {FIRST_START_SECONDS:g} seconds")
            time.sleep(POLL_SECONDS / 10)

    def check(self, count: int) -> None:
        if doubled := self.store.start_times.count_repeated(count):
            raise Failed(f"{doubled} of {count} tasks ran more than once")

    def _server_seconds(self) -> float:
        server = self.store.server
        return 0.0 if server is None else sum(map(cpu_seconds, process_tree(server.pid)))


def limit(store: Store, subject: str, figure: str, scale: Scale) -> Measured:
    """Measure the same figure for the bare driver, or the bare event loop."""
    with store.fresh():
        command = [sys.executable, "-m", "benchmarks.limits", subject, figure]
        found = subprocess.run(
            [*command, str(scale.tasks), str(scale.seconds)],
            env=store.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
    if found.returncode:
        raise Failed(found.stderr)
    return dict(json.loads(found.stdout))
