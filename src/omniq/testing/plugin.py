"""pytest fixtures with real servers: `pytest_plugins = ["omniq.testing.plugin"]` in a conftest.

| fixture | value |
|---|---|
| `postgres_url` | a unique schema that does not exist yet, as a URL for omniq (`…?schema=…`) |
| `postgres_database` | a new empty database, as a plain URL for any driver |
| `redis_url` | a unique key prefix, as a URL for omniq (`…?prefix=…`) |
| `nats_url` | an unused store, as a URL for omniq |
| `s3_url` | an unused prefix in a bucket, as a URL for omniq; its keys are in the environment |
| `postgres_server_url`, `redis_server_url`, `nats_server_url` | the server behind them, for the whole run |
| `s3_server_url` | a store on the S3 server (MiniStack), for the whole run |
| `seaweed_server` | a server of SeaweedFS, for tests of races and faults |

The first test that needs a server starts it; all processes of a run under pytest-xdist share it. Its
data does not survive a power cut (`servers.py` has servers whose data does, and which a test may
kill). Set `OMNIQ_TEST_POSTGRES_URL`, `OMNIQ_TEST_REDIS_URL`, `OMNIQ_TEST_NATS_URL` and `OMNIQ_TEST_S3_URL` (the
URL of a store below whose prefix the tests write) to use other servers. Without a server the test is skipped,
with the reason.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import pytest

from omniq.concurrency.portal import Portal
from omniq.testing.s3_servers import MiniStackServer, S3Server, SeaweedServer
from omniq.testing.server_programs import ServerMissing
from omniq.testing.servers import NatsServer, PostgresServer, RedisServer, Server, base_folder

_S = TypeVar("_S", bound=Server)
_S3 = TypeVar("_S3", bound=S3Server)


@pytest.fixture(scope="session")
def postgres_server_url() -> Iterator[str]:
    yield from _server_url("OMNIQ_TEST_POSTGRES_URL", PostgresServer)


@pytest.fixture(scope="session")
def redis_server_url() -> Iterator[str]:
    yield from _server_url("OMNIQ_TEST_REDIS_URL", RedisServer)


@pytest.fixture(scope="session")
def nats_server_url() -> Iterator[str]:
    yield from _server_url("OMNIQ_TEST_NATS_URL", NatsServer)


@pytest.fixture
def nats_url(nats_server_url: str) -> Iterator[str]:
    store = f"t_{uuid4().hex[:16]}"
    yield f"{nats_server_url}/{store}"
    asyncio.run(_delete_streams(nats_server_url, store))


async def _delete_streams(url: str, store: str) -> None:
    import nats

    client = await nats.connect(url)
    for stream in (f"OQ_{store}", f"OQK_{store}"):
        await client.request(f"$JS.API.STREAM.DELETE.{stream}", timeout=5)
    await client.close()


def _server_url(variable: str, kind: Callable[..., _S]) -> Iterator[str]:
    given = os.environ.get(variable)
    if given:
        yield given
        return
    try:
        for server in _server(kind):
            yield server.url
    except ServerMissing as missing:
        pytest.skip(f"{missing}, or set {variable} to the URL of a server")


def _server(kind: Callable[..., _S]) -> Iterator[_S]:
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        with kind() as server:
            yield server
        return
    server = kind(folder=Path(base_folder(), f"omniq-{kind.__name__.lower()}-{run}"))
    server.share()
    yield server


@pytest.fixture(scope="session")
def s3_server_url() -> Iterator[str]:
    given = os.environ.get("OMNIQ_TEST_S3_URL")
    if given:
        yield given
        return
    for server in _s3_server(MiniStackServer):
        yield server.url


@pytest.fixture(scope="session")
def seaweed_server() -> Iterator[SeaweedServer]:
    yield from _s3_server(SeaweedServer)


def _s3_server(kind: Callable[..., _S3]) -> Iterator[_S3]:
    with pytest.MonkeyPatch.context() as patch:
        for server in _server(kind):
            for name, value in server.environment.items():
                patch.setenv(name, value)
            yield server


@pytest.fixture
def s3_url(s3_server_url: str) -> str:
    return _below(s3_server_url, f"t_{uuid4().hex[:16]}")


class _Administrator:
    """Runs SQL outside the event loops of the tests."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._portal = Portal()
        self._connection: Any = None

    def execute(self, sql: str) -> None:
        self._portal.run(self._execute(sql))

    async def _execute(self, sql: str) -> None:
        import asyncpg

        if self._connection is None or self._connection.is_closed():
            self._connection = await asyncpg.connect(self._url)
        await self._connection.execute(sql)

    def close(self) -> None:
        if self._connection is not None:
            self._portal.run(self._connection.close())
        self._portal.close()


@pytest.fixture(scope="session")
def _administrator(postgres_server_url: str) -> Iterator[_Administrator]:
    administrator = _Administrator(postgres_server_url)
    yield administrator
    administrator.close()


@pytest.fixture
def postgres_url(postgres_server_url: str, _administrator: _Administrator) -> Iterator[str]:
    schema = f"t_{uuid4().hex[:16]}"
    yield _with_option(postgres_server_url, f"schema={schema}")
    # A connection that the test left open may still hold a lock on the schema.
    _administrator.execute(
        f"SET lock_timeout = '5s'; SET client_min_messages = warning;"
        f'DROP SCHEMA IF EXISTS "{schema}" CASCADE'
    )


@pytest.fixture
def postgres_database(postgres_server_url: str, _administrator: _Administrator) -> Iterator[str]:
    name = f"t_{uuid4().hex[:16]}"
    _administrator.execute(f'CREATE DATABASE "{name}"')
    yield urlunsplit(urlsplit(postgres_server_url)._replace(path=f"/{name}"))
    _administrator.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture
def redis_url(redis_server_url: str) -> Iterator[str]:
    from redis import Redis

    prefix = f"t_{uuid4().hex[:16]}"
    yield _with_option(redis_server_url, f"prefix={prefix}")
    with Redis.from_url(redis_server_url) as server:
        for key in server.scan_iter(match=f"*{prefix}*", count=1000):
            server.delete(key)


def _with_option(url: str, option: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}{option}"


def _below(url: str, folder: str) -> str:
    place, _, query = url.partition("?")
    return f"{place}/{folder}?{query}"
