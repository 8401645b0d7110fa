"""Random calls by several owners, in any order: servers return what the model returns.

In a separate file from the other backends, so that the two files can run in parallel.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from uuid import uuid4

import nats
import pytest
from redis.asyncio import Redis

from omniq.settings import Settings
from omniq.storage.base import BaseStorage, StorageOptions
from omniq.storage.nats import NatsStorage
from omniq.storage.redis import RedisStorage
from omniq.storage.s3 import S3Storage
from omniq.testing.clock import ManualClock
from omniq.testing.state_machine_stores import OpenStore
from tests.properties.state_machine_run import FEWER_EXAMPLES, LONG_RUN_EXAMPLES, run_state_machine
from tests.storage.postgres_stores import Schema


class RedisStore:
    """A store under a unique prefix, on a server that other tests use too."""

    def __init__(
        self, url: str, clock: ManualClock, settings: Settings, max_pending: int | None
    ) -> None:
        self._url = url
        self._prefix = f"example-{uuid4().hex}"
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
        """Delete the loaded scripts, as a restart of the server does."""
        async with Redis.from_url(self._url) as server:
            await server.script_flush()

    async def discard(self) -> None:
        async with Redis.from_url(self._url) as server:
            keys = [key async for key in server.scan_iter(f"{{{self._prefix}}}:*", count=1000)]
            await server.delete(*keys, "none")


class S3Store:
    """A store under a unique prefix, with frequent snapshots."""

    def __init__(
        self, url: str, clock: ManualClock, settings: Settings, max_pending: int | None
    ) -> None:
        place, _, query = url.partition("?")
        self._url = f"{place}/{uuid4().hex}?{query}"
        self._make = partial(
            S3Storage,
            self._url,
            snapshot_bytes=5_000,
            clock=clock,
            settings=settings,
            max_pending=max_pending,
        )

    def another(self) -> BaseStorage:
        return self._make()

    async def reopen(self) -> None:
        """Do nothing: each object loads the log when it is opened."""

    async def discard(self) -> None:
        """Do nothing: the server ends with the tests."""


class NatsStore:
    """A store of its own name, on a server that other tests use too. Snapshots are small and frequent."""

    def __init__(
        self, url: str, clock: ManualClock, settings: Settings, max_pending: int | None
    ) -> None:
        self._server = url
        self._store = f"example-{uuid4().hex}"
        self._options: StorageOptions = {
            "clock": clock,
            "settings": settings,
            "max_pending": max_pending,
        }

    def another(self) -> BaseStorage:
        return NatsStorage(f"{self._server}/{self._store}", snapshot_bytes=2_000, **self._options)

    async def reopen(self) -> None:
        """Do nothing: each object loads the log when it is opened."""

    async def discard(self) -> None:
        client = await nats.connect(self._server)
        for stream in (f"OQ_{self._store}", f"OQK_{self._store}"):
            await client.request(f"$JS.API.STREAM.DELETE.{stream}", timeout=5)
        await client.close()


class PostgresStore:
    """A store in a separate schema, which is emptied for the next example."""

    def __init__(
        self, schema: Schema, clock: ManualClock, settings: Settings, max_pending: int | None
    ) -> None:
        self._schema = schema
        self._options = {"clock": clock, "settings": settings, "max_pending": max_pending}

    def another(self) -> BaseStorage:
        return self._schema.new_storage(**self._options)

    async def reopen(self) -> None:
        """Do nothing: the database holds everything."""

    async def discard(self) -> None:
        self._schema.wipe()


@pytest.fixture(scope="module")
def open_on_postgres(postgres_server_url: str) -> Iterator[OpenStore]:
    schema = Schema(postgres_server_url)
    yield partial(PostgresStore, schema)
    schema.drop()


@pytest.fixture
def open_store(request: pytest.FixtureRequest, server: str) -> OpenStore:
    match server:
        case "postgres":
            opened: OpenStore = request.getfixturevalue("open_on_postgres")
            return opened
        case "redis":
            store: Any = RedisStore
        case "nats":
            store = NatsStore
        case "s3":
            store = S3Store
    return partial(store, request.getfixturevalue(f"{server}_server_url"))


@pytest.mark.slow
@pytest.mark.deep_on("nats", "postgres", "s3")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("server", "examples", "steps"),
    [("redis", 10, 50), ("nats", 8, 50), ("postgres", 8, 50), ("s3", 3, 40)],
)
def test_a_server_answers_as_the_model_does(
    open_store: OpenStore, examples: int, steps: int
) -> None:
    run_state_machine(open_store, examples=examples, steps=steps)


@pytest.mark.deep
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("server", "examples"),
    [
        ("redis", LONG_RUN_EXAMPLES),
        ("postgres", LONG_RUN_EXAMPLES),
        ("nats", FEWER_EXAMPLES),
        ("s3", FEWER_EXAMPLES),
    ],
)
def test_a_server_answers_as_the_model_does_in_long_runs(
    open_store: OpenStore, examples: int
) -> None:
    run_state_machine(open_store, examples=examples, steps=100)
