"""The stores that are measured, and a fresh, empty one of a kind for each run."""

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

from benchmarks.marks import Marks
from omniq.testing.servers import PostgresServer, RedisServer, Server

ROOT = Path(__file__).parents[1]
ABOUT = {
    "memory": "omniq in one process, on the stock loop; `bare` is `create_task` with a callback.",
    "postgres": "A server that waits for its disk: fsync and synchronous_commit on.",
    "redis": "A server without persistence: nothing hides what the clients themselves cost.",
    "redis-always": "A server that waits for its disk: appendonly, appendfsync always.",
    "sqlite-power": "One file, safe from a power cut: WAL, synchronous FULL.",
    "sqlite-os": "One file, safe from a killed process: WAL, synchronous NORMAL.",
    "file-power": "A folder, safe from a power cut.",
    "file-os": "A folder, safe from a killed process.",
}
STORES = tuple(ABOUT)


class Store:
    """One store: its server, if it has one, and the folder and marks of the current run."""

    def __init__(self, name: str, scratch: Path, server: Server | None, database: int = 0) -> None:
        self.name = name
        self.server = server
        scratch.mkdir(exist_ok=True)
        self.marks = Marks(scratch / "marks")
        self._scratch = scratch
        self._database = database
        self.folder = scratch
        self.url = ""

    @property
    def kind(self) -> str:
        return self.name.partition("-")[0]

    def beside(self) -> Store:
        """Another store of this kind, on the same server."""
        return Store(self.name, self._scratch / "beside", self.server, self._database + 1)

    @contextmanager
    def fresh(self) -> Iterator[Self]:
        """Empty, for one run."""
        name = f"run_{uuid4().hex[:8]}"
        self.folder = self._scratch / name
        self.folder.mkdir()
        self.marks.clear()
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

    def settle(self) -> None:
        """After a fill: what the server would do for it in the background is done now."""
        if isinstance(self.server, PostgresServer):
            asyncio.run(_execute(self.url, "VACUUM ANALYZE", "CHECKPOINT"))

    def version(self) -> str:
        """The server's, or that of SQLite; empty where there is none."""
        if isinstance(self.server, PostgresServer):
            return f"PostgreSQL {asyncio.run(_ask(self.server.url))}"
        if self.server is not None:
            return f"Redis {asyncio.run(_ask_redis(self.server.url))}"
        return f"SQLite {sqlite3.sqlite_version}" if self.kind == "sqlite" else ""

    def environment(self) -> dict[str, str]:
        """What a process of this run finds in its environment."""
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "BENCH_STORE": self.name,
            "BENCH_URL": self.url,
            "BENCH_FOLDER": str(self.folder),
            "BENCH_MARKS": str(self._scratch / "marks"),
        }


@contextmanager
def a_store(name: str) -> Iterator[Store]:
    with ExitStack() as stack:
        place = tempfile.TemporaryDirectory(prefix="omniq-bench-", ignore_cleanup_errors=True)
        scratch = Path(stack.enter_context(place))
        kind = {"postgres": PostgresServer, "redis": RedisServer}.get(name.partition("-")[0])
        server = None if kind is None else stack.enter_context(kind(durable=name != "redis"))
        yield Store(name, scratch, server)


async def _execute(url: str, *statements: str) -> None:
    import asyncpg

    connection = await asyncpg.connect(url)
    for statement in statements:
        await connection.execute(statement)
    await connection.close()


async def _ask(url: str) -> str:
    import asyncpg

    connection = await asyncpg.connect(url)
    version = await connection.fetchval("SHOW server_version")
    await connection.close()
    return str(version)


async def _ask_redis(url: str) -> str:
    from redis.asyncio import Redis

    async with Redis.from_url(url) as client:
        return str((await client.info("server"))["redis_version"])


async def _empty_redis(url: str) -> None:
    from redis.asyncio import Redis

    async with Redis.from_url(url) as client:
        await client.flushdb()
