"""`python -m benchmarks`: omniq beside the bare drivers and, with `--peers`, beside other queues.

make bench                                    omniq and the raw drivers
make bench PEERS=1                            also the peers; writes RESULTS.md and results.json
make bench PEERS=1 ARGS='--only postgres,redis --figures drain,latency --tasks 20000'
python -m benchmarks --page                   write RESULTS.md again from results.json
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.environments import EnvironmentFailed
from benchmarks.figures import Bench, Measured, Scale, limit
from benchmarks.growth import growth
from benchmarks.measurements import Numbers
from benchmarks.page import page
from benchmarks.processes import Failed
from benchmarks.registry import OMNIQ, Peer, all_peers
from benchmarks.stores import STORES, Store, open_store
from benchmarks.targets import check_targets, in_unit

HERE = Path(__file__).parent
FIGURES = ("drain", "processes", "bulk", "single", "together", "latency", "growth")
GROWTH_TASKS = {
    "postgres": 1_000_000,
    "redis": 1_000_000,
    "sqlite-power": 1_000_000,
    "file-os": 100_000,
}
DRAIN_ONLY = {"memory", "redis-always"}


class Run:
    """One run of the command: its stores, figures and subjects, and the measured numbers."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.numbers = Numbers({})
        self._began = time.monotonic()
        selected = {
            name: peer for name, peer in all_peers().items() if name == OMNIQ or options.peers
        }
        self.peers = {name: peer for name, peer in selected.items() if self._is_installed(peer)}

    def measure(self) -> Numbers:
        self.numbers.about = self._about()
        for name in self.options.only:
            with open_store(name) as store:
                self.numbers.about["servers"][name] = store.version()
                for number in range(self.options.rounds):
                    for figure in self.options.figures:
                        self._take_round(store, figure, number + 1)
                if "growth" in self.options.figures:
                    self._measure_growth(store)
        return self.numbers

    def _is_installed(self, peer: Peer) -> bool:
        """Return whether it has an environment; create one if necessary."""
        try:
            peer.python()
        except EnvironmentFailed as error:
            self.numbers.failures[f"any {peer.name} figure"] = "it could not be installed"
            self._say(f"{peer.name}: {error}")
            return False
        return True

    def _take_round(self, store: Store, figure: str, number: int) -> None:
        for subject in self._subjects(store, figure):
            key = f"{store.name} {subject} {figure}"
            if key in self.numbers.failures:
                continue
            try:
                measured = self._measure_subject(store, subject, figure)
            except Failed as error:
                self._note_failure(key, error)
                continue
            self.numbers.add(store.name, subject, measured)
            self._say(f"{number} {key} {_formatted(measured)}")

    def _note_failure(self, key: str, error: Failed) -> None:
        """Put the last line of the error on the page, and print all of it here."""
        lines = str(error).splitlines() or ["no output"]
        self.numbers.failures[key] = lines[-1][:200]
        self._say(f"{key} failed: {error}")

    def _subjects(self, store: Store, figure: str) -> Iterator[str]:
        """Yield the subjects that have this figure on that store, in the order of a round."""
        if figure == "growth" or (store.name in DRAIN_ONLY and figure != "drain"):
            return
        if store.name == "memory":
            yield from ("omniq", "bare")
            return
        for peer in self.peers.values():
            if store.name in peer.stores and _can(peer, store, figure):
                yield peer.name
        if figure in ("drain", "bulk", "single"):
            yield "raw"

    def _measure_subject(self, store: Store, subject: str, figure: str) -> Measured:
        scale = self._scale(store)
        if subject not in self.peers or store.name == "memory":
            return limit(store, subject, figure, scale)
        bench = self._bench(store, subject, scale)
        match figure:
            case "drain":
                return bench.drain()
            case "processes":
                return bench.drain(processes=2)
            case "latency":
                return bench.latency()
            case _:
                return bench.enqueue(figure)

    def _measure_growth(self, store: Store) -> None:
        if store.name not in GROWTH_TASKS:
            return
        others = self.options.others or GROWTH_TASKS[store.name]
        bench = self._bench(store, OMNIQ, self._scale(store))
        try:
            for measured in growth(bench, others, self.options.rounds):
                self.numbers.add(store.name, OMNIQ, measured)
                self._say(f"  {store.name} {_formatted(measured)}")
        except Failed as error:
            self._note_failure(f"{store.name} {OMNIQ} growth", error)

    def _scale(self, store: Store) -> Scale:
        most = self.options.file_tasks if store.kind == "file" else self.options.tasks
        return Scale(min(self.options.tasks, most), self.options.seconds)

    def _bench(self, store: Store, name: str, scale: Scale) -> Bench:
        return Bench(name, self.peers[name].python(), store, scale)

    def _about(self) -> dict[str, Any]:
        return {
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "load": round(os.getloadavg()[0], 1),
            "machine": _machine(),
            "rounds": self.options.rounds,
            "tasks": self.options.tasks,
            "file_tasks": min(self.options.tasks, self.options.file_tasks),
            "seconds": self.options.seconds,
            "versions": {name: peer.versions() for name, peer in self.peers.items()},
            "servers": {},
        }

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.0f} s  {text}", file=sys.stderr, flush=True)


def _can(peer: Peer, store: Store, figure: str) -> bool:
    match figure:
        case "bulk":
            return peer.has_bulk
        case "together":
            return peer.is_async
        case "single":
            # An awaited call cannot be compared with a blocking one; these stores have only blocking peers.
            return peer.is_async or store.kind in ("sqlite", "file")
        case "processes":
            return peer.name == OMNIQ and store.kind in ("postgres", "redis")
        case _:
            return True


def _formatted(measured: Measured) -> str:
    return "  ".join(f"{name} {value:,.5g}" for name, value in measured.items())


def _machine() -> str:
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(": ")[2]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} cores ({model}), {memory:.0f} GiB, {platform.system()} "
        f"{platform.release()}, Python {platform.python_version()}"
    )


def show(numbers: Numbers, peers: dict[str, Peer]) -> None:
    """Print one table of the targets that were measured."""
    print(f"{'figure':36} {'target':>10} {'measured':>10}  compared with")
    for target in check_targets(numbers, peers):
        if target.value is not None:
            flag = " " if target.is_met else "!"
            value = in_unit(target.value, target.unit)
            print(f"{target.figure:36} {target.goal:>10} {value:>10} {flag} {target.against}")


def parse() -> argparse.Namespace:
    def names(known: tuple[str, ...]) -> Callable[[str], list[str]]:
        def split(text: str) -> list[str]:
            wanted = text.split(",")
            if unknown := [name for name in wanted if not any(k.startswith(name) for k in known)]:
                raise argparse.ArgumentTypeError(f"{unknown[0]} is not one of {', '.join(known)}")
            return [name for name in known if any(name.startswith(each) for each in wanted)]

        return split

    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("--peers", action="store_true", help="measure the peers, write the results")
    parser.add_argument(
        "--only",
        type=names(STORES),
        default=list(STORES),
        help="stores, or prefixes of their names: a,b",
    )
    parser.add_argument("--figures", type=names(FIGURES), default=list(FIGURES), help="a,b")
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--file-tasks", type=int, default=20_000, help="the same, for files")
    parser.add_argument("--seconds", type=float, default=3.0, help="longest fill or drain")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--others", type=int, help="other tasks for the growth figures")
    parser.add_argument("--results", type=Path, help="file for the numbers: results.json")
    parser.add_argument("--page", action="store_true", help="only write the page again")
    return parser.parse_args()


def main() -> None:
    options = parse()
    # Workers are in separate sessions: this process must end them when it is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    peers = all_peers()
    path = options.results or HERE / "results.json"
    numbers = Numbers.read(path)
    if not options.page:
        newer = Run(options).measure()
        show(newer, peers)
        if not options.peers and not options.results:
            return
        numbers.update(newer)
        numbers.write(path)
    if path == HERE / "results.json":
        (HERE / "RESULTS.md").write_text(page(numbers, peers), encoding="utf-8")
    else:
        path.with_suffix(".md").write_text(page(numbers, peers), encoding="utf-8")


if __name__ == "__main__":
    main()
