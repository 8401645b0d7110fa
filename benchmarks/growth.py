"""Does omniq stay as fast when the store holds many other tasks?

One store is filled in three stages: with more queued tasks than will run; then, when all of them
have run, with finished tasks; then also with tasks due in an hour. At each stage, the rate of
20,000 tasks there (4,000 on files) is compared with the same number in an empty store on the same
server, in interleaved pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.figures import Bench, Measured

FILL_SECONDS, DRAIN_SECONDS = 600.0, 600.0


def growth(full: Bench, others: int, pairs: int) -> Iterator[Measured]:
    """Yield the rate in the full store as a share of the rate alone, for each pair of each stage."""
    tasks = 4_000 if full.store.kind == "file" else 20_000
    alone = replace(full, store=full.store.beside())
    start_times, queued = full.store.start_times, others + pairs * tasks
    with full.store.fresh():
        left = full.fill(queued, FILL_SECONDS)
        for _ in range(pairs):
            alone_rate = _rate_alone(alone, tasks)
            yield {f"growth_queued_{others}": _rate(full, tasks, among=queued) / alone_rate}
            left -= start_times.count_started(queued)
            start_times.clear()
        full.watch(left, DRAIN_SECONDS, processes=2, among=queued)
        full.check(queued)
        for _ in range(pairs):
            alone_rate = _rate_alone(alone, tasks)
            yield {f"growth_finished_{others}": _rate_of_new(full, tasks) / alone_rate}
        full.fill(others, FILL_SECONDS, how="later")
        for _ in range(pairs):
            alone_rate = _rate_alone(alone, tasks)
            yield {f"growth_delayed_{others}": _rate_of_new(full, tasks) / alone_rate}


def _rate_alone(bench: Bench, tasks: int) -> float:
    with bench.store.fresh():
        return _rate_of_new(bench, tasks)


def _rate_of_new(bench: Bench, tasks: int) -> float:
    bench.store.start_times.clear()
    bench.fill(tasks, FILL_SECONDS)
    return _rate(bench, tasks, among=tasks)


def _rate(bench: Bench, tasks: int, *, among: int) -> float:
    bench.store.finish_background_work()
    rate = bench.watch(tasks, DRAIN_SECONDS, among=among)["drain"]
    bench.check(among)
    return rate
