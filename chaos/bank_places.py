"""The databases of a bank, which can be copied and put back while workers use them."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
from abc import ABC, abstractmethod
from contextlib import closing
from pathlib import Path
from typing import Any

from chaos.stores import Store
from omniq.testing.servers import PostgresServer
from omniq.testing.standby import PostgresPair


class Place(ABC):
    """A database with tasks and accounts."""

    store: Store
    can_restart = True

    @abstractmethod
    async def ask(self, sql: str) -> list[list[Any]]:
        """Run a statement; returns its rows."""

    @abstractmethod
    def copy(self) -> None:
        """Note the state of the database."""

    @abstractmethod
    def put_back(self) -> None:
        """Put the database back to that state."""

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

    def __init__(self, folder: Path) -> None:
        self._pair = PostgresPair(waits_for_standby=True).__enter__()
        self.store = Store("postgres", self._pair.url)

    def copy(self) -> None:
        """A failover restores nothing."""

    def put_back(self) -> None:
        self.restart()

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


PLACES: dict[str, Any] = {
    "sqlite": SQLiteBank,
    "postgres": PostgresBank,
    "postgres-failover": FailoverBank,
}
