"""Servers that hang, answer with garbage, are slow, or whose tables are locked."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest
import redis

from omniq import AsyncTaskQueue, Settings
from omniq.errors import StorageError
from omniq.storage import open_storage
from omniq.testing.builders import a_task
from omniq.testing.fault_proxy import FaultProxy
from omniq.testing.servers import NatsServer, PostgresServer, RedisServer, Server
from tests.security.conftest import raw_store_of
from tests.security.raw_stores import RawPostgresStore


@pytest.fixture(params=[RedisServer, PostgresServer, NatsServer], ids=["redis", "postgres", "nats"])
def own_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A dedicated server, which a test may pause."""
    with request.param() as server:
        yield server


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        # A child process of the server may have ended.
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _with_children(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [pid, *(each for child in children for each in _with_children(int(child)))]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.fault("F33")
async def test_a_worker_waits_for_a_server_that_hangs_for_seconds(own_server):
    async with open_storage(own_server.url) as storage:
        await storage.enqueue(a_task("before"))
        stopped = _with_children(own_server.pid)
        _signal(stopped, signal.SIGSTOP)
        waiting = asyncio.create_task(storage.enqueue(a_task("meanwhile")))
        done, _ = await asyncio.wait([waiting], timeout=2.0)
        _signal(stopped, signal.SIGCONT)
        await asyncio.wait_for(waiting, 40)
        claimed = sorted(task.id for task in await storage.reserve(5))

    assert not done
    assert claimed == ["before", "meanwhile"]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.fault("F42")
async def test_a_worker_waits_for_a_redis_that_is_a_replica_temporarily():
    with RedisServer() as server:
        admin = redis.Redis.from_url(server.url)
        async with open_storage(server.url) as storage:
            await storage.enqueue(a_task("before"))
            admin.execute_command("REPLICAOF", "127.0.0.1", "1")
            waiting = asyncio.create_task(storage.enqueue(a_task("meanwhile")))
            done, _ = await asyncio.wait([waiting], timeout=1.0)
            admin.execute_command("REPLICAOF", "NO", "ONE")
            await asyncio.wait_for(waiting, 20)
            claimed = sorted(task.id for task in await storage.reserve(5))
        admin.close()

    assert not done
    assert claimed == ["before", "meanwhile"]


class GarbageServer:
    """Answers every request on every connection with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.callers = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
                self.callers += 1
                with caller:
                    caller.settimeout(2)
                    caller.recv(4096)
                    caller.sendall(self._answer)
            except OSError:
                if self._listener.fileno() < 0:
                    return

    def close(self) -> None:
        self._listener.close()


GARBAGE = [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 64, b"$9999999999\r\n", b"S" + b"\xff" * 64, b"-ERR\r\n" * 9, b"*1\r\n*1\r\n" * 50]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.fault("F37")
@pytest.mark.parametrize(
    "url",
    [
        "redis://:pw@127.0.0.1:{}/0",
        "postgresql://u:pw@127.0.0.1:{}/db",
        "nats://u:pw@127.0.0.1:{}/s",
    ],
)
@pytest.mark.parametrize("answer", GARBAGE, ids=range(len(GARBAGE)))
async def test_a_server_that_answers_with_garbage_raises_a_typed_error(url, answer):
    babbler = GarbageServer(answer)
    try:
        with pytest.raises(StorageError):
            async with open_storage(url.format(babbler.port)) as storage:
                await storage.enqueue(a_task())
    finally:
        babbler.close()

    assert babbler.callers > 0


@pytest.mark.deep
@pytest.mark.timeout(120)
@pytest.mark.fault("F38")
@pytest.mark.parametrize("server", ["redis_url", "postgres_url"])
async def test_on_a_slow_server_each_task_still_runs_once(server, request, tmp_path):
    url = request.getfixturevalue(server)
    settings = Settings(lease=4.0, poll_interval=0.2)
    async with FaultProxy(url) as proxy:
        proxy.delay(0.3)
        async with AsyncTaskQueue(proxy.url, settings=settings) as queue:
            handles = [
                await queue.enqueue("tests.faults.fault_tasks.append", str(tmp_path / "runs"), n)
                for n in range(5)
            ]
            async with queue.worker(concurrency=5):
                for handle in handles:
                    await handle.result(timeout=60)
        passed = proxy.counts.replies

    assert passed > 10
    assert sorted((tmp_path / "runs").read_text().split()) == ["0", "1", "2", "3", "4"]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.fault("F43")
async def test_a_call_waits_for_a_locked_table(postgres_url):
    raw_store = raw_store_of(postgres_url)
    assert isinstance(raw_store, RawPostgresStore)
    async with open_storage(postgres_url) as storage:
        await storage.enqueue(a_task("before"))
        with psycopg.connect(raw_store._db.info.dsn, password=raw_store._db.info.password) as other:
            other.execute(f'LOCK TABLE "{raw_store.schema}".live IN ACCESS EXCLUSIVE MODE'.encode())
            waiting = asyncio.create_task(storage.enqueue(a_task("meanwhile")))
            done, _ = await asyncio.wait([waiting], timeout=1.0)
            other.rollback()
        await asyncio.wait_for(waiting, 20)
        ended = raw_store._all(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE application_name LIKE 'omniq%%' AND query LIKE %s",
            f"%{raw_store.schema}%",
        )
        claimed = sorted(task.id for task in await storage.reserve(5))
    raw_store.close()

    assert not done
    assert ended[0][0] > 0
    assert claimed == ["before", "meanwhile"]
