"""The test servers: data survives restarts, and no process or folder remains."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest
from redis import Redis

from omniq import AsyncTaskQueue, StorageError
from omniq.settings import Settings
from omniq.testing.servers import PostgresServer, RedisServer, Server, base_folder
from tests.fleet.fleet_tasks import note

KINDS = [PostgresServer, RedisServer]

OWNER = """
import sys, time
from omniq.testing import servers
server = getattr(servers, sys.argv[1])()
server.start()
print(server.pid, server.folder, flush=True)
time.sleep(60)
"""

SHARER = """
import sys
from pathlib import Path
from uuid import uuid4
from omniq.testing import servers
server = getattr(servers, sys.argv[1])(folder=Path(sys.argv[2]))
server.share()
print(server.pid, server.url, flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=KINDS)
def kind(request):
    # Raises an error that skips the test if the program is not installed.
    request.param()
    return request.param


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(pid: int, folder: Path) -> None:
    """Wait until the server and its supervisor have ended; the test's timeout is the deadline."""
    while is_alive(pid) or folder.exists():
        time.sleep(0.01)


@pytest.mark.deep_on("PostgresServer")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_server_ends_with_the_process_that_started_it(kind, end):
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, kind.__name__],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        pid, folder = owner.stdout.readline().split()
        assert is_alive(int(pid))
        owner.send_signal(end)

    wait_until_gone(int(pid), Path(folder))


@pytest.mark.deep_on("PostgresServer")
@pytest.mark.timeout(120)
def test_a_shared_server_is_started_once_and_ends_with_its_last_user(kind):
    # Not in pytest's folder, which other users cannot enter.
    place = Path(base_folder(), f"omniq-shared-{uuid4().hex}")
    sharers = [
        subprocess.Popen(
            [sys.executable, "-c", SHARER, kind.__name__, str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    lines = {sharer.stdout.readline() for sharer in sharers if sharer.stdout}
    assert len(lines) == 1
    pid = int(lines.pop().split()[0])
    sharers[0].kill()
    sharers[1].communicate("")
    assert is_alive(pid)
    sharers[2].communicate("")
    sharers[0].communicate()

    wait_until_gone(pid, place)


@pytest.mark.timeout(120)
@pytest.mark.fault("F48")
@pytest.mark.parametrize("kind", KINDS)
async def test_an_enqueue_tries_to_reach_its_server_for_as_long_as_the_settings_say(kind):
    with kind() as server:
        short, long = (
            AsyncTaskQueue(server.url, settings=Settings(reconnect_timeout=seconds))
            for seconds in (0.05, 60.0)
        )
        async with short, long:
            for queue in (short, long):
                await queue.stats()
            server.kill()
            waiting = asyncio.create_task(long.enqueue(note, "folder", "name"))
            with pytest.raises(StorageError):
                await short.enqueue(note, "folder", "name")
            assert not waiting.done()
            server.start()
            handle = await waiting

            assert await long.get_task(handle.id) is not None


@pytest.mark.timeout(120)
@pytest.mark.fault("F39")
def test_a_durable_redis_still_has_acknowledged_tasks_after_sigkill_and_restart():
    with RedisServer(durable=True) as server:
        with Redis.from_url(server.url) as client:
            client.set("key", "value")
        pid = server.pid
        server.kill()
        assert not is_alive(pid)
        assert not server.is_running
        server.start()

        with Redis.from_url(server.url) as client:
            assert client.get("key") == b"value"


@pytest.mark.deep_on("16")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("version", [16, 18])
@pytest.mark.fault("F39")
async def test_a_durable_postgresql_still_has_acknowledged_tasks_after_sigkill_and_restart(version):
    import asyncpg

    with PostgresServer(durable=True, version=version) as server:
        writer = await asyncpg.connect(server.socket_url)
        await writer.execute("CREATE TABLE stored (number int); INSERT INTO stored VALUES (7)")
        server.kill()
        with pytest.raises((OSError, asyncpg.PostgresError, asyncpg.InterfaceError)):
            await writer.execute("SELECT 1")
        writer.terminate()
        server.start()

        reader = await asyncpg.connect(server.url)
        assert await reader.fetchval("SELECT number FROM stored") == 7
        assert await reader.fetchval("SHOW fsync") == "on"
        assert (await reader.fetchval("SHOW server_version")).startswith(str(version))
        await reader.close()


@pytest.mark.deep_on("PostgresServer")
@pytest.mark.timeout(120)
def test_a_server_has_the_same_address_after_a_restart(kind):
    server: Server = kind()
    with server:
        before = server.url
        server.stop()
        assert not server.is_running
        server.start()

        assert server.url == before
        assert server.is_running


def test_each_test_has_a_separate_place_on_a_shared_server(postgres_url, redis_url):
    assert "schema=t_" in postgres_url
    assert "prefix=t_" in redis_url


async def test_a_dedicated_database_is_empty(postgres_database):
    import asyncpg

    connection = await asyncpg.connect(postgres_database)
    tables = await connection.fetchval(
        "SELECT count(*) FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
    )
    await connection.close()

    assert tables == 0


@pytest.mark.timeout(120)
def test_a_given_server_is_used_and_none_is_started(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "def test_it(redis_url, redis_server_url):\n"
        "    assert redis_url.startswith(redis_server_url + '?prefix=t_')\n"
        "    print('used', redis_url)\n"
    )
    with RedisServer() as server:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "omniq.testing.plugin", "-rP", "."],
            cwd=tmp_path,
            env={**os.environ, "OMNIQ_TEST_REDIS_URL": server.url},
            capture_output=True,
            text=True,
        )

    assert "1 passed" in done.stdout
    assert f"used {server.url}" in done.stdout
