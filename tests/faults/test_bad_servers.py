"""Servers that stand still, talk nonsense, take their time, or are locked up by others."""

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
from omniq.testing.servers import PostgresServer, RedisServer, Server
from tests.security.conftest import vault_of
from tests.security.vaults import PostgresVault


@pytest.fixture(params=[RedisServer, PostgresServer], ids=["redis", "postgres"])
def own_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server that a test may stop."""
    with request.param() as server:
        yield server


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        # A server's helpers come and go.
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _with_children(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [pid, *(each for child in children for each in _with_children(int(child)))]


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.fault("F33")
async def test_a_server_that_stands_still_for_seconds_is_waited_for(own_server):
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
@pytest.mark.timeout(60)
@pytest.mark.fault("F42")
async def test_a_redis_that_is_a_replica_for_a_while_is_waited_for():
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


class Babbler:
    """Answers every connection with the same bytes, whatever it is asked."""

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


NONSENSE = [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 64, b"$9999999999\r\n", b"S" + b"\xff" * 64, b"-ERR\r\n" * 9, b"*1\r\n*1\r\n" * 50]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.fault("F37")
@pytest.mark.parametrize("url", ["redis://:pw@127.0.0.1:{}/0", "postgresql://u:pw@127.0.0.1:{}/db"])
@pytest.mark.parametrize("answer", NONSENSE, ids=range(len(NONSENSE)))
async def test_a_server_that_talks_nonsense_is_a_typed_error(url, answer):
    babbler = Babbler(answer)
    try:
        with pytest.raises(StorageError):
            async with open_storage(url.format(babbler.port)) as storage:
                await storage.enqueue(a_task())
    finally:
        babbler.close()

    assert babbler.callers > 0


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.fault("F38")
@pytest.mark.parametrize("server", ["redis_url", "postgres_url"])
async def test_a_slow_server_costs_time_and_no_second_run(server, request, tmp_path):
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
@pytest.mark.timeout(60)
@pytest.mark.fault("F43")
async def test_a_table_that_somebody_has_locked_is_waited_for(postgres_url):
    vault = vault_of(postgres_url)
    assert isinstance(vault, PostgresVault)
    async with open_storage(postgres_url) as storage:
        await storage.enqueue(a_task("before"))
        with psycopg.connect(vault._db.info.dsn, password=vault._db.info.password) as other:
            other.execute(f'LOCK TABLE "{vault.schema}".live IN ACCESS EXCLUSIVE MODE'.encode())
            waiting = asyncio.create_task(storage.enqueue(a_task("meanwhile")))
            done, _ = await asyncio.wait([waiting], timeout=1.0)
            other.rollback()
        await asyncio.wait_for(waiting, 20)
        ended = vault._all(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE application_name LIKE 'omniq%%' AND query LIKE %s",
            f"%{vault.schema}%",
        )
        claimed = sorted(task.id for task in await storage.reserve(5))
    vault.close()

    assert not done
    assert ended[0][0] > 0
    assert claimed == ["before", "meanwhile"]
