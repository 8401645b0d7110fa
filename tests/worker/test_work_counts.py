"""What 1,000 tasks cost on each backend, counted and not timed, so that no increase goes unnoticed.

A ceiling allows for what differs from run to run (polls, heartbeats, how outcomes are batched) and
not for one more step per task. In SQLite and PostgreSQL a transaction waits for the disk.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from tempfile import TemporaryDirectory
from typing import Any

import asyncpg
import loguru
import pytest

from omniq import AsyncTaskQueue, task
from omniq.testing.fault_proxy import FaultProxy

TASKS = 1_000
CALLERS = CONCURRENCY = 100

Use = Callable[[AsyncTaskQueue], Awaitable[None]]


@dataclass
class Work:
    """How often each operation was done, or may be done."""

    round_trips: int = 0
    transactions: int = 0
    fsyncs: int = 0
    thread_hops: int = 0
    log_calls: int = 0


DRAINED = {
    "memory": Work(thread_hops=20),
    "file": Work(fsyncs=200, thread_hops=200),
    "sqlite": Work(transactions=60, thread_hops=80),
    "postgres": Work(round_trips=80, transactions=150, thread_hops=20),
    "redis": Work(round_trips=60, thread_hops=20),
}
"""Enqueued in one call and drained by one pool, results stored."""

ENQUEUED = {
    "memory": Work(),
    "file": Work(fsyncs=150, thread_hops=TASKS + 50),
    "sqlite": Work(transactions=60, thread_hops=80),
    "postgres": Work(round_trips=60, transactions=150),
    "redis": Work(round_trips=60),
}
"""Enqueued one by one, by 100 callers at the same time."""

# Without /dev/shm the tests wait for a slow disk some hundred times.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

BACKENDS = [name for name in DRAINED if importlib.util.find_spec(f"omniq.storage.{name}")]


@task
async def nothing() -> None:
    """The task with the least work."""


class Meter:
    """Counts what this process does, at the functions of Python and of the drivers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.work = Work()
        self._patch = monkeypatch
        self._lock = threading.Lock()
        # A thread that has done something for an event loop notifies it: each hop ends like this.
        self._count(asyncio.BaseEventLoop, "call_soon_threadsafe", "thread_hops")
        self._count(type(loguru.logger), "_log", "log_calls")
        self._count(os, "fsync", "fsyncs")
        self._trace_sqlite()

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            setattr(self.work, name, getattr(self.work, name) + count)

    def _count(self, place: Any, name: str, counted: str) -> None:
        real: Callable[..., Any] = getattr(place, name)

        def counting(*args: Any, **options: Any) -> Any:
            self.add(counted)
            return real(*args, **options)

        self._patch.setattr(place, name, counting)

    def _trace_sqlite(self) -> None:
        connect = sqlite3.connect

        def trace(sql: str) -> None:
            if sql.startswith("COMMIT"):
                self.add("transactions")

        def connect_traced(*args: Any, **options: Any) -> sqlite3.Connection:
            connection: sqlite3.Connection = connect(*args, **options)
            connection.set_trace_callback(trace)
            return connection

        self._patch.setattr(sqlite3, "connect", connect_traced)


_OTHERS = (
    "SELECT count(*) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
)


async def transactions(url: str) -> int:
    """How many the server has counted in this database, once all other connections are closed."""
    connection = await asyncpg.connect(url)
    try:
        for _ in range(500):
            # A session adds its counts when it ends.
            if not await connection.fetchval(_OTHERS):
                break
            await asyncio.sleep(0.01)
        count: int = await connection.fetchval(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database "
            "WHERE datname = current_database()"
        )
        return count
    finally:
        await connection.close()


class Bench:
    """One backend whose work is counted."""

    def __init__(self, backend: str, url: str, meter: Meter) -> None:
        self.backend = backend
        self._url = url
        self._meter = meter

    async def work_of(self, use: Use) -> Work:
        """The work of doing that with a queue which has been used before."""
        if self.backend != "postgres":
            await self._run(use)
            return self._meter.work
        before = await transactions(self._url)
        await self._run(use)
        self._meter.work.transactions = await transactions(self._url) - before
        return self._meter.work

    async def _run(self, use: Use) -> None:
        async with AsyncExitStack() as stack:
            url, proxy = self._url, None
            if self.backend in ("postgres", "redis"):
                proxy = await stack.enter_async_context(FaultProxy(url))
                url = proxy.url
            queue = await stack.enter_async_context(AsyncTaskQueue(url))
            # What is made once: tables, threads, connections and prepared statements.
            await queue.enqueue(nothing)
            await queue.worker(concurrency=CONCURRENCY).run_until_empty()
            self._meter.work = Work(round_trips=-proxy.counts.requests if proxy else 0)
            await use(queue)
            if proxy:
                self._meter.add("round_trips", proxy.counts.requests)
            # Not the work of closing.
            self._meter.work = Work(**asdict(self._meter.work))


@pytest.fixture(params=BACKENDS)
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    # In memory where possible: the test counts how often it would wait for a disk.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with TemporaryDirectory(dir=memory) as folder:
        match request.param:
            case "memory":
                url = "memory://"
            case "file":
                url = f"file://{folder}/store"
            case "sqlite":
                url = f"sqlite:///{folder}/store.db"
            case "postgres":
                url = request.getfixturevalue("postgres_database")
            case server:
                url = request.getfixturevalue(f"{server}_url")
        yield Bench(request.param, url, Meter(monkeypatch))


async def test_a_drain_costs_a_few_steps_for_each_batch_and_none_for_each_task(bench):
    async def drain(queue):
        await queue.enqueue_many(nothing, [()] * TASKS)
        pool = queue.worker(concurrency=CONCURRENCY)
        await pool.run_until_empty()
        assert pool.stats().completed_tasks == TASKS

    assert_within(await bench.work_of(drain), DRAINED[bench.backend])


async def test_enqueues_of_many_callers_share_their_steps(bench):
    async def enqueue(queue):
        async def one_by_one():
            for _ in range(TASKS // CALLERS):
                await queue.enqueue(nothing)

        await asyncio.gather(*(one_by_one() for _ in range(CALLERS)))

    assert_within(await bench.work_of(enqueue), ENQUEUED[bench.backend])


def assert_within(work: Work, ceiling: Work) -> None:
    allowed = asdict(ceiling)
    above = {
        name: (count, allowed[name])
        for name, count in asdict(work).items()
        if count > allowed[name]
    }
    unseen = [name for name, count in asdict(work).items() if allowed[name] >= 60 and not count]

    assert not above, "done, and allowed"
    assert not unseen, "a counter that counts nothing checks nothing"
