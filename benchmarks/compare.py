"""Compare this checkout with an older commit: `python -m benchmarks.compare REVISION`.

For each store and round, both versions drain the same number of tasks, each with `omniq worker`,
100 tasks at a time and log lines included; which of the two goes first alternates. Prints the medians of the
paired ratios, older to newer (above 1: this checkout spends less), with their quartiles, for the
worker's CPU time, the elapsed time, and its read and write system calls and bytes. The memory store
is drained by a pool in the process that filled it.
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
from contextlib import contextmanager
from pathlib import Path

from benchmarks.stores import ROOT, Store, open_store

DEFAULT_STORES = ("memory", "sqlite-power", "file-power", "postgres", "redis")
FIGURES = ("cpu", "seconds", "calls", "bytes")
CONCURRENCY = "100"
_DEADLINE = 300.0

_FILL = """
import asyncio, sys
from omniq import AsyncTaskQueue
from benchmarks.compare_tasks import noop

async def main(url, count, is_drained_here):
    async with AsyncTaskQueue(url) as queue:
        for first in range(0, count, 1000):
            numbers = range(first, min(count, first + 1000))
            await queue.enqueue_many(noop, [(number,) for number in numbers])
        if is_drained_here:
            async with queue.worker(concurrency=100) as pool:
                await pool.run_until_empty()

asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "here"))
"""


def url_of(store: Store) -> str:
    """The address that users would write for the store of this run."""
    durability = store.name.partition("-")[2]
    return {
        "memory": "memory://",
        "sqlite": f"sqlite:///{store.folder}/omniq.db?durability={durability}",
        "file": f"file://{store.folder}/omniq?durability={durability}",
    }.get(store.kind, store.url)


def drain(source: Path, store: Store, count: int) -> dict[str, float]:
    """Fill an empty store, drain it with the omniq of `source`, and return what the worker spent."""
    with store.fresh():
        report = store.folder / "report.json"
        environment = {
            **os.environ,
            "PYTHONPATH": f"{source}{os.pathsep}{ROOT}",
            "COMPARE_TASKS": str(count),
            "COMPARE_REPORT": str(report),
        }
        url = url_of(store)
        where = "here" if store.kind == "memory" else "elsewhere"
        log = store.folder / "log"
        with log.open("wb") as output:
            fill = [sys.executable, "-c", _FILL, url, str(count), where]
            if subprocess.run(fill, env=environment, stderr=output, check=False).returncode:
                raise SystemExit(f"the store was not filled:\n{_end(log)}")
            if store.kind != "memory":
                store.finish_background_work()
                command = [sys.executable, "-m", "omniq", "worker", "benchmarks.compare_tasks"]
                worker = subprocess.Popen(
                    [*command, "--url", url, "--concurrency", CONCURRENCY],
                    env=environment,
                    stderr=output,
                )
                try:
                    _wait_for(report, worker, log)
                finally:
                    worker.terminate()
                    worker.wait()
        spent: dict[str, float] = json.loads(report.read_text())
        return {name: value / count for name, value in spent.items()}


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


def compare(older: Path, store: Store, *, count: int, rounds: int) -> None:
    """Drain with both versions, in turns, and print a line for each figure."""
    newer = ROOT / "src"
    ratios: dict[str, list[float]] = {figure: [] for figure in FIGURES}
    spent: dict[str, list[float]] = {figure: [] for figure in FIGURES}
    for number in range(rounds + 1):
        order = (older, newer) if number % 2 else (newer, older)
        measured = {source: drain(source, store, count) for source in order}
        if number == 0:
            continue  # the first pair fills caches
        for figure in FIGURES:
            spent[figure].append(measured[newer][figure])
            if measured[newer][figure]:
                ratios[figure].append(measured[older][figure] / measured[newer][figure])
    for figure in FIGURES:
        values = ratios[figure]
        if values:
            low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
            now = statistics.median(spent[figure])
            print(
                f"{store.name:13} {figure:8} older/newer {middle:.3f} ({low:.3f} to {high:.3f}), "
                f"now {now * 1e6 if figure in ('cpu', 'seconds') else now:.1f}"
                f"{' µs' if figure in ('cpu', 'seconds') else ''} a task",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("revision", help="the older commit")
    parser.add_argument("--only", default=",".join(DEFAULT_STORES), help="stores, with commas")
    parser.add_argument("--tasks", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    with checkout(given.revision) as older:
        for name in given.only.split(","):
            with open_store(name) as store:
                compare(older, store, count=given.tasks, rounds=given.rounds)


if __name__ == "__main__":
    main()
