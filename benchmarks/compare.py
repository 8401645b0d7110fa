"""Compare this checkout with an older commit: `python -m benchmarks.compare REVISION`.

For each store and round, both versions do the same work, and which of the two goes first alternates:
`omniq worker` drains tasks, 100 at a time and log lines included (`drain`), a producer enqueues 1,000
tasks a call (`bulk`) or one (`single`), or waits for the result of each task from a worker (`latency`).
Prints the medians of the paired ratios, older to newer (above 1: this checkout spends less), with their
quartiles, for the CPU time of the worker or producer and of the store's server, the elapsed time, and its
read and write system calls and bytes. The memory store is drained by a pool in the process that filled it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.stores import ROOT, Store, open_store

DEFAULT_STORES = ("memory", "sqlite-power", "file-power", "postgres", "redis")
_TASKS = {"drain": 1_000_000, "bulk": 1_000_000, "single": 2_000, "latency": 200}
"""What can be compared, and the number of tasks at most."""
FIGURES = ("cpu", "server", "seconds", "calls", "bytes")
TIMES = FIGURES[:3]
CONCURRENCY = "100"
_DEADLINE = 300.0


def url_of(store: Store) -> str:
    """The address that users would write for the store of this run."""
    durability = store.name.partition("-")[2]
    return {
        "memory": "memory://",
        "sqlite": f"sqlite:///{store.folder}/omniq.db?durability={durability}",
        "file": f"file://{store.folder}/omniq?durability={durability}",
    }.get(store.kind, store.url)


def measure(
    what: str, source: Path, store: Store, count: int, **variables: str
) -> dict[str, float]:
    """What one task costs with the omniq of `source` and these variables, on an empty store."""
    with store.fresh():
        report = store.folder / "report.json"
        environment = {
            **os.environ,
            "PYTHONPATH": f"{source}{os.pathsep}{ROOT}",
            "COMPARE_TASKS": str(count),
            "COMPARE_REPORT": str(report),
            "COMPARE_SERVER": "" if store.server is None else str(store.server.pid),
            **variables,
        }
        url = url_of(store)
        log = store.folder / "log"
        with log.open("wb") as output, ExitStack() as running:

            def start(*arguments: str) -> subprocess.Popen[bytes]:
                command = [sys.executable, "-m", *arguments]
                process = subprocess.Popen(command, env=environment, stderr=output)
                running.callback(_stop, process)
                return process

            def produce(what: str) -> None:
                if start("benchmarks.compare_producer", what, url, str(count)).wait():
                    raise SystemExit(f"the producer failed:\n{_end(log)}")

            worker = ("omniq", "worker", "benchmarks.compare_tasks", "--url", url)
            if what == "drain" and store.kind != "memory":
                produce("fill")
                store.finish_background_work()
                _wait_for(report, start(*worker, "--concurrency", CONCURRENCY), log)
            else:
                if what == "latency":
                    start(*worker)
                produce(what)
        spent: dict[str, float] = json.loads(report.read_text())
        return {name: value / count for name, value in spent.items()}


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()


def _wait_for(report: Path, worker: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _DEADLINE
    while not report.exists():
        if worker.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the worker did not drain the store:\n{_end(log)}")
        time.sleep(0.05)


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """The `src` folder of a commit, in a temporary git worktree."""
    with tempfile.TemporaryDirectory(prefix="omniq-compare-") as folder:
        tree = Path(folder, "tree")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", tree, revision], check=True)
        try:
            yield tree / "src"
        finally:
            subprocess.run([*git, "remove", "--force", tree], check=True)


def compare(what: str, older: Path, store: Store, *, count: int, rounds: int) -> None:
    """Measure both versions, in turns, and print a line for each figure."""
    newer = ROOT / "src"
    ratios: dict[str, list[float]] = {figure: [] for figure in FIGURES}
    spent: dict[str, list[float]] = {figure: [] for figure in FIGURES}
    for number in range(rounds + 1):
        order = (older, newer) if number % 2 else (newer, older)
        measured = {source: measure(what, source, store, count) for source in order}
        if number == 0:
            continue  # the first pair fills caches
        for figure in FIGURES:
            if measured[newer].get(figure):
                spent[figure].append(measured[newer][figure])
                ratios[figure].append(measured[older][figure] / measured[newer][figure])
    for figure in FIGURES:
        values = ratios[figure]
        if values:
            low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
            now = statistics.median(spent[figure])
            print(
                f"{store.name:13} {what:8} {figure:8} older/newer {middle:.3f} ({low:.3f} to {high:.3f}), "
                f"now {now * 1e6 if figure in ('cpu', 'seconds') else now:.1f}"
                f"{' µs' if figure in ('cpu', 'seconds') else ''} a task",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("revision", help="the older commit")
    parser.add_argument("--only", default=",".join(DEFAULT_STORES), help="stores, with commas")
    parser.add_argument("--what", default="drain", help=f"of {', '.join(_TASKS)}, with commas")
    parser.add_argument("--tasks", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    with checkout(given.revision) as older:
        for name in given.only.split(","):
            with open_store(name) as store:
                for what in given.what.split(","):
                    if what == "latency" and store.kind == "memory":
                        continue  # another process has no access to it
                    count = min(given.tasks, _TASKS[what])
                    compare(what, older, store, count=count, rounds=given.rounds)


if __name__ == "__main__":
    main()
