"""What a driver raises reaches callers as `StorageError`, and costs a pool no outcome."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from omniq import AsyncTaskQueue, StorageError, TaskStatus
from omniq.events import Event, StorageBack, StorageFailing, WorkerProblem
from omniq.testing.servers import PostgresServer, RedisServer
from tests.fleet.fleet_tasks import count, count_after, counts
from tests.worker.recorder import until

TASKS = 40

pytestmark = pytest.mark.timeout(120)


async def execute(server: PostgresServer, *statements: str) -> None:
    import asyncpg

    connection = await asyncpg.connect(server.url)
    for statement in statements:
        await connection.execute(statement)
    await connection.close()


@pytest.mark.deep
async def test_a_spell_without_a_primary_costs_no_outcome_and_raises_storage_errors():
    """As when both servers are standbys for a while, and the URL asks for one that can be written to."""
    pytest.importorskip("omniq.storage.postgres")
    disconnect = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'omniq%'"
    counts.clear()
    failures: list[Event] = []
    with PostgresServer() as server:
        url = f"{server.url}?target_session_attrs=read-write"
        async with AsyncTaskQueue(url) as queue, AsyncTaskQueue(url) as producer:
            handles = await queue.enqueue_many([(count_after, ("spell", 0.2), {})] * TASKS)
            async with queue.worker(concurrency=4, poll_interval=0.05) as pool:
                pool.events.subscribe(failures.append, kinds=(WorkerProblem,))
                await until(lambda: pool.stats().completed_tasks >= TASKS // 4)
                await execute(
                    server, "ALTER ROLE ALL SET default_transaction_read_only = on", disconnect
                )
                with pytest.raises(StorageError):
                    await producer.enqueue(count, "spell")
                await until(lambda: any("record" in str(failure) for failure in failures))
                assert counts["spell"] < TASKS
                await asyncio.sleep(1)
                await execute(
                    server,
                    "SET default_transaction_read_only = off",
                    "ALTER ROLE ALL RESET default_transaction_read_only",
                )

                results = [await handle.result(timeout=60) for handle in handles]
                stats = await queue.stats()

    assert len(results) == TASKS
    assert stats.by_status[TaskStatus.RUNNING] == 0
    assert counts["spell"] == TASKS


@pytest.mark.deep_on("PostgresServer")
@pytest.mark.parametrize("kind", [PostgresServer, RedisServer])
async def test_an_outage_of_the_server_is_reported_once(kind):
    emitted: list[Event] = []
    with kind(durable=True) as server:
        async with AsyncTaskQueue(server.url) as queue, queue.worker(lease=3) as pool:
            pool.events.subscribe(emitted.append, kinds=(StorageFailing, StorageBack))
            await asyncio.to_thread(server.kill)
            await until(lambda: bool(emitted))
            await asyncio.sleep(2)
            await asyncio.to_thread(server.start)
            await until(lambda: len(emitted) > 1)
            await asyncio.sleep(1)

    assert [type(event) for event in emitted] == [StorageFailing, StorageBack]


# Redis: a server whose replies a test replaces


def end_of_reply(data: bytes, start: int = 0) -> int:
    """Where the reply that begins at `start` ends. Raises `ValueError` if a part of it is missing."""
    end = data.index(b"\r\n", start) + 2
    kind, rest = data[start : start + 1], data[start + 1 : end - 2]
    if kind == b"$" and int(rest) >= 0:
        end += int(rest) + 2
    for _ in range(int(rest) if kind == b"*" else 0):
        end = end_of_reply(data, end)
    if end > len(data):
        raise ValueError("the reply is not complete")
    return end


class OddServer:
    """A proxy before a Redis server. `odd` replaces the next replies to scripts."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._writers: list[asyncio.StreamWriter] = []
        self.odd: list[bytes] = []
        self.port = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            for writer in self._writers:
                writer.close()
            for writer in self._writers:
                with suppress(OSError):
                    await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        above, below = await asyncio.open_connection(*self._target)
        self._writers += [writer, below]
        is_script = False

        async def pass_requests() -> None:
            nonlocal is_script
            while data := await reader.read(1 << 20):
                is_script = b"EVALSHA" in data
                below.write(data)
            below.close()

        async def pass_replies() -> None:
            while data := await above.read(1 << 20):
                if self.odd and is_script and not data.startswith(b"-"):
                    # Only the first of several replies: no server leaves out the others.
                    with suppress(ValueError):
                        data = data.replace(data[: end_of_reply(data)], self.odd[0], 1)
                        del self.odd[0]
                writer.write(data)
            writer.close()

        with suppress(OSError):
            await asyncio.gather(pass_requests(), pass_replies())


ODD_REPLIES = [
    b"*1\r\n:1\r\n",
    b"$2\r\nno\r\n",
    b"*3\r\n:1\r\n*-1\r\n:7\r\n",
    b"$-1\r\n",
    b"*0\r\n",
]


@asynccontextmanager
async def odd_redis(url: str) -> AsyncIterator[tuple[OddServer, str]]:
    pytest.importorskip("omniq.storage.redis")
    rest, _, place = url.rpartition("@")
    host, _, after = place.partition(":")
    port, slash, query = after.partition("/")
    server = OddServer(host, int(port))
    async with server.running():
        yield server, f"{rest}@127.0.0.1:{server.port}{slash}{query}"


CALLS: dict[str, Any] = {
    "enqueue": lambda queue: queue.enqueue(count, "odd"),
    "enqueue_many": lambda queue: queue.enqueue_many([(count, ("odd",), {})] * 3),
    "list": lambda queue: queue.list_tasks(),
    "stats": lambda queue: queue.stats(),
    "reserve": lambda queue: queue.storage.reserve(1),
    "renew": lambda queue: queue.storage.renew(),
    "give_back": lambda queue: queue.storage.give_back_abandoned(),
    "workers": lambda queue: queue.storage.workers(),
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_reply_of_a_wrong_shape_is_a_storage_error_or_no_error(redis_url, call):
    async with odd_redis(redis_url) as (server, url), AsyncTaskQueue(url) as queue:
        await queue.enqueue(count, "odd")
        for reply in ODD_REPLIES:
            server.odd = [reply]
            # Not every call reads all of its reply.
            with suppress(StorageError):
                await CALLS[call](queue)
            server.odd = []
            # The connection is usable again, or another one is.
            assert (await queue.stats()).by_status[TaskStatus.PENDING] >= 0


async def test_replies_of_a_wrong_shape_cost_a_pool_no_outcome(redis_url):
    counts.clear()
    async with odd_redis(redis_url) as (server, url), AsyncTaskQueue(url) as queue:
        handles = await queue.enqueue_many([(count, ("odd",), {})] * TASKS)
        async with queue.worker(concurrency=4, poll_interval=0.05, lease=2) as pool:
            for reply in ODD_REPLIES * 2:
                server.odd = [reply]
                await until(lambda: not server.odd)
            for handle in handles:
                await handle.result(timeout=60)

            assert pool.stats().failed_tasks == 0
        stats = await queue.stats()
    assert stats.by_status[TaskStatus.RUNNING] == 0
    assert counts["odd"] == TASKS
