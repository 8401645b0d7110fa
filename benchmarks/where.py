"""Where the time of a task goes: `python -m benchmarks.where STORE [drain|bulk]`.

Runs omniq on that store as the benchmarks do, looks at its process 500 times a second (py-spy, in an environment
of its own), and prints the CPU of one task by the functions of omniq that spent it, each with all that it called.
What the process spent without the interpreter, in SQLite or in the system, is a line of its own. For a machine
that has nothing else to do: who holds the interpreter is looked at by the clock on the wall.
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
from benchmarks.roster import OMNIQ, roster
from benchmarks.stores import STORES, a_store

LOOKS_A_SECOND, MOST = 500, 5
TASKS, LONGEST_FILL, WARM_UP = 300_000, 60.0, 0.5
_HOME = "omniq/"

Seen = Counter[tuple[str, str]]


@dataclass(frozen=True)
class Spent:
    """What was seen of a process while it did `rate` tasks a second, `cpu` seconds each."""

    seen: Seen
    rate: float
    cpu: float


def places(folded: Iterable[str]) -> Seen:
    """How often each function of omniq, as (file, name), was the innermost one of omniq's.

    >>> dict(places(["run (asyncio/runners.py:1);Turns.claim (omniq/pool/turns.py:7);encode (m.py:2) 5"]))
    {('pool/turns.py', 'claim'): 5}
    """
    found: Seen = Counter()
    for line in folded:
        stack, _, count = line.rpartition(" ")
        frames = [frame.rpartition(" (") for frame in stack.split(";")]
        own = [(where, name) for name, _, where in frames if where.startswith(_HOME)]
        where, name = own[-1] if own else (_HOME + "none of it", frames[-1][0])
        file = where.removeprefix(_HOME).partition(":")[0]
        found[file, name.rpartition(".")[2]] += int(count)
    return found


def looked_at(pid: int, seconds: float) -> Seen:
    """What a process was at, look by look."""
    spy = environment("py-spy", ["py-spy"]).parent / "py-spy"
    with tempfile.TemporaryDirectory() as folder:
        seen = Path(folder, "seen")
        how = ["--gil", "-F", "-f", "raw", "-r", str(LOOKS_A_SECOND), "-d", f"{seconds:g}"]
        subprocess.run(
            [str(spy), "record", *how, "-o", str(seen), "-p", str(pid)],
            check=True,
            capture_output=True,
        )
        return places(seen.read_text().splitlines())


def drain(bench: Bench, seconds: float) -> Spent:
    """Of a worker that drains a queue of more than it can do in that time."""
    count = bench.fill(seconds=LONGEST_FILL)
    bench.store.settle()
    marks = bench.store.marks
    with Workers(bench.python, OMNIQ, bench.store) as workers:
        bench.await_mark(workers)
        time.sleep(WARM_UP)
        (pid,) = workers.pids()
        ran, spent, began = marks.ran(count), cpu_seconds(pid), time.monotonic()
        seen = looked_at(pid, seconds)
        ran, spent = marks.ran(count) - ran, cpu_seconds(pid) - spent
        return Spent(seen, ran / (time.monotonic() - began), spent / ran)


def bulk(bench: Bench, seconds: float) -> Spent:
    """Of a producer that enqueues 1,000 tasks with each call."""
    producer = bench.producer("bulk", TASKS, 2 * seconds)
    time.sleep(WARM_UP)
    spent, began = cpu_seconds(producer.pid), time.monotonic()
    seen = looked_at(producer.pid, seconds)
    share = (cpu_seconds(producer.pid) - spent) / (time.monotonic() - began)
    rate = producer.answer()
    return Spent(seen, rate, share / rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("store", choices=STORES[1:])
    parser.add_argument("what", choices=("drain", "bulk"), nargs="?", default="drain")
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    python = roster()[OMNIQ].python()
    with a_store(options.store) as store, store.fresh():
        bench = Bench(OMNIQ, python, store, Scale(TASKS, options.seconds))
        look = drain if options.what == "drain" else bulk
        spent = look(bench, options.seconds)
    print(f"{options.store}, {options.what}: {spent.cpu * 1e6:.1f} µs of CPU a task")
    for line in table(spent, options.seconds):
        print(line)


def table(spent: Spent, seconds: float) -> Iterator[str]:
    """Microseconds of one task by file, and by the functions there that take the most."""
    of_one_look = 1e6 / LOOKS_A_SECOND / seconds / spent.rate
    files: Counter[str] = Counter()
    for (file, _), looks in spent.seen.items():
        files[file] += looks
    rest = spent.cpu * 1e6 - files.total() * of_one_look
    yield f"{rest:6.1f}  without the interpreter"
    for file, looks in files.most_common():
        functions = [(name, count) for (of, name), count in spent.seen.most_common() if of == file]
        told = ", ".join(f"{name} {count * of_one_look:.1f}" for name, count in functions[:MOST])
        yield f"{looks * of_one_look:6.1f}  {file:32} {told}"


if __name__ == "__main__":
    main()
