"""PgQueuer: asyncpg, uvloop, batches of 100."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from benchmarks.run_context import CONCURRENCY, URL, record_start

PACKAGES = ["pgqueuer[asyncpg]", "uvloop"]
STORES = ["postgres"]
KEEPS = "a log row"

connection: asyncpg.Connection
queries: Queries


async def open() -> None:
    global connection, queries
    connection = await asyncpg.connect(URL)
    queries = Queries(AsyncpgDriver(connection))
    if not await connection.fetchval("SELECT to_regclass('pgqueuer')"):
        await queries.install()


async def close() -> None:
    await connection.close()


async def one(number: int) -> None:
    await queries.enqueue("noop", b"%d" % number)


async def many(numbers: Sequence[int]) -> None:
    count = len(numbers)
    payloads = [b"%d" % number for number in numbers]
    await queries.enqueue(["noop"] * count, payloads, [0] * count)


async def run() -> None:
    queuer = PgQueuer(AsyncpgDriver(await asyncpg.connect(URL)))

    @queuer.entrypoint("noop")
    async def noop(job: Job) -> None:
        record_start(int(job.payload or b""))

    await queuer.run(batch_size=CONCURRENCY)


def work() -> None:
    asyncio.run(run())
