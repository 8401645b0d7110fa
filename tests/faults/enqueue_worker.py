"""Workers for a task that enqueues others, forked one after the other so that each starts fast.

    python -m tests.faults.enqueue_worker URL LEASE

For each line of failpoints on its standard input it starts a worker process with them, waits until
that has ended, and prints its exit status.
"""

from __future__ import annotations

import asyncio
import os
import sys

from omniq import AsyncTaskQueue, Settings, TaskContext, failpoints, task
from omniq.storage import open_storage

ENQUEUES = 5
"""How often each of the tasks calls `ctx.enqueue` or `ctx.enqueue_many`."""


@task(queue="leaves")
async def leaf(number: int) -> int:
    return number


@task
async def from_loop(ctx: TaskContext) -> list[str]:
    first = await ctx.enqueue(leaf, 1)
    second = await ctx.options(name="second").enqueue(leaf, 200 + ctx.attempt)
    both = await ctx.enqueue_many(leaf, [3, 4])
    fifth, sixth = await asyncio.gather(ctx.enqueue(leaf, 5), ctx.enqueue(leaf, 5))
    return [handle.id for handle in (first, second, *both, fifth, sixth)]


@task
def from_thread(ctx: TaskContext) -> list[str]:
    first = ctx.enqueue(leaf, 1)
    second = ctx.options(name="second").enqueue(leaf, 200 + ctx.attempt)
    both = ctx.enqueue_many(leaf, [3, 4])
    fifth, sixth = ctx.enqueue(leaf, 5), ctx.enqueue(leaf, 5)
    return [handle.id for handle in (first, second, *both, fifth, sixth)]


@task(executor="process")
def from_process(ctx: TaskContext) -> list[str]:
    return from_thread(ctx)


async def serve(url: str, lease: float) -> None:
    """Run the task once; its worker may be killed meanwhile."""
    settings = Settings(max_crashes=10_000)
    async with (
        AsyncTaskQueue(url, settings=settings) as queue,
        queue.worker(queues=["default"], lease=lease, poll_interval=0.05),
    ):
        while not await has_ended(queue):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.02)


async def has_ended(queue: AsyncTaskQueue) -> bool:
    return all(each.status.is_final for each in await queue.list_tasks(queue="default"))


def main(url: str, lease: float) -> None:
    # Import the driver here, not in each worker.
    open_storage(url)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            failpoints.configure(line.strip())
            asyncio.run(serve(url, lease))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
