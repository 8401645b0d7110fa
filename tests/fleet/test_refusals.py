"""A server that refuses a worker ends it with one line; a worker waits for one that is down."""

from __future__ import annotations

import re

import pytest

from omniq import AsyncWorkerPool, StorageError, StorageRefused, TaskQueue
from omniq.storage.memory import MemoryStorage
from omniq.testing.faults import FaultyStorage
from omniq.testing.servers import PostgresServer, Server
from tests.acceptance.command import WorkerCommand
from tests.fleet.fleet_tasks import note

pytestmark = pytest.mark.timeout(120)


def with_password(server: Server, password: str) -> str:
    return server.url.replace(server.password, password)


def output_of(command: WorkerCommand) -> list[str]:
    """Return the output without log lines, which start with their time."""
    return [line for line in command.lines if not re.match(r"\d{4}-", line)]


def test_a_wrong_password_ends_a_worker_with_one_line(start_server, start_worker):
    server = start_server()
    command = start_worker(with_password(server, "wrong-secret"))

    assert command.ends(30) == 1
    (line,) = output_of(command)
    assert line.startswith("omniq: ")
    assert "wrong-secret" not in command.text
    assert "Traceback" not in command.text


@pytest.mark.deep_on("postgres", "nats")
def test_a_wrong_password_ends_a_worker_of_several_processes_with_one_line(
    start_server, start_worker
):
    server = start_server()
    command = start_worker(with_password(server, "wrong-secret"), "--processes", "2")

    assert command.ends(30) == 1
    assert len(output_of(command)) == 1


def test_a_missing_database_ends_a_worker_with_one_line(start_worker):
    pytest.importorskip("omniq.storage.postgres")
    with PostgresServer() as server:
        command = start_worker(server.database_url("nowhere"))

        assert command.ends(30) == 1
        (line,) = output_of(command)
    assert "nowhere" in line


def test_a_server_that_evicts_keys_ends_a_worker_with_one_line(start_worker):
    pytest.importorskip("omniq.storage.redis")
    from omniq.testing.servers import RedisServer

    with RedisServer(options={"maxmemory-policy": "allkeys-lru"}) as server:
        command = start_worker(server.url)

        assert command.ends(30) == 1
        (line,) = output_of(command)
    assert "noeviction" in line


@pytest.mark.deep_on("postgres", "nats")
@pytest.mark.fault("F48", "F98")
def test_a_worker_waits_for_a_server_that_is_down(start_server, start_worker, tmp_path):
    server = start_server()
    server.stop()
    command = start_worker(server.url)
    command.wait_for("storage.failing", within=30)
    server.start()
    with TaskQueue(server.url) as queue:
        assert queue.enqueue(note, str(tmp_path), "late").result(timeout=20) == "late"
    command.process.terminate()

    assert command.ends() == 0
    # Reported once, for any number of attempts.
    assert command.text.count("storage.failing") == 1


async def test_a_running_pool_that_is_refused_ends_with_the_reason():
    storage = FaultyStorage(MemoryStorage())
    async with storage:
        pool = AsyncWorkerPool(storage, 1, 0.05)
        await pool.start()
        storage.fail("reserve", error=StorageRefused("the password was changed"), times=None)
        with pytest.raises(StorageRefused, match="the password was changed"):
            await pool.wait()

        assert not pool.running


async def test_a_pool_waits_until_its_server_is_back():
    storage = FaultyStorage(MemoryStorage())
    async with storage:
        pool = AsyncWorkerPool(storage, 1, 0.05)
        await pool.start()
        failed = storage.calls["reserve"] + 2
        storage.fail("reserve", error=StorageError("away"), times=2)
        while storage.calls["reserve"] <= failed:
            await storage.clock.sleep(0.01)

        assert pool.running
        await pool.stop()
