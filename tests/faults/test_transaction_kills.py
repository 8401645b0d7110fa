"""Workers are killed while their tasks write: each row exists once, whenever the kill came."""

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
from tests.faults.transaction_worker import pay, pay_in_thread

LEASE = 1.0
LONGEST_LIFE = 0.25
"""The most seconds that a worker runs before it is killed."""

BACKENDS = [
    name
    for name in ("sqlite", "postgres")
    if importlib.util.find_spec(f"omniq.storage.{name}") is not None
]


class Payments(Protocol):
    """The table that the tasks write to, in the database of the tasks."""

    url: str

    async def open(self) -> None: ...

    async def paid(self) -> list[str]: ...


class SQLitePayments:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "tasks.db"
        self.url = f"sqlite:///{self._path}?durability=os"

    async def open(self) -> None:
        with closing(sqlite3.connect(self._path)) as connection:
            connection.execute("CREATE TABLE payments (id TEXT)")

    async def paid(self) -> list[str]:
        with closing(sqlite3.connect(self._path)) as connection:
            return [task_id for (task_id,) in connection.execute("SELECT id FROM payments")]


class PostgresPayments:
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
async def payments(request, tmp_path):
    payments: Payments
    if request.param == "sqlite":
        payments = SQLitePayments(tmp_path)
    else:
        payments = PostgresPayments(request.getfixturevalue("postgres_database"))
    async with open_storage(payments.url):
        await payments.open()
    return payments


@pytest.fixture
async def queue(payments):
    async with AsyncTaskQueue(payments.url) as queue:
        yield queue


@pytest.fixture
def start(payments):
    """Starts a worker and returns when it runs. Remaining workers are killed at the end."""
    workers = []

    def start(failpoints: str) -> subprocess.Popen[str]:
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.transaction_worker", payments.url, str(LEASE)],
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


async def check(payments: Payments, queue: AsyncTaskQueue, ids: list[str]) -> int:
    """Assert that every task succeeded and has one row; return how many started more than once."""
    assert sorted(await payments.paid()) == sorted(ids)
    tokens = [await queue.handle(task_id).result(timeout=0) for task_id in ids]
    return sum(token > 1 for token in tokens)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "kills", [pytest.param(5, id="some"), pytest.param(100, id="many", marks=pytest.mark.deep)]
)
async def test_a_row_written_in_a_tasks_transaction_exists_exactly_once(
    payments, queue, start, kills
):
    chance = random.Random(kills)
    ids: list[str] = []
    killed = interrupted = 0
    # On a busy machine all kills may come before the first run, or after the last.
    while killed < kills or not interrupted:
        calls = [(pay, ()), (pay_in_thread, ())] * 15
        ids += [handle.id for handle in await queue.enqueue_many(calls)]
        worker = await start()
        # This waits for nothing: the test is about the time of the kill.
        await asyncio.sleep(chance.uniform(0, LONGEST_LIFE))
        kill(worker)
        killed += 1
        interrupted += (await queue.stats()).by_status[TaskStatus.RUNNING]
    await start()
    await until_done(queue)

    assert await check(payments, queue, ids) > 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("func", [pay, pay_in_thread])
@pytest.mark.parametrize(("place", "token"), [("transaction.before", 2), ("transaction.after", 1)])
@pytest.mark.fault("F02")
async def test_a_worker_killed_just_before_or_after_the_commit_writes_the_row_once(
    payments, queue, start, func, place, token
):
    handle = await queue.enqueue(func)
    worker = await start(failpoints=f"{place}=kill")
    assert await asyncio.to_thread(worker.wait) == -9
    await start()

    assert await handle.result(timeout=20) == token
    assert await payments.paid() == [handle.id]
