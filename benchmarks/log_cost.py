"""What the default log of `omniq worker` costs: `python -m benchmarks.log_cost`.

The command drains the same tasks with its default log, written to a file, and with the log off, in
turns. Prints the CPU time of the worker for each task in both cases, and the median of the paired
ratios, off to default, with its quartiles: 1 means that the log costs nothing, 0.85 is the bound.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.compare import measure
from benchmarks.stores import ROOT, Store, open_store

STORES = ("postgres", "redis", "sqlite-power")
BOUND = 0.85
_LEVELS = {"default": "", "off": "CRITICAL"}
"""Values of OMNIQ_LOG_LEVEL; empty is the default. Nothing is logged at CRITICAL."""


def compare(store: Store, *, count: int, rounds: int) -> float:
    """Measure both in turns, print a line, and return the median of the ratios."""
    spent: dict[str, list[float]] = {case: [] for case in _LEVELS}
    for number in range(rounds + 1):
        order = list(_LEVELS) if number % 2 else list(reversed(_LEVELS))
        for case in order:
            level = _LEVELS[case]
            cost = measure("drain", ROOT / "src", store, count, OMNIQ_LOG_LEVEL=level)["cpu"]
            if number:  # the first pair fills caches
                spent[case].append(cost)
    ratios = [off / on for off, on in zip(spent["off"], spent["default"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    on, off = (statistics.median(spent[case]) * 1e6 for case in ("default", "off"))
    print(
        f"{store.name:13} default log {on:.1f} µs a task, off {off:.1f} µs, log {on - off:.1f} µs; "
        f"off/default {middle:.3f} ({low:.3f} to {high:.3f})",
        flush=True,
    )
    return middle


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.log_cost", description=__doc__)
    parser.add_argument("--only", default=",".join(STORES), help="stores, with commas")
    parser.add_argument("--tasks", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    for name in given.only.split(","):
        with open_store(name) as store:
            ratio = compare(store, count=given.tasks, rounds=given.rounds)
            if ratio < BOUND:
                print(f"{name}: below the bound of {BOUND}")


if __name__ == "__main__":
    main()
