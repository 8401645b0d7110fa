"""How long does `omniq check` take over a large storage? Prints seconds, and asserts nothing.

Fills an empty SQLite storage, in which one task of 1,000 is of a function that the code no longer has, and checks it as
before a deploy. Target: a million tasks in 60 seconds.

    python -m benchmarks.deploy_check [--tasks 1000000]
    OMNIQ_BENCH_URL=postgresql://… python -m benchmarks.deploy_check         # an empty store at that URL
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time

from omniq import AsyncTaskQueue, task

BULK = 1_000


@task(name="shop.mail")
async def mail(to: str, subject: str, copies: int = 1) -> None:
    """What the new code has."""


@task(name="shop.report")
async def report(month: int) -> None:
    """Another function, of a tenth of the tasks."""


async def fill(queue: AsyncTaskQueue, count: int) -> None:
    """Enqueue in bulk, and the one that cannot run."""
    for start in range(0, count, BULK):
        mails = [(f"user{start + each}@example.org", "hello") for each in range(BULK * 9 // 10 - 1)]
        await queue.enqueue_many(mail, mails)
        await queue.enqueue_many(report, [(each % 12,) for each in range(BULK // 10)])
        await queue.enqueue("shop.old_mail", f"user{start}@example.org")


async def measure(url: str, count: int) -> None:
    """Fill and check."""
    async with AsyncTaskQueue(url) as queue:
        await fill(queue, count)
        began, cpu = time.perf_counter(), time.process_time()
        found = await queue.check()
        seconds, spent = time.perf_counter() - began, time.process_time() - cpu
    (problem,) = found.problems
    print(f"{problem.count} of {found.tasks:,} cannot run: {problem.func_path}, {problem.problem}")
    each = 1e6 / count
    print(
        f"{count:,} tasks: {seconds:.1f} s, {seconds * each:.1f} µs each; CPU {spent * each:.1f} µs each"
    )


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deploy_check")
    parser.add_argument("--tasks", type=int, default=1_000_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="omniq-bench-") as folder:
        url = os.environ.get("OMNIQ_BENCH_URL") or f"sqlite:///{folder}/store.db?durability=os"
        asyncio.run(measure(url, given.tasks))


if __name__ == "__main__":
    main()
