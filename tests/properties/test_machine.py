"""Any number of owners, any moves, in any order: every backend answers as the model does."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from redis.asyncio import Redis

from omniq.settings import Settings
from omniq.storage.base import BaseStorage
from omniq.storage.file import FileStorage
from omniq.storage.redis import RedisStorage
from omniq.storage.sqlite import SQLiteStorage
from omniq.testing.clock import ManualClock
from omniq.testing.machine import machine_for
from omniq.testing.sides import MemoryStore, OpenStore
from tests.storage.postgres_stores import Schema

# Every game has a store of its own: in memory a folder costs nothing, and durability is not at stake.
_FAST = Path("/dev/shm")


class FolderStore:
    """A store in a folder that goes with it."""

    def __init__(self, make: Callable[[Path], BaseStorage]) -> None:
        self._make = make
        self._folder = Path(tempfile.mkdtemp(dir=_FAST if _FAST.is_dir() else None))

    def another(self) -> BaseStorage:
        return self._make(self._folder)

    async def reopen(self) -> None:
        """All there is lies in the folder."""

    async def discard(self) -> None:
        shutil.rmtree(self._folder)


def sqlite_store(clock: ManualClock, settings: Settings, max_pending: int | None) -> FolderStore:
    return FolderStore(
        lambda folder: SQLiteStorage(
            folder / "tasks.db", clock=clock, settings=settings, max_pending=max_pending
        )
    )


def file_store(clock: ManualClock, settings: Settings, max_pending: int | None) -> FolderStore:
    return FolderStore(
        lambda folder: FileStorage(folder, clock=clock, settings=settings, max_pending=max_pending)
    )


class RedisStore:
    """A store with a prefix of its own on a server that others use as well."""

    def __init__(
        self, url: str, clock: ManualClock, settings: Settings, max_pending: int | None
    ) -> None:
        self._url = url
        self._prefix = f"game-{uuid4().hex}"
        self._clock, self._settings, self._max_pending = clock, settings, max_pending

    def another(self) -> BaseStorage:
        return RedisStorage(
            self._url,
            prefix=self._prefix,
            clock=self._clock,
            settings=self._settings,
            max_pending=self._max_pending,
        )

    async def reopen(self) -> None:
        """A server that was restarted has forgotten its scripts."""
        async with Redis.from_url(self._url) as server:
            await server.script_flush()

    async def discard(self) -> None:
        async with Redis.from_url(self._url) as server:
            keys = [key async for key in server.scan_iter(f"{{{self._prefix}}}:*", count=1000)]
            await server.delete(*keys, "none")


class PostgresStore:
    """A store in a schema of its own, which is emptied for the next game."""

    def __init__(
        self, schema: Schema, clock: ManualClock, settings: Settings, max_pending: int | None
    ) -> None:
        self._schema = schema
        self._options = {"clock": clock, "settings": settings, "max_pending": max_pending}

    def another(self) -> BaseStorage:
        return self._schema.another(**self._options)

    async def reopen(self) -> None:
        """All there is lies in the database."""

    async def discard(self) -> None:
        self._schema.wipe()


@pytest.fixture(scope="module")
def open_on_postgres(postgres_server_url: str) -> Iterator[OpenStore]:
    schema = Schema(postgres_server_url)
    yield partial(PostgresStore, schema)
    schema.drop()


def play(open_store: OpenStore, *, games: int, moves: int) -> None:
    run_state_machine_as_test(
        machine_for(open_store),
        settings=settings(
            max_examples=games,
            stateful_step_count=moves,
            # A game takes as long as the machine is busy; the test has a timeout of its own.
            deadline=None,
            # Every run plays other games: over time they reach what 200 fixed ones never would.
            # But what decides over a change plays the same ones each time: it judges the change,
            # and not its luck.
            derandomize="CI" in os.environ,
            print_blob=True,
            # The same: slow and large games are what this is for.
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("open_store", "games"),
    [(MemoryStore, 200), (sqlite_store, 200), (file_store, 50)],
    ids=["memory", "sqlite", "file"],
)
def test_a_backend_answers_as_the_model_does(open_store: OpenStore, games: int) -> None:
    play(open_store, games=games, moves=50)


@pytest.mark.deep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "open_store", [MemoryStore, sqlite_store, file_store], ids=["memory", "sqlite", "file"]
)
def test_a_backend_answers_as_the_model_does_in_long_games(open_store: OpenStore) -> None:
    play(open_store, games=500, moves=100)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_redis_answers_as_the_model_does(redis_server_url: str) -> None:
    play(partial(RedisStore, redis_server_url), games=50, moves=50)


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_redis_answers_as_the_model_does_in_long_games(redis_server_url: str) -> None:
    play(partial(RedisStore, redis_server_url), games=500, moves=100)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_postgresql_answers_as_the_model_does(open_on_postgres: OpenStore) -> None:
    play(open_on_postgres, games=50, moves=50)


@pytest.mark.deep
@pytest.mark.timeout(1500)
def test_postgresql_answers_as_the_model_does_in_long_games(open_on_postgres: OpenStore) -> None:
    play(open_on_postgres, games=500, moves=100)
