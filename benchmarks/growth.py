"""Does omniq stay as fast when there is much beside what it runs?

One store is made crowded in three stages: with more queued than will run; then, when all of that
has run, with finished tasks; then with tasks due in an hour as well. At each stage, the rate of
20,000 tasks there (of 4,000 files) is compared with that of as many in an empty store on the same
server, in interleaved pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.figures import Bench, Measured

FILL_SECONDS, DRAIN_SECONDS = 600.0, 600.0


def growth(crowded: Bench, others: int, pairs: int) -> Iterator[Measured]:
    """One of each stage for each pair: the crowded rate as a share of the lonely one."""
    tasks = 4_000 if crowded.store.kind == "file" else 20_000
    alone = replace(crowded, store=crowded.store.beside())
    marks, queued = crowded.store.marks, others + pairs * tasks
    with crowded.store.fresh():
        left = crowded.fill(queued, FILL_SECONDS)
        for _ in range(pairs):
            lonely = _rate_alone(alone, tasks)
            yield {f"growth_queued_{others}": _rate(crowded, tasks, among=queued) / lonely}
            left -= marks.ran(queued)
            marks.clear()
        crowded.watch(left, DRAIN_SECONDS, processes=2, among=queued)
        crowded.check(queued)
        for _ in range(pairs):
            lonely = _rate_alone(alone, tasks)
            yield {f"growth_finished_{others}": _rate_of_new(crowded, tasks) / lonely}
        crowded.fill(others, FILL_SECONDS, how="later")
        for _ in range(pairs):
            lonely = _rate_alone(alone, tasks)
            yield {f"growth_delayed_{others}": _rate_of_new(crowded, tasks) / lonely}


def _rate_alone(bench: Bench, tasks: int) -> float:
    with bench.store.fresh():
        return _rate_of_new(bench, tasks)


def _rate_of_new(bench: Bench, tasks: int) -> float:
    bench.store.marks.clear()
    bench.fill(tasks, FILL_SECONDS)
    return _rate(bench, tasks, among=tasks)


def _rate(bench: Bench, tasks: int, *, among: int) -> float:
    bench.store.settle()
    rate = bench.watch(tasks, DRAIN_SECONDS, among=among)["drain"]
    bench.check(among)
    return rate
