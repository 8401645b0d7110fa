"""The databases of a bank, which can be copied and put back while workers use them."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
from abc import ABC, abstractmethod
from contextlib import closing
from pathlib import Path
from typing import Any

import redis

from chaos.stores import Store
from omniq.testing.redis_groups import SentinelGroup
from omniq.testing.servers import PostgresServer, RedisServer
from omniq.testing.standby import PostgresPair


class Place(ABC):
    """A database with tasks and accounts."""

    store: Store
    can_restart = can_restore = True
    restart_kind = "restart"

    async def ask(self, sql: str) -> list[list[Any]]:
        """Run a statement; returns its rows. Only databases with accounts have this."""
        raise NotImplementedError(f"no statements: {sql}")

    def copy(self) -> None:
        """Note the state of the database."""
        raise NotImplementedError("it cannot be restored")

    def put_back(self) -> None:
        """Put the database back to that state."""
        raise NotImplementedError("it cannot be restored")

    @abstractmethod
    def restart(self) -> None:
        """Kill the server, and have one again with all that was acknowledged."""

    @abstractmethod
    def close(self) -> None:
        """End what was started."""


class SQLiteBank(Place):
    """One file. It is copied and restored while workers use it; their leases are in another file, and stay."""

    can_restart = False

    def __init__(self, folder: Path) -> None:
        self._path, self._copy = folder / "bank.db", folder / "copy.db"
        self.store = Store("sqlite", f"sqlite:///{self._path}?durability=os")

    async def ask(self, sql: str) -> list[list[Any]]:
        with closing(sqlite3.connect(self._path, timeout=60, isolation_level=None)) as db:
            return [list(row) for row in db.execute(sql)]

    def copy(self) -> None:
        self._restore(self._path, self._copy)

    def put_back(self) -> None:
        self._restore(self._copy, self._path)

    def _restore(self, source: Path, target: Path) -> None:
        # Never while workers are suspended: one of them may hold the lock, and this would wait for ever.
        with (
            closing(sqlite3.connect(source, timeout=60)) as before,
            closing(sqlite3.connect(target, timeout=60)) as after,
        ):
            before.backup(after)

    def restart(self) -> None:
        raise NotImplementedError("there is no server")

    def close(self) -> None:
        pass


class PostgresBank(Place):
    """A server, which is started with older data."""

    def __init__(self, folder: Path) -> None:
        self._copy = folder / "copy"
        self.server = PostgresServer(durable=True)
        self.server.start()
        self.store = Store("postgres", self.server.url, self.server)

    async def ask(self, sql: str) -> list[list[Any]]:
        import asyncpg

        connection = await asyncpg.connect(self.store.url)
        try:
            return [list(row) for row in await connection.fetch(sql)]
        finally:
            await connection.close()

    def copy(self) -> None:
        self.server.stop()
        shutil.rmtree(self._copy, ignore_errors=True)
        self._move(self._data, self._copy)
        self.server.start()

    def put_back(self) -> None:
        self.server.kill()
        shutil.rmtree(self._data)
        self._move(self._copy, self._data)
        self.server.start()

    @property
    def _data(self) -> Path:
        assert self.server.folder is not None
        return self.server.folder / "data"

    def _move(self, source: Path, target: Path) -> None:
        # With the owners of the files.
        subprocess.run(["cp", "-a", str(source), str(target)], check=True)

    def restart(self) -> None:
        self.server.kill()
        self.server.start()

    def close(self) -> None:
        self.server.close()


class FailoverBank(PostgresBank):
    """Two servers: the standby takes over, and the other one comes back as its standby."""

    can_restore, restart_kind = False, "failover"

    def __init__(self, folder: Path) -> None:
        self._pair = PostgresPair(waits_for_standby=True).__enter__()
        self.store = Store("postgres", self._pair.url)

    def restart(self) -> None:
        self._pair.primary.kill()
        self._pair.promote()
        self._pair.add_standby()

    async def ask(self, sql: str) -> list[list[Any]]:
        import asyncpg

        connection = await asyncpg.connect(self.store.url, target_session_attrs="read-write")
        try:
            return [list(row) for row in await connection.fetch(sql)]
        finally:
            await connection.close()

    def close(self) -> None:
        self._pair.close()


class RedisBank(Place):
    """A server whose log is cut short: it has lost what it wrote after the copy."""

    def __init__(self, folder: Path) -> None:
        self._server = RedisServer(durable=True)
        self._server.start()
        self._log = self._server._folder / "appendonly.aof"
        self.store = Store("redis", self._server.url, self._server)

    def copy(self) -> None:
        self._size = self._log.stat().st_size

    def put_back(self) -> None:
        self._server.kill()
        with self._log.open("r+b") as log:
            log.truncate(self._size)
        self._server.start()

    def restart(self) -> None:
        self._server.kill()
        self._server.start()

    def close(self) -> None:
        self._server.close()


class SentinelBank(Place):
    """A primary and a replica: the Sentinels promote the replica, which may lack the last writes of the workers."""

    can_restore, restart_kind = False, "failover"

    def __init__(self, folder: Path) -> None:
        self._group = SentinelGroup(durable=True)
        self._group.start()
        self.store = Store("redis", self._group.url)

    def restart(self) -> None:
        primary = self._group.primary()
        # What was acknowledged before is on the replica as well, with all that was written before this key.
        with closing(redis.Redis.from_url(primary.url)) as client:
            client.set("bank", "failover")
            client.wait(1, 10_000)
        primary.kill()
        self._group.await_primary(other_than=primary)
        primary.start()
        self._group.await_replicas()

    def close(self) -> None:
        self._group.close()


PLACES: dict[str, Any] = {
    "sqlite": SQLiteBank,
    "postgres": PostgresBank,
    "postgres-failover": FailoverBank,
    "redis": RedisBank,
    "redis-sentinel": SentinelBank,
}
