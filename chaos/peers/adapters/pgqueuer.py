"""PgQueuer: `Queries.enqueue` and `PgQueuer.run`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import timedelta

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from chaos.peers.workload import CONCURRENCY, SETTINGS, URL, acknowledged, run_async, tasks


async def consumer() -> PgQueuer:
    pgq = PgQueuer(AsyncpgDriver(await asyncpg.connect(URL)))

    @pgq.entrypoint("work_on", on_failure="hold")
    async def work_on(job: Job) -> None:
        await run_async(*json.loads(job.payload or b""))

    return pgq


async def _produce() -> None:
    queries = Queries(AsyncpgDriver(await asyncpg.connect(URL)))
    await queries.install()
    for task_id, seconds in tasks():
        await queries.enqueue("work_on", json.dumps([task_id, seconds]).encode())
        acknowledged(task_id)


def produce() -> None:
    asyncio.run(_produce())


async def _work() -> None:
    options = {name: timedelta(seconds=value) for name, value in SETTINGS.items()}
    # The limit has to be at least twice the size of a batch.
    await (await consumer()).run(
        batch_size=CONCURRENCY // 2, max_concurrent_tasks=CONCURRENCY, **options
    )


def work() -> None:
    asyncio.run(_work())


async def _left() -> list[tuple[str, str]]:
    connection = await asyncpg.connect(URL)
    rows = await connection.fetch("SELECT status::text, payload FROM pgqueuer")
    return [
        ("failed" if status == "failed" else "held", json.loads(payload)[0])
        for status, payload in rows
    ]


def left() -> Iterator[tuple[str, str]]:
    yield from asyncio.run(_left())
