"""Workers are killed while their tasks write: each row is there once, whenever the kill came."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Protocol

import pytest

from omniq import AsyncTaskQueue, TaskStatus
from omniq.storage import open_storage
from tests.faults.paying_worker import pay, pay_in_thread

LEASE = 1.0
LONGEST_LIFE = 0.25
"""Seconds that a worker works, at most, before it is killed."""

BACKENDS = [
    name
    for name in ("sqlite", "postgres")
    if importlib.util.find_spec(f"omniq.storage.{name}") is not None
]


class Books(Protocol):
    """The table that the tasks write to, beside them in one database."""

    url: str

    async def open(self) -> None: ...

    async def paid(self) -> list[str]: ...


class SQLiteBooks:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "tasks.db"
        self.url = f"sqlite:///{self._path}?durability=os"

    async def open(self) -> None:
        with closing(sqlite3.connect(self._path)) as connection:
            connection.execute("CREATE TABLE payments (id TEXT)")

    async def paid(self) -> list[str]:
        with closing(sqlite3.connect(self._path)) as connection:
            return [task_id for (task_id,) in connection.execute("SELECT id FROM payments")]


class PostgresBooks:
    def __init__(self, url: str) -> None:
        self.url = url

    async def open(self) -> None:
        await self._fetch("CREATE TABLE payments (id TEXT)")

    async def paid(self) -> list[str]:
        return [row["id"] for row in await self._fetch("SELECT id FROM payments")]

    async def _fetch(self, sql: str) -> list[dict[str, str]]:
        import asyncpg

        connection = await asyncpg.connect(self.url)
        try:
            return [dict(row) for row in await connection.fetch(sql)]
        finally:
            await connection.close()


@pytest.fixture(params=BACKENDS)
async def books(request, tmp_path):
    books: Books
    if request.param == "sqlite":
        books = SQLiteBooks(tmp_path)
    else:
        books = PostgresBooks(request.getfixturevalue("postgres_database"))
    async with open_storage(books.url):
        await books.open()
    return books


@pytest.fixture
async def queue(books):
    async with AsyncTaskQueue(books.url) as queue:
        yield queue


@pytest.fixture
def start(books):
    """Starts a worker; it works when this returns. Those that are left are killed at the end."""
    workers = []

    def start(failpoints: str) -> subprocess.Popen[str]:
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.paying_worker", books.url, str(LEASE)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMNIQ_FAILPOINTS": failpoints, "OMNIQ_MAX_CRASHES": "1000"},
            stdout=subprocess.PIPE,
            text=True,
        )
        workers.append(worker)
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        return worker

    yield lambda failpoints="": asyncio.to_thread(start, failpoints)
    for worker in workers:
        kill(worker)


def kill(worker: subprocess.Popen[str]) -> None:
    worker.kill()
    worker.wait()
    if worker.stdout is not None:
        worker.stdout.close()


async def until_done(queue: AsyncTaskQueue, patience: float = 60) -> None:
    deadline = time.monotonic() + patience
    while (counts := (await queue.stats()).by_status)[TaskStatus.SUCCESS] < sum(counts.values()):
        assert time.monotonic() < deadline, counts
        await asyncio.sleep(0.05)


async def check(books: Books, queue: AsyncTaskQueue, ids: list[str]) -> int:
    """Every task has succeeded and has its row once; how many were begun more than once."""
    assert sorted(await books.paid()) == sorted(ids)
    tokens = [await queue.handle(task_id).result(timeout=0) for task_id in ids]
    return sum(token > 1 for token in tokens)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "kills", [pytest.param(20, id="some"), pytest.param(100, id="many", marks=pytest.mark.deep)]
)
async def test_a_row_written_in_the_tasks_transaction_is_there_exactly_once(
    books, queue, start, kills
):
    chance = random.Random(kills)
    ids = []
    for _ in range(kills):
        calls = [(pay, ()), (pay_in_thread, ())] * 15
        ids += [handle.id for handle in await queue.enqueue_many(calls)]
        worker = await start()
        # Not to wait for something: the instant of the kill is what is tried.
        await asyncio.sleep(chance.uniform(0, LONGEST_LIFE))
        kill(worker)
    await start()
    await until_done(queue)

    assert await check(books, queue, ids) > 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("func", [pay, pay_in_thread])
@pytest.mark.parametrize(("place", "token"), [("transaction.before", 2), ("transaction.after", 1)])
@pytest.mark.fault("F02")
async def test_killed_right_before_or_after_the_commit(books, queue, start, func, place, token):
    handle = await queue.enqueue(func)
    worker = await start(failpoints=f"{place}=kill")
    assert await asyncio.to_thread(worker.wait) == -9
    await start()

    assert await handle.result(timeout=20) == token
    assert await books.paid() == [handle.id]
