"""The stores that are measured, and an empty store of a kind for each run."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self
from uuid import uuid4

from benchmarks.start_times import StartTimes
from omniq.testing.servers import PostgresServer, RedisServer, Server

ROOT = Path(__file__).parents[1]
ABOUT = {
    "memory": "omniq in one process, on the stock loop; `bare` is `create_task` with a callback.",
    "postgres": "A server that waits for its disk: fsync and synchronous_commit on.",
    "redis": "A server without persistence: nothing hides the cost of the clients.",
    "redis-always": "A server that waits for its disk: appendonly, appendfsync always.",
    "sqlite-power": "One file, safe from a power cut: WAL, synchronous FULL.",
    "sqlite-os": "One file, safe from a killed process: WAL, synchronous NORMAL.",
    "file-power": "A folder, safe from a power cut.",
    "file-os": "A folder, safe from a killed process.",
}
STORES = tuple(ABOUT)


class Store:
    """One store: its server, if it has one, and the folder and start times of the current run."""

    def __init__(self, name: str, scratch: Path, server: Server | None, database: int = 0) -> None:
        self.name = name
        self.server = server
        scratch.mkdir(exist_ok=True)
        self.start_times = StartTimes(scratch / "start_times")
        self._scratch = scratch
        self._database = database
        self.folder = scratch
        self.url = ""

    @property
    def kind(self) -> str:
        return self.name.partition("-")[0]

    def beside(self) -> Store:
        """Return another store of this kind, on the same server."""
        return Store(self.name, self._scratch / "beside", self.server, self._database + 1)

    @contextmanager
    def fresh(self) -> Iterator[Self]:
        """Empty the store for one run."""
        name = f"run_{uuid4().hex[:8]}"
        self.folder = self._scratch / name
        self.folder.mkdir()
        self.start_times.clear()
        if isinstance(self.server, PostgresServer):
            asyncio.run(_execute(self.server.url, f"CREATE DATABASE {name}"))
            self.url = self.server.database_url(name)
        elif self.server is not None:
            self.url = f"{self.server.url.rpartition('/')[0]}/{self._database}"
            asyncio.run(_empty_redis(self.url))
        try:
            yield self
        finally:
            shutil.rmtree(self.folder)
            if isinstance(self.server, PostgresServer):
                drop = f"DROP DATABASE {name} WITH (FORCE)"
                asyncio.run(_execute(self.server.url, drop, "CHECKPOINT"))

    def finish_background_work(self) -> None:
        """After a fill, do now what the server would do in the background."""
        if isinstance(self.server, PostgresServer):
            asyncio.run(_execute(self.url, "VACUUM ANALYZE", "CHECKPOINT"))

    def version(self) -> str:
        """Return the version of the server or of SQLite; empty if there is none."""
        if isinstance(self.server, PostgresServer):
            return f"PostgreSQL {asyncio.run(_postgres_version(self.server.url))}"
        if self.server is not None:
            return f"Redis {asyncio.run(_redis_version(self.server.url))}"
        return f"SQLite {sqlite3.sqlite_version}" if self.kind == "sqlite" else ""

    def environment(self) -> dict[str, str]:
        """Return the environment variables for a process of this run."""
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "BENCH_STORE": self.name,
            "BENCH_URL": self.url,
            "BENCH_FOLDER": str(self.folder),
            "BENCH_START_TIMES": str(self._scratch / "start_times"),
        }


@contextmanager
def open_store(name: str) -> Iterator[Store]:
    with ExitStack() as stack:
        folder = tempfile.TemporaryDirectory(prefix="omniq-bench-", ignore_cleanup_errors=True)
        scratch = Path(stack.enter_context(folder))
        kind = {"postgres": PostgresServer, "redis": RedisServer}.get(name.partition("-")[0])
        server = None if kind is None else stack.enter_context(kind(durable=name != "redis"))
        yield Store(name, scratch, server)


async def _execute(url: str, *statements: str) -> None:
    import asyncpg

    connection = await asyncpg.connect(url)
    for statement in statements:
        await connection.execute(statement)
    await connection.close()


async def _postgres_version(url: str) -> str:
    import asyncpg

    connection = await asyncpg.connect(url)
    version = await connection.fetchval("SHOW server_version")
    await connection.close()
    return str(version)


async def _redis_version(url: str) -> str:
    from redis.asyncio import Redis

    async with Redis.from_url(url) as client:
        return str((await client.info("server"))["redis_version"])


async def _empty_redis(url: str) -> None:
    from redis.asyncio import Redis

    # A store of 1,000,000 tasks takes seconds.
    async with Redis.from_url(url, socket_timeout=120) as client:
        await client.flushdb()
