"""A worker process whose tasks write a row in the transaction that completes them.

    python -m tests.faults.transaction_worker URL LEASE

Prints "ready" to its standard output, and works until it is killed.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys

from omniq import AsyncTaskQueue, TaskContext, task

INSERT = "INSERT INTO payments VALUES "


@task(max_retries=1000)
async def pay(ctx: TaskContext) -> None:
    async with ctx.transaction() as connection:
        if isinstance(connection, sqlite3.Connection):
            connection.execute(f"{INSERT} (?)", (ctx.task_id,))
        else:
            await connection.execute(f"{INSERT} ($1)", ctx.task_id)
        ctx.result = ctx.fencing_token


@task(max_retries=1000)
def pay_in_thread(ctx: TaskContext) -> None:
    with ctx.transaction() as connection:
        mark = "?" if isinstance(connection, sqlite3.Connection) else "$1"
        values = ((ctx.task_id,),) if mark == "?" else (ctx.task_id,)
        connection.execute(f"{INSERT} ({mark})", *values)
        ctx.result = ctx.fencing_token


async def main(url: str, lease: float) -> None:
    async with (
        AsyncTaskQueue(url) as queue,
        queue.worker(concurrency=4, poll_interval=0.1, base_retry_delay=0.01, lease=lease),
    ):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
