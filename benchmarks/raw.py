"""The minimum that a driver has to do for a task queue, as a limit to compare omniq with.

Each store keeps tasks durably, claims a batch for an owner with a fencing token, and records a
result row for each task, in as few statements as the driver allows. Nothing else: no retries,
leases, priorities, delays or wake-ups.
"""

from __future__ import annotations

import os
import sqlite3
import uuid
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Self

BODY = b"x" * 120
RESULT = b"r" * 60


class Raw(ABC):
    """A minimal store. `record_and_claim` records results and claims tasks in one transaction."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @abstractmethod
    async def enqueue(self, count: int) -> None: ...

    @abstractmethod
    async def record_and_claim(self, finished: list[str], limit: int) -> list[str]: ...

    @abstractmethod
    async def close(self) -> None: ...


class RawSqlite(Raw):
    """Runs in the calling thread, which is faster than a queue that does not block its event loop."""

    def __init__(self, path: Path, durability: str) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        level = "FULL" if durability == "power" else "NORMAL"
        self._db.executescript(
            f"""
            PRAGMA journal_mode = WAL; PRAGMA synchronous = {level};
            CREATE TABLE tasks (
                seq INTEGER PRIMARY KEY, id TEXT, owner TEXT, token INTEGER DEFAULT 0, body BLOB
            );
            CREATE INDEX ready ON tasks (seq) WHERE owner IS NULL;
            CREATE UNIQUE INDEX ids ON tasks (id);
            CREATE TABLE results (id TEXT PRIMARY KEY, result BLOB) WITHOUT ROWID;
            """
        )

    async def enqueue(self, count: int) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        rows = [(uuid.uuid4().hex, BODY) for _ in range(count)]
        self._db.executemany("INSERT INTO tasks (id, body) VALUES (?, ?)", rows)
        self._db.execute("COMMIT")

    async def record_and_claim(self, finished: list[str], limit: int) -> list[str]:
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany(
            "DELETE FROM tasks WHERE id = ? AND owner = 'me' AND token = 1",
            [(task_id,) for task_id in finished],
        )
        self._db.executemany(
            "INSERT INTO results VALUES (?, ?)", [(task_id, RESULT) for task_id in finished]
        )
        claimed = self._db.execute(
            "UPDATE tasks SET owner = 'me', token = token + 1 WHERE seq IN "
            "(SELECT seq FROM tasks WHERE owner IS NULL ORDER BY seq LIMIT ?) RETURNING id, body",
            (limit,),
        ).fetchall()
        self._db.execute("COMMIT")
        return [task_id for task_id, _ in claimed]

    async def close(self) -> None:
        self._db.close()


class RawFiles(Raw):
    """A file for each task and each result; with `power`, each is synced to the disk."""

    def __init__(self, folder: Path, durability: str) -> None:
        self._tasks, self._results = folder / "tasks", folder / "results"
        for each in (self._tasks, self._results):
            each.mkdir(parents=True)
        self._is_synced = durability == "power"
        self._names: list[str] = []

    async def enqueue(self, count: int) -> None:
        for _ in range(count):
            name = uuid.uuid4().hex
            self._write(self._tasks / name, BODY)
            self._names.append(name)
        self._sync(self._tasks)

    async def record_and_claim(self, finished: list[str], limit: int) -> list[str]:
        for name in finished:
            self._write(self._results / name, RESULT)
            os.unlink(self._tasks / name)
        if finished:
            self._sync(self._results)
        claimed, self._names = self._names[:limit], self._names[limit:]
        for name in claimed:
            (self._tasks / name).read_bytes()
        return claimed

    async def close(self) -> None:
        """Do nothing: no file is open."""

    def _write(self, path: Path, data: bytes) -> None:
        fd = os.open(f"{path}.new", os.O_CREAT | os.O_WRONLY)
        os.write(fd, data)
        if self._is_synced:
            os.fsync(fd)
        os.close(fd)
        os.rename(f"{path}.new", path)

    def _sync(self, folder: Path) -> None:
        if self._is_synced:
            fd = os.open(folder, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


class RawPostgres(Raw):
    """Two prepared statements on one connection."""

    _SETUP = """
        CREATE SCHEMA {0};
        CREATE TABLE {0}.tasks (
            seq bigserial, id uuid PRIMARY KEY, owner text, token bigint DEFAULT 0, body bytea
        );
        CREATE INDEX ON {0}.tasks (seq) WHERE owner IS NULL;
        CREATE TABLE {0}.results (id uuid PRIMARY KEY, result bytea);
    """
    _ENQUEUE = "INSERT INTO {0}.tasks (id, body) SELECT * FROM unnest($1::uuid[], $2::bytea[])"
    _RECORD_AND_CLAIM = """
        WITH removed AS (
            DELETE FROM {0}.tasks WHERE id = ANY ($1) AND owner = 'me' AND token = 1 RETURNING id
        ), stored AS (
            INSERT INTO {0}.results SELECT id, $2 FROM removed
        )
        UPDATE {0}.tasks SET owner = 'me', token = token + 1 WHERE ctid = ANY (array(
            SELECT ctid FROM {0}.tasks WHERE owner IS NULL ORDER BY seq LIMIT $3
            FOR UPDATE SKIP LOCKED
        )) RETURNING id, body
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._schema = f"raw_{uuid.uuid4().hex[:8]}"
        self._db: Any = None

    async def __aenter__(self) -> Self:
        import asyncpg

        self._db = await asyncpg.connect(self._url)
        await self._db.execute(self._SETUP.format(self._schema))
        return self

    async def enqueue(self, count: int) -> None:
        ids = [uuid.uuid4() for _ in range(count)]
        await self._db.execute(self._ENQUEUE.format(self._schema), ids, [BODY] * count)

    async def record_and_claim(self, finished: list[str], limit: int) -> list[str]:
        sql = self._RECORD_AND_CLAIM.format(self._schema)
        return [record[0] for record in await self._db.fetch(sql, finished, RESULT, limit)]

    async def close(self) -> None:
        await self._db.close()


class RawRedis(Raw):
    """Two scripts on one connection."""

    _ENQUEUE = """
        for i = 1, #ARGV, 2 do
            redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
            redis.call('RPUSH', KEYS[2], ARGV[i])
        end
    """
    _RECORD_AND_CLAIM = """
        for i = 3, #ARGV do
            if redis.call('HGET', KEYS[3], ARGV[i]) == 'me/1' then
                redis.call('HDEL', KEYS[3], ARGV[i])
                redis.call('HDEL', KEYS[1], ARGV[i])
                redis.call('HSET', KEYS[4], ARGV[i], ARGV[1])
            end
        end
        local ids = redis.call('LPOP', KEYS[2], ARGV[2])
        if not ids then return {} end
        local bodies = redis.call('HMGET', KEYS[1], unpack(ids))
        for _, id in ipairs(ids) do redis.call('HSET', KEYS[3], id, 'me/1') end
        return { ids, bodies }
    """

    def __init__(self, url: str) -> None:
        from redis.asyncio import Redis

        self._redis = Redis.from_url(url, single_connection_client=True)
        prefix = f"{{raw{uuid.uuid4().hex[:8]}}}"
        self._keys = [f"{prefix}:{name}" for name in ("tasks", "ready", "held", "results")]
        self._enqueue = self._redis.register_script(self._ENQUEUE)
        self._record_and_claim = self._redis.register_script(self._RECORD_AND_CLAIM)

    async def enqueue(self, count: int) -> None:
        parts = [part for _ in range(count) for part in (uuid.uuid4().hex, BODY)]
        await self._enqueue(keys=self._keys, args=parts)

    async def record_and_claim(self, finished: list[str], limit: int) -> list[str]:
        answer = await self._record_and_claim(keys=self._keys, args=[RESULT, limit, *finished])
        return list(answer[0]) if answer else []

    async def close(self) -> None:
        await self._redis.aclose()


def raw_store(store: str, url: str, folder: Path) -> Raw:
    """Return the raw store for one of `stores.py`."""
    kind, _, durability = store.partition("-")
    match kind:
        case "sqlite":
            return RawSqlite(folder / "raw.db", durability)
        case "file":
            return RawFiles(folder / "raw", durability)
        case "postgres":
            return RawPostgres(url)
        case _:
            return RawRedis(url)
