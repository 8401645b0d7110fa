"""`python -m chaos.soak`: does anything grow in processes that live long among others that do not?

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
from chaos.nemesis import DRAIN_SECONDS, STOP_SECONDS, Harm, Run
from chaos.picture import draw
from chaos.processes import LEASE, MANY_CRASHES, Fork
from chaos.stores import BACKENDS, Store, a_store
from chaos.verdict import Verdict

PICTURES = Path(__file__).parents[1] / "docs" / "images"
KEEP = 30
"""Seconds after which a finished task is forgotten: what grows is not the store."""

_AUDIT, _SAMPLE = 5.0, 5.0
_CALM = partial(processes.producer, pause=1.0)
_FIRE = 5.0
_STOP_EVERY, _RESTART_EVERY = 45.0, 240.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Soak(Run):
    """A worker, a producer and a reader that are left alone, for so many minutes, among others
    that are killed and stopped at a calm rate."""

    def __init__(self, store: Store, folder: Path, seed: int, minutes: float) -> None:
        super().__init__(store, folder, seed, Harm(point_kills=0))
        self._minutes = minutes
        self._sampled = 0.0
        self._watched: dict[str, Fork] = {}

    def soak(self) -> None:
        """Do a little harm all the time, let the fleet recover, and have its store read."""
        seconds = self._minutes * 60
        self._await(self._nursery.fork("founder", processes.founder), "the founder")
        try:
            planner = partial(processes.planner, seconds=seconds, every=_FIRE)
            self._await(self._nursery.fork("planner", planner), "the planner")
            self._watched = dict(self._start())
            self._steady = list(self._watched.values())
            self._steady.append(self._nursery.fork("metronome", processes.metronome))
            self._harm_until(time.monotonic() + seconds)
            self._end(self._watched.pop("producer"))
            self._drain()
        finally:
            for fork in self._steady:
                self._end(fork)
        self._await(self._nursery.fork("reader", processes.reader), "the reader")

    def _start(self) -> Iterator[tuple[str, Fork]]:
        """Those that are left alone, by what they are."""
        auditor = partial(processes.auditor, every=_AUDIT, keep=KEEP)
        yield "worker", self._nursery.fork("steady", processes.worker)
        yield "producer", self._nursery.fork("producer", _CALM)
        yield "reader", self._nursery.fork("auditor", auditor)

    def _harm_until(self, end: float) -> None:
        now = time.monotonic()
        stop_at, restart_at = now + _STOP_EVERY / 2, now + _RESTART_EVERY / 2
        pausing = self._nursery.fork("pausing", processes.worker)
        while time.monotonic() < end:
            role = _CALM if self._draw.random() < 0.2 else processes.worker
            victim = self._nursery.fork("victim", role)
            self._pass(self._draw.uniform(0.2, 6.0))
            self._kill(victim)
            self._pass(self._draw.uniform(0.5, 6.0))
            if time.monotonic() >= stop_at:
                stop_at += _STOP_EVERY
                self._stop(pausing)
            if time.monotonic() >= restart_at and self._store.server is not None:
                restart_at += _RESTART_EVERY
                self._restart()
        self._end(pausing)

    def _pass(self, seconds: float) -> None:
        """Let time pass, and look now and then at those that are left alone."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            due = self._sampled + _SAMPLE - time.monotonic()
            if due <= 0:
                self._sampled = time.monotonic()
                self._sample()
            time.sleep(min(left, max(due, 0.0)))

    def _sample(self) -> None:
        for name, fork in self._watched.items():
            if fork.has_ended:
                raise RuntimeError(f"the {name} ended by itself: {self._folder / 'log'}")
        taken = {name: _taken_by(fork.pid) for name, fork in self._watched.items()}
        self._nursery.journal.note("sample", value=taken)

    def _stop(self, victim: Fork) -> None:
        """Stop a worker past its lease while it runs something."""
        self._await(self._nursery.fork("sleepers", processes.sleeper_tasks), "the producer")
        self._pass(LEASE / 2)
        self._nursery.journal.note("stop", value=victim.name, until=STOP_SECONDS)
        victim.signal(signal.SIGSTOP)
        self._pass(STOP_SECONDS)
        victim.signal(signal.SIGCONT)
        self._nursery.journal.note("cont", value=victim.name)


def judged(events: Sequence[Event]) -> Verdict:
    """What the history of a soak comes to: nothing lost, nothing grown, and enough harm done."""
    curves = curves_of(events)
    promises = Promises(
        max_crashes=MANY_CRASHES,
        drain=DRAIN_SECONDS,
        forgets=True,
        at_least={"kill": int(curves.minutes * 5), "stop": int(curves.minutes)},
    )
    verdict = check(events, promises)
    verdict.violations.extend(curves.growth())
    return verdict


def _taken_by(pid: int) -> dict[str, float]:
    """What a process has of memory, files and threads, as the system counts them."""
    place = Path("/proc") / str(pid)
    pages = int((place / "statm").read_text().split()[1])
    return {
        "megabytes": round(pages * _PAGE / 1e6, 2),
        "files": len(os.listdir(place / "fd")),
        "threads": len(os.listdir(place / "task")),
    }


def main() -> int:
    options = _parse()
    folder = options.again or play(options)
    events = read_history([folder / "events"])
    verdict, curves = judged(events), curves_of(events)
    print(f"soak on {options.backend}, {curves.minutes:.0f} minutes, seed {options.seed}")
    for line in (*verdict.lines(), *_lines(curves)):
        print(f"  {line}")
    for event in verdict.counter_example:
        print(f"    {msgspec.json.encode(event).decode()}")
    publish(options, verdict, curves)
    if verdict.is_good and not options.again:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"  its history is kept in {folder}")
    print("soak: " + ("nothing lost, nothing grows" if verdict.is_good else "BROKEN"))
    return int(not verdict.is_good)


def play(options: argparse.Namespace) -> Path:
    """The folder with the history of a run."""
    folder = Path(tempfile.mkdtemp(prefix=f"omniq-soak-{options.backend}-"))
    began = time.monotonic()
    with a_store(options.backend, folder) as store:
        mark = "&" if "?" in store.url else "?"
        store = replace(store, url=f"{store.url}{mark}result_ttl={KEEP}")
        Soak(store, folder, options.seed, options.minutes).soak()
    busy = _processor_seconds() / (time.monotonic() - began)
    print(f"processor: {busy:.1%} of one core")
    return folder


def _lines(curves: Curves) -> Iterator[str]:
    for name, whole in curves.processes.items():
        curve = whole.after(curves.warm_up)
        files, threads = levels(curve.files), levels(curve.threads)
        yield (
            f"{name}: {curve.megabytes[-1]:.1f} MB, {curve.slope:+.2f} MB an hour"
            f"{'' if curves.tells_of_memory else ' (too short to judge)'}, files up to {files[0]}, "
            f"then {files[1]} at least, threads up to {threads[0]}, then {threads[1]} at least"
        )
    first, last = curves.rows_kept()
    yield f"rows kept: {first:.0f}, then {last:.0f}"


def _processor_seconds() -> float:
    """Of this process and all it started that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def publish(options: argparse.Namespace, verdict: Verdict, curves: Curves) -> None:
    """The picture, and the figures beside it."""
    options.into.mkdir(parents=True, exist_ok=True)
    place = options.into / f"soak-{options.backend}.svg"
    place.write_text(draw(curves, options.backend), encoding="utf-8")
    figures = msgspec.json.encode(_figures(options, verdict, curves))
    place.with_suffix(".json").write_bytes(msgspec.json.format(figures, indent=1) + b"\n")


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
        "--again", type=Path, help="the folder of a run, to judge and draw it again"
    )
    parser.add_argument("--into", type=Path, default=PICTURES, help="where the picture goes")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
