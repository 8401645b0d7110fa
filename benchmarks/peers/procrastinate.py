"""Procrastinate: 100 jobs at a time, uvloop, up to 10 connections."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from procrastinate import App, PsycopgConnector

from benchmarks.run_context import CONCURRENCY, URL, record_start

PACKAGES = ["procrastinate", "psycopg[binary]", "uvloop"]
STORES = ["postgres"]
KEEPS = "the row"

app = App(connector=PsycopgConnector(conninfo=URL, min_size=4, max_size=10))


@app.task(name="noop")
async def noop(number: int) -> None:
    record_start(number)


async def open() -> None:
    await app.open_async()
    await app.schema_manager.apply_schema_async()


async def close() -> None:
    await app.close_async()


async def one(number: int) -> None:
    await noop.defer_async(number=number)


async def many(numbers: Sequence[int]) -> None:
    await noop.batch_defer_async(*({"number": number} for number in numbers))


async def run() -> None:
    async with app.open_async():
        await app.run_worker_async(concurrency=CONCURRENCY)


def work() -> None:
    asyncio.run(run())
