"""The stored bytes of each backend, read and written without omniq, as an attacker would."""

from __future__ import annotations

import sqlite3
import stat
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg
import redis

from omniq.errors import OmniqError
from omniq.models import Progress, Schedule, TaskStatus
from omniq.outcomes import Failed, Retried, Succeeded
from omniq.storage.base import BaseStorage
from omniq.storage.file.encoding import Kind, NotARecord, declared_size, frame
from omniq.storage.file.shared_file import unpack_one
from omniq.testing.builders import a_result, a_task, an_error, an_output

Address = tuple[Any, ...]


class RawStore(ABC):
    """All stored byte strings of a store, by address."""

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def addresses(self) -> list[Address]: ...

    @abstractmethod
    def read(self, address: Address) -> bytes: ...

    @abstractmethod
    def write(self, address: Address, data: bytes) -> None: ...

    def write_many(self, values: Mapping[Address, bytes]) -> None:
        """Write all of these, in the fastest way."""
        for address, data in values.items():
            self.write(address, data)

    @abstractmethod
    def save(self) -> Callable[[], None]:
        """Save the whole store; returns a function that restores it."""

    @abstractmethod
    def close(self) -> None: ...


class RawFileStore(RawStore):
    """Payloads, each written behind a valid header: a checksum is no secret.

    Of a file of many tasks, under each of its names the record that the name stands for, and then
    the lines that say where each record is.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.root = Path(urlsplit(url).path)

    def addresses(self) -> list[Address]:
        found: list[Address] = []
        for path in sorted(self.root.rglob("*")):
            if not self._is_record(path):
                continue
            found.append((path, False))
            if path.read_bytes()[5] == Kind.SHARED:
                found.append((path, True))
        return found

    def read(self, address: Address) -> bytes:
        path, is_lines = self._current(address)
        data: bytes = path.read_bytes()
        if is_lines and data[5] == Kind.SHARED:
            return data[16 : declared_size(data)]
        return self._own(path)[16:]

    def write(self, address: Address, data: bytes) -> None:
        path, is_lines = self._current(address)
        before: bytes = path.read_bytes()
        if is_lines and before[5] == Kind.SHARED:
            path.write_bytes(frame(Kind.SHARED, data) + before[declared_size(before) :])
            return
        own = self._own(path)
        kind = Kind(own[5]) if own.startswith(b"omnq\1") and len(own) > 16 else Kind.LIVE
        # From now on a separate file: only the record of this one name is to change. Its content gets
        # another name, because a store does not read a content again that it has read under another.
        path.unlink()
        _with_other_content(path).write_bytes(frame(kind, data))

    def _current(self, address: Address) -> Address:
        """The address, also after `write` has given its file another name."""
        path, is_lines = address
        return (path if path.exists() else _with_other_content(path)), is_lines

    def _own(self, path: Path) -> bytes:
        data = path.read_bytes()
        if data[5] != Kind.SHARED:
            return data
        lines = data[16 : declared_size(data)].decode(errors="replace").split("\n")
        ids = [line.split(" ")[0] for line in lines]
        own = [task_id for task_id in ids if task_id and path.name.startswith(f"{task_id}.")]
        try:
            return unpack_one(data, own[0])
        except (IndexError, NotARecord):
            return data

    def save(self) -> Callable[[], None]:
        saved = {path: path.read_bytes() for path in self.root.rglob("*") if _is_plain(path)}

        def restore() -> None:
            left = {path: path.read_bytes() for path in self.root.rglob("*") if _is_plain(path)}
            for path in left.keys() - saved.keys():
                path.unlink()
            for path, data in saved.items():
                if left.get(path) != data:
                    path.write_bytes(data)

        return restore

    def _is_record(self, path: Path) -> bool:
        return _is_plain(path) and path.read_bytes()[:4] == b"omnq"

    def close(self) -> None:
        """Nothing is open."""


def _with_other_content(path: Path) -> Path:
    parts = path.name.split(".")
    if parts[-1] == "task" and len(parts) > 3 and not parts[-3].endswith("000"):
        parts[-3] += "000"
    return path.with_name(".".join(parts))


def _is_plain(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)


class RawSQLiteStore(RawStore):
    """The blobs of all tables and columns."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.path = Path(urlsplit(url).path[1:])
        self._db = sqlite3.connect(self.path, isolation_level=None, timeout=5)

    def addresses(self) -> list[Address]:
        tables = [name for (name,) in self._db.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'omniq%'"
        )]  # fmt: skip
        return [
            (table, column, row)
            for table in sorted(tables)
            for column, key in self._blobs(table)
            for (row,) in self._db.execute(
                f"SELECT {key} FROM {table} WHERE {column} IS NOT NULL ORDER BY 1"
            )
        ]

    def _blobs(self, table: str) -> list[tuple[str, str]]:
        columns = self._db.execute(f"PRAGMA table_info({table})").fetchall()
        return [(column[1], self._key(table)) for column in columns if column[2] == "BLOB"]

    def _key(self, table: str) -> str:
        columns = self._db.execute(f"PRAGMA table_info({table})").fetchall()
        return " || '/' || ".join(column[1] for column in columns if column[5])

    def read(self, address: Address) -> bytes:
        table, column, row = address
        (data,) = self._db.execute(
            f"SELECT {column} FROM {table} WHERE {self._key(table)} = ?", (row,)
        ).fetchone()
        return data.encode() if isinstance(data, str) else bytes(data)

    def write(self, address: Address, data: bytes) -> None:
        table, column, row = address
        self._db.execute(
            f"UPDATE {table} SET {column} = ? WHERE {self._key(table)} = ?", (data, row)
        )

    def write_many(self, values: Mapping[Address, bytes]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        super().write_many(values)
        self._db.execute("COMMIT")

    def save(self) -> Callable[[], None]:
        saved = sqlite3.connect(":memory:", isolation_level=None)
        self._db.backup(saved)

        def restore() -> None:
            # Row by row: replacing the whole file would be felt as another database.
            tables = saved.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'omniq%'"
            ).fetchall()
            self._db.execute("BEGIN IMMEDIATE")
            for (table,) in tables:
                self._db.execute(f"DELETE FROM {table}")
                rows = saved.execute(f"SELECT * FROM {table}").fetchall()
                for row in rows:
                    marks = ", ".join("?" * len(row))
                    self._db.execute(f"INSERT INTO {table} VALUES ({marks})", row)
            self._db.execute("COMMIT")

        return restore

    def close(self) -> None:
        self._db.close()


class RawPostgresStore(RawStore):
    """Values of type bytea, in whichever table and column."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        parts = urlsplit(url)
        self.schema = parse_qs(parts.query)["schema"][0]
        self._db = psycopg.connect(parts._replace(query="").geturl(), autocommit=True)

    def _all(self, sql: str, *values: Any) -> list[Any]:
        return self._db.execute(sql.encode(), values).fetchall()

    def _columns(self) -> list[tuple[str, str]]:
        return self._all(
            "SELECT table_name, column_name FROM information_schema.columns "
            "WHERE table_schema = %s AND data_type = 'bytea' ORDER BY 1, 2",
            self.schema,
        )

    def _key(self, table: str) -> str:
        return {"documents": "kind || '/' || key", "leases": "owner"}.get(table, "id")

    def addresses(self) -> list[Address]:
        return [
            (table, column, row)
            for table, column in self._columns()
            for (row,) in self._all(
                f'SELECT {self._key(table)} FROM "{self.schema}".{table} '
                f"WHERE {column} IS NOT NULL ORDER BY 1"
            )
        ]

    def read(self, address: Address) -> bytes:
        table, column, row = address
        where = f"WHERE {self._key(table)} = %s"
        ((data,),) = self._all(f'SELECT {column} FROM "{self.schema}".{table} {where}', row)
        return bytes(data)

    def write(self, address: Address, data: bytes) -> None:
        table, column, row = address
        self._db.execute(
            f'UPDATE "{self.schema}".{table} SET {column} = %s '
            f"WHERE {self._key(table)} = %s".encode(),
            (data, row),
        )

    def write_many(self, values: Mapping[Address, bytes]) -> None:
        with self._db.pipeline(), self._db.transaction():
            super().write_many(values)

    def save(self) -> Callable[[], None]:
        tables = [
            name
            for (name,) in self._all(
                "SELECT tablename FROM pg_tables WHERE schemaname = %s", self.schema
            )
        ]
        for name in tables:
            self._db.execute(
                f'CREATE TEMP TABLE kept_{name} AS SELECT * FROM "{self.schema}".{name}'.encode()
            )

        def restore() -> None:
            with self._db.transaction():
                for name in tables:
                    table = f'"{self.schema}".{name}'
                    self._db.execute(f"DELETE FROM {table}".encode())
                    self._db.execute(f"INSERT INTO {table} SELECT * FROM kept_{name}".encode())

        return restore

    def close(self) -> None:
        self._db.close()


class RawRedisStore(RawStore):
    """Strings, and the fields of hashes."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        base, _, query = url.partition("?")
        self.prefix = parse_qs(query)["prefix"][0]
        self.client: Any = redis.Redis.from_url(base)

    def _keys(self) -> list[bytes]:
        return sorted(self.client.scan_iter(match=f"*{self.prefix}*", count=1000))

    def addresses(self) -> list[Address]:
        found: list[Address] = []
        for key in self._keys():
            match self.client.type(key):
                case b"string":
                    found.append((key,))
                case b"hash":
                    found += [(key, field) for field in sorted(self.client.hkeys(key))]
        return found

    def read(self, address: Address) -> bytes:
        data = self.client.hget(*address) if len(address) == 2 else self.client.get(*address)
        return bytes(data)

    def write(self, address: Address, data: bytes) -> None:
        if len(address) == 2:
            self.client.hset(*address, data)
        else:
            self.client.set(*address, data)

    def write_many(self, values: Mapping[Address, bytes]) -> None:
        whole, self.client = self.client, self.client.pipeline()
        super().write_many(values)
        self.client.execute()
        self.client = whole

    def save(self) -> Callable[[], None]:
        saved = {key: self.client.dump(key) for key in self._keys()}

        def restore() -> None:
            pipe = self.client.pipeline()
            for key in self._keys():
                pipe.delete(key)
            for key, data in saved.items():
                pipe.restore(key, 0, data)
            pipe.execute()

        return restore

    def close(self) -> None:
        self.client.close()


RAW_STORES: dict[str, type[RawStore]] = {
    "file": RawFileStore,
    "sqlite": RawSQLiteStore,
    "postgres": RawPostgresStore,
    "redis": RawRedisStore,
}


async def fill(storage: BaseStorage, copies: Sequence[str] = ("",)) -> None:
    """Store one of each kind of record, once for each copy, so that every stored value has a reader."""
    names = [name + copy for copy in copies for name in ("done", "dead", "again")]
    await storage.enqueue_many([a_task(name, priority=9, args=("worth", name)) for name in names])
    held = {task.id: task for task in await storage.reserve(len(names))}
    for copy in copies:
        again, dead, done = (held[name + copy] for name in ("again", "dead", "done"))
        await storage.save_checkpoint(again.id, again.token, b"\x81\xa6format\x01")
        await storage.report_progress(
            [Progress(task_id=again.id, token=again.token, fraction=0.5, message="half")]
        )
        await storage.append_output([an_output(again.id, again.token, "half", {"a": 1})])
        await storage.record(
            [
                Succeeded(done.id, done.token, a_result(done, {"the": "value"})),
                Failed(dead.id, dead.token, an_error("it is over"), "for good"),
                Retried(again.id, again.token, an_error("not yet"), storage.clock.now()),
            ]
        )
    await storage.enqueue_many(
        [a_task(f"beat{copy}", interval=3600.0, priority=10) for copy in copies]
    )
    await storage.record(
        [
            Succeeded(beat.id, beat.token, a_result(beat, 1), next_eta=storage.clock.now())
            for beat in await storage.reserve(len(copies))
        ]
    )
    for copy in copies:
        await _fill_waiting(storage, copy)


async def _fill_waiting(storage: BaseStorage, copy: str) -> None:
    waiting = [a_task(f"waiting-{n}{copy}", args=("worth", n)) for n in range(3)]
    await storage.enqueue_many(waiting)
    await storage.enqueue(a_task(f"only{copy}", unique=f"key{copy}", metadata={"a": 1}))
    daily = a_task(f"daily{copy}", args=(1,))
    await storage.put_schedule(Schedule(id=daily.id, task=daily, interval=60.0))
    await storage.pause_queue(f"resting{copy}")


async def use(storage: BaseStorage) -> int:
    """Call every verb, ignoring refusals; returns the number of refusals."""
    calls: list[Call] = [
        lambda: storage.reserve(20),
        storage.list_tasks,
        lambda: storage.list_tasks(status=TaskStatus.FAILED),
        storage.list_dead,
        storage.list_schedules,
        lambda: storage.get_schedule("daily"),
        *(storage.stats, storage.workers, storage.paused_queues, storage.gates),
    ]
    for task_id in ("done", "dead", "again", "beat", "waiting-0", "only"):
        calls += [
            partial(read, task_id)
            for read in (
                *(storage.get_task, storage.get_result, storage.history, storage.get_dead),
                *(storage.get_progress, storage.load_checkpoint, storage.get_dead_task),
                storage.read_output,
            )
        ]
    return await _refusals(
        (*calls, lambda: storage.retry_dead("dead"), storage.give_back_abandoned)
    )


async def use_all(storage: BaseStorage, copies: Sequence[str]) -> int:
    """Read each record by the verbs that read it, then claim all; returns the number of refusals."""
    reads: dict[str, tuple[Read, ...]] = {
        "done": (storage.get_task, storage.get_result),
        "dead": (storage.get_dead, storage.get_dead_task, storage.get_result, storage.history),
        "again": (
            *(storage.history, storage.load_checkpoint, storage.get_progress),
            storage.read_output,
        ),
        "beat": (storage.get_task, storage.get_result),
        "only": (storage.get_task,),
        "daily": (storage.get_schedule,),
    }
    calls: list[Call] = [
        *(storage.list_tasks, storage.list_dead, storage.list_schedules, storage.stats),
        *(storage.workers, storage.paused_queues, storage.gates),
    ]
    for name, verbs in reads.items():
        calls += [partial(read, name + copy) for copy in copies for read in verbs]
    calls += [partial(storage.reserve, _CLAIMED)] * (8 * len(copies) // _CLAIMED + 1)
    calls += [partial(storage.retry_dead, f"dead{copy}") for copy in copies]
    return await _refusals((*calls, storage.give_back_abandoned))


async def _refusals(calls: Iterable[Call]) -> int:
    refused = 0
    for call in calls:
        try:
            await call()
        except OmniqError:
            refused += 1
    return refused


Call = Callable[[], Awaitable[object]]
Read = Callable[[str], Awaitable[object]]
_CLAIMED = 50
