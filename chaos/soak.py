"""`python -m chaos.soak`: does anything grow in long-lived processes while others are killed?

make soak MINUTES=60           SQLite
python -m chaos.soak --minutes 60 --backend postgres
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from chaos import processes
from chaos.checker import Promises, check
from chaos.curves import Curves, curves_of, levels
from chaos.history import Event, read_history
from chaos.nemesis import DRAIN_SECONDS, STOP_SECONDS, FaultPlan, Run
from chaos.processes import LEASE, MANY_CRASHES, Fork
from chaos.soak_chart import draw
from chaos.stores import BACKENDS, Store, open_store
from chaos.verdict import Verdict

CHARTS = Path(__file__).parents[1] / "docs" / "images"
KEEP = 30
"""Seconds after which a finished task is purged, so that the store does not grow."""

_AUDIT, _SAMPLE = 5.0, 5.0
_SLOW_PRODUCER = partial(processes.producer, pause=1.0)
_FIRE = 5.0
_STOP_EVERY, _RESTART_EVERY = 45.0, 240.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Soak(Run):
    """A worker, a producer and a reader that run undisturbed for some minutes, while others beside
    them are killed and stopped at a low rate."""

    def __init__(self, store: Store, folder: Path, seed: int, minutes: float) -> None:
        super().__init__(store, folder, seed, FaultPlan(point_kills=0))
        self._minutes = minutes
        self._sampled = 0.0
        self._undisturbed: dict[str, Fork] = {}

    def soak(self) -> None:
        """Inject faults at a low rate, wait for recovery, and record the contents of the store."""
        seconds = self._minutes * 60
        self._await(self._factory.fork("setup", processes.create_store), "creating the store")
        try:
            planner = partial(processes.planner, seconds=seconds, every=_FIRE)
            self._await(self._factory.fork("planner", planner), "the planner")
            self._undisturbed = dict(self._start())
            self._steady = list(self._undisturbed.values())
            self._steady.append(self._factory.fork("stall_detector", processes.stall_detector))
            self._inject_faults_until(time.monotonic() + seconds)
            self._end(self._undisturbed.pop("producer"))
            self._drain()
        finally:
            for fork in self._steady:
                self._end(fork)
        self._await(self._factory.fork("reader", processes.reader), "the reader")

    def _start(self) -> Iterator[tuple[str, Fork]]:
        """Start the undisturbed processes; yield their names."""
        auditor = partial(processes.auditor, every=_AUDIT, keep=KEEP)
        yield "worker", self._factory.fork("steady", processes.worker)
        yield "producer", self._factory.fork("producer", _SLOW_PRODUCER)
        yield "reader", self._factory.fork("auditor", auditor)

    def _inject_faults_until(self, end: float) -> None:
        now = time.monotonic()
        stop_at, restart_at = now + _STOP_EVERY / 2, now + _RESTART_EVERY / 2
        pausing = self._factory.fork("pausing", processes.worker)
        while time.monotonic() < end:
            role = _SLOW_PRODUCER if self._draw.random() < 0.2 else processes.worker
            victim = self._factory.fork("victim", role)
            self._wait(self._draw.uniform(0.2, 6.0))
            self._kill(victim)
            self._wait(self._draw.uniform(0.5, 6.0))
            if time.monotonic() >= stop_at:
                stop_at += _STOP_EVERY
                self._stop(pausing)
            if time.monotonic() >= restart_at and self._store.server is not None:
                restart_at += _RESTART_EVERY
                self._restart()
        self._end(pausing)

    def _wait(self, seconds: float) -> None:
        """Wait that long, and sample the undisturbed processes at intervals."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            due = self._sampled + _SAMPLE - time.monotonic()
            if due <= 0:
                self._sampled = time.monotonic()
                self._sample()
            time.sleep(min(left, max(due, 0.0)))

    def _sample(self) -> None:
        for name, fork in self._undisturbed.items():
            if fork.has_ended:
                raise RuntimeError(f"the {name} ended by itself: {self._folder / 'log'}")
        taken = {name: _usage_of(fork.pid) for name, fork in self._undisturbed.items()}
        self._factory.journal.note("sample", value=taken)

    def _stop(self, victim: Fork) -> None:
        """Stop a worker past its lease while it runs tasks."""
        self._await(self._factory.fork("sleepers", processes.sleeper_tasks), "the producer")
        self._wait(LEASE / 2)
        self._factory.journal.note("stop", value=victim.name, until=STOP_SECONDS)
        victim.signal(signal.SIGSTOP)
        self._wait(STOP_SECONDS)
        victim.signal(signal.SIGCONT)
        self._factory.journal.note("cont", value=victim.name)


def judge(events: Sequence[Event]) -> Verdict:
    """Check the history of a soak: nothing lost, nothing grown, and enough faults."""
    curves = curves_of(events)
    promises = Promises(
        max_crashes=MANY_CRASHES,
        drain=DRAIN_SECONDS,
        purges_finished=True,
        at_least={"kill": int(curves.minutes * 5), "stop": int(curves.minutes)},
    )
    verdict = check(events, promises)
    verdict.violations.extend(curves.growth())
    return verdict


def _usage_of(pid: int) -> dict[str, float]:
    """Return the memory, files and threads of a process, as the system counts them."""
    folder = Path("/proc") / str(pid)
    pages = int((folder / "statm").read_text().split()[1])
    return {
        "megabytes": round(pages * _PAGE / 1e6, 2),
        "files": len(os.listdir(folder / "fd")),
        "threads": len(os.listdir(folder / "task")),
    }


def main() -> int:
    options = _parse()
    folder = options.again or run_soak(options)
    events = read_history([folder / "events"])
    verdict, curves = judge(events), curves_of(events)
    print(f"soak on {options.backend}, {curves.minutes:.0f} minutes, seed {options.seed}")
    for line in (*verdict.lines(), *_lines(curves)):
        print(f"  {line}")
    for event in verdict.counter_example:
        print(f"    {msgspec.json.encode(event).decode()}")
    publish(options, verdict, curves)
    if verdict.is_good and not options.again:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"  its history is in {folder}")
    print("soak: " + ("nothing lost, nothing grows" if verdict.is_good else "BROKEN"))
    return int(not verdict.is_good)


def run_soak(options: argparse.Namespace) -> Path:
    """Run a soak; return the folder with its history."""
    folder = Path(tempfile.mkdtemp(prefix=f"omniq-soak-{options.backend}-"))
    began = time.monotonic()
    with open_store(options.backend, folder) as store:
        separator = "&" if "?" in store.url else "?"
        store = replace(store, url=f"{store.url}{separator}result_ttl={KEEP}")
        Soak(store, folder, options.seed, options.minutes).soak()
    busy = _cpu_seconds() / (time.monotonic() - began)
    print(f"CPU: {busy:.1%} of one core")
    return folder


def _lines(curves: Curves) -> Iterator[str]:
    for name, whole in curves.processes.items():
        curve = whole.after(curves.warm_up)
        files, threads = levels(curve.files), levels(curve.threads)
        yield (
            f"{name}: {curve.megabytes[-1]:.1f} MB, {curve.slope:+.2f} MB an hour"
            f"{'' if curves.is_long_enough_for_memory else ' (too short to judge)'}, files up to {files[0]}, "
            f"then {files[1]} at least, threads up to {threads[0]}, then {threads[1]} at least"
        )
    first, last = curves.rows_kept()
    yield f"rows kept: {first:.0f}, then {last:.0f}"


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def publish(options: argparse.Namespace, verdict: Verdict, curves: Curves) -> None:
    """Write the chart, and the figures beside it."""
    options.into.mkdir(parents=True, exist_ok=True)
    path = options.into / f"soak-{options.backend}.svg"
    path.write_text(draw(curves, options.backend), encoding="utf-8")
    figures = msgspec.json.encode(_figures(options, verdict, curves))
    path.with_suffix(".json").write_bytes(msgspec.json.format(figures, indent=1) + b"\n")


def _figures(options: argparse.Namespace, verdict: Verdict, curves: Curves) -> dict[str, Any]:
    warm = {name: curve.after(curves.warm_up) for name, curve in curves.processes.items()}
    return {
        "backend": options.backend,
        "seed": options.seed,
        "minutes": round(curves.minutes, 1),
        "good": verdict.is_good,
        "violations": [str(violation) for violation in verdict.violations],
        "tasks": verdict.tasks,
        "runs": verdict.runs,
        "lost": verdict.count("I1"),
        "duplicate_outcomes": verdict.count("I3"),
        "faults": verdict.faults,
        "rows_kept": [round(count) for count in curves.rows_kept()],
        "warm_up": curves.warm_up,
        "processes": {
            name: {
                "megabytes": curve.megabytes[-1],
                "megabytes_an_hour": curve.slope,
                "files": levels(curve.files),
                "threads": levels(curve.threads),
            }
            for name, curve in warm.items()
        },
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--backend", choices=BACKENDS, default="sqlite")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument(
        "--again", type=Path, help="the folder of a run, to check and draw it again"
    )
    parser.add_argument("--into", type=Path, default=CHARTS, help="folder for the chart")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
