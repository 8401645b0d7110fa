"""A profile of the CPU time of one task: `python -m benchmarks.cpu_profile STORE [drain|bulk]`.

Runs omniq on that store as the benchmarks do, samples its process 500 times a second (with py-spy, in a separate
environment), and prints the CPU time of one task by the functions of omniq, each with the functions it called outside
omniq. Time without the interpreter lock, in SQLite or in the system, is a separate line. Use it on an idle machine:
the samples are taken by wall-clock time.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environments import environment
from benchmarks.figures import Bench, Scale
from benchmarks.processes import Workers, cpu_seconds
from benchmarks.registry import OMNIQ, all_peers
from benchmarks.stores import STORES, open_store

SAMPLES_A_SECOND, MOST = 500, 5
TASKS, LONGEST_FILL, WARM_UP = 300_000, 60.0, 0.5
_HOME = "omniq/"

Seen = Counter[tuple[str, str]]


@dataclass(frozen=True)
class Spent:
    """The samples of a process that ran `rate` tasks a second, with `cpu` seconds each."""

    seen: Seen
    rate: float
    cpu: float


def samples_by_function(folded: Iterable[str]) -> Seen:
    """Count how often each function of omniq, as (file, name), was the innermost one of omniq.

    >>> dict(samples_by_function(["run (asyncio/runners.py:1);ClaimLoop.claim (omniq/worker/claim_loop.py:7);encode (m.py:2) 5"]))
    {('worker/claim_loop.py', 'claim'): 5}
    """
    found: Seen = Counter()
    for line in folded:
        stack, _, count = line.rpartition(" ")
        frames = [frame.rpartition(" (") for frame in stack.split(";")]
        own = [(position, name) for name, _, position in frames if position.startswith(_HOME)]
        position, name = own[-1] if own else (_HOME + "outside", frames[-1][0])
        file = position.removeprefix(_HOME).partition(":")[0]
        found[file, name.rpartition(".")[2]] += int(count)
    return found


def sample(pid: int, seconds: float) -> Seen:
    """Sample a process for that time."""
    spy = environment("py-spy", ["py-spy"]).parent / "py-spy"
    with tempfile.TemporaryDirectory() as folder:
        seen = Path(folder, "seen")
        options = ["--gil", "-F", "-f", "raw", "-r", str(SAMPLES_A_SECOND), "-d", f"{seconds:g}"]
        subprocess.run(
            [str(spy), "record", *options, "-o", str(seen), "-p", str(pid)],
            check=True,
            capture_output=True,
        )
        return samples_by_function(seen.read_text().splitlines())


def drain(bench: Bench, seconds: float) -> Spent:
    """Profile a worker that drains a queue with more tasks than it can run in that time."""
    count = bench.fill(seconds=LONGEST_FILL)
    bench.store.finish_background_work()
    start_times = bench.store.start_times
    with Workers(bench.python, OMNIQ, bench.store) as workers:
        bench.await_first_start(workers)
        time.sleep(WARM_UP)
        (pid,) = workers.pids()
        ran, spent, began = start_times.count_started(count), cpu_seconds(pid), time.monotonic()
        seen = sample(pid, seconds)
        ran, spent = start_times.count_started(count) - ran, cpu_seconds(pid) - spent
        return Spent(seen, ran / (time.monotonic() - began), spent / ran)


def bulk(bench: Bench, seconds: float) -> Spent:
    """Profile a producer that enqueues 1,000 tasks with each call."""
    producer = bench.producer("bulk", TASKS, 2 * seconds)
    time.sleep(WARM_UP)
    spent, began = cpu_seconds(producer.pid), time.monotonic()
    seen = sample(producer.pid, seconds)
    share = (cpu_seconds(producer.pid) - spent) / (time.monotonic() - began)
    rate = producer.answer()
    return Spent(seen, rate, share / rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("store", choices=STORES[1:])
    parser.add_argument("what", choices=("drain", "bulk"), nargs="?", default="drain")
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    python = all_peers()[OMNIQ].python()
    with open_store(options.store) as store, store.fresh():
        bench = Bench(OMNIQ, python, store, Scale(TASKS, options.seconds))
        profile = drain if options.what == "drain" else bulk
        spent = profile(bench, options.seconds)
    print(f"{options.store}, {options.what}: {spent.cpu * 1e6:.1f} µs of CPU a task")
    for line in table(spent, options.seconds):
        print(line)


def table(spent: Spent, seconds: float) -> Iterator[str]:
    """Yield the microseconds of one task by file, and by its most expensive functions."""
    of_one_sample = 1e6 / SAMPLES_A_SECOND / seconds / spent.rate
    files: Counter[str] = Counter()
    for (file, _), count in spent.seen.items():
        files[file] += count
    rest = spent.cpu * 1e6 - files.total() * of_one_sample
    yield f"{rest:6.1f}  without the interpreter"
    for file, count in files.most_common():
        functions = [(name, count) for (of, name), count in spent.seen.most_common() if of == file]
        listed = ", ".join(
            f"{name} {count * of_one_sample:.1f}" for name, count in functions[:MOST]
        )
        yield f"{count * of_one_sample:6.1f}  {file:32} {listed}"


if __name__ == "__main__":
    main()
