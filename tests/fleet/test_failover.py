"""PostgreSQL fails over to its standby, or refuses its workers for a while: they continue without help."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import asyncpg
import pytest

from omniq import AsyncTaskQueue, StorageError, StorageRefused, TaskQueue, TaskStatus
from omniq.storage import open_storage
from omniq.testing.builders import a_task
from omniq.testing.server_process import children_of
from omniq.testing.servers import PostgresServer
from omniq.testing.standby import PostgresPair
from tests.acceptance.command import wait_until
from tests.fleet.conftest import StartWorker
from tests.fleet.fleet_tasks import count, count_after, counts
from tests.fleet.producer import Producer, check_nothing_is_lost, is_drained
from tests.fleet.traces import have_run_since
from tests.worker.recorder import until

OPTIONS = ("--concurrency", "4", "--poll-interval", "0.5", "--lease", "5")
TASKS = 60

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def pair() -> Iterator[PostgresPair]:
    with PostgresPair(waits_for_standby=True) as pair:
        yield pair


@pytest.mark.fault("F31")
@pytest.mark.parametrize(
    ("role", "gap"),
    [("", 0.0), pytest.param("&target_session_attrs=read-write", 4.0, marks=pytest.mark.deep)],
    ids=["promoted immediately", "no primary for a while"],
)
def test_workers_and_producers_follow_a_promotion(
    pair: PostgresPair, role: str, gap: float, start_worker: StartWorker, tmp_path: Path
) -> None:
    url = f"{pair.url}?schema=omniq{role}"
    producer = Producer(url, tmp_path)
    with producer.at_work():
        workers = [start_worker(url, *OPTIONS) for _ in range(2)]
        began = time.monotonic_ns()
        wait_until(lambda: have_run_since(tmp_path, workers, began))
        for _ in range(2):
            pair.primary.kill()
            # Nothing can be written meanwhile: that is what is tried here.
            time.sleep(gap)
            pair.promote()
            pair.add_standby()
            promoted = time.monotonic_ns()
            wait_until(lambda at=promoted: have_run_since(tmp_path, workers, at), within=40)  # type: ignore[misc]
    with TaskQueue(url) as queue:
        wait_until(lambda: is_drained(queue))
    for worker in workers:
        worker.process.terminate()
    assert [worker.ends() for worker in workers] == [0, 0]

    check_nothing_is_lost(url, tmp_path, producer)
    assert len(producer.acknowledged) > 0
    # The standby had received everything that was acknowledged.
    assert not any("store.restored" in worker.text for worker in workers)


async def test_a_server_that_does_not_answer_leaves_time_for_the_others(pair: PostgresPair) -> None:
    async with open_storage(pair.url) as storage:
        await storage.enqueue(a_task("before"))
    stopped = [pair.primary.pid, *children_of(pair.primary.pid)]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        pair.promote()
        began = time.monotonic()
        async with open_storage(pair.url) as storage:
            first = time.monotonic() - began
            # The connections that follow go to the server that has answered.
            stats = await storage.stats()
            others = time.monotonic() - began - first
    finally:
        for pid in stopped:
            # A process of the server may have ended while it was asked for its children.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    assert stats.by_status[TaskStatus.PENDING] == 1
    assert first < 8
    assert others < 4


async def test_a_standby_alone_is_waited_for_and_says_what_to_do(pair: PostgresPair) -> None:
    async with open_storage(pair.url) as storage:
        await storage.enqueue(a_task("before"))
        pair.primary.kill()
        with pytest.raises(StorageError, match="standby") as without_primary:
            await storage.enqueue(a_task("during"))
    with pytest.raises(StorageError, match="cannot be written to") as alone:
        async with open_storage(pair.standby.url) as storage:
            await storage.enqueue(a_task("during"))

    assert not isinstance(without_primary.value, StorageRefused)
    assert not isinstance(alone.value, StorageRefused)
    for caught in (without_primary, alone):
        assert pair.primary.password not in str(caught.value)


@pytest.mark.deep
async def test_doubt_about_an_enqueue_is_resolved_on_the_promoted_server(
    pair: PostgresPair,
) -> None:
    """Each enqueue that raises nothing is there, and none is there twice, wherever its reply was lost."""
    acknowledged: list[str] = []
    failed: list[str] = []

    async def produce(storage: object, name: str) -> None:
        for number in range(400):
            task = a_task(f"{name}-{number}")
            try:
                await storage.enqueue(task)  # type: ignore[attr-defined]
                acknowledged.append(task.id)
            except StorageError:
                failed.append(task.id)

    async with open_storage(pair.url) as storage:
        producing = [asyncio.create_task(produce(storage, name)) for name in "abcd"]
        await until(lambda: len(acknowledged) > 40)
        await asyncio.to_thread(pair.primary.kill)
        await asyncio.to_thread(pair.promote)
        await asyncio.to_thread(pair.add_standby)
        await asyncio.gather(*producing)
        stored = [task.id for task in await storage.reserve(2_000)]

    assert len(stored) == len(set(stored))
    assert set(acknowledged) <= set(stored) <= {*acknowledged, *failed}


# Refusals that pass


async def execute(url: str, *statements: str) -> None:
    connection = await asyncpg.connect(url)
    for statement in statements:
        await connection.execute(statement)
    await connection.close()


DISCONNECT = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'omniq%'"
)
SPELLS = {
    "read-only": (
        "ALTER SYSTEM SET default_transaction_read_only = on",
        "SELECT pg_reload_conf()",
    ),
    "password": ("ALTER ROLE app PASSWORD 'another'",),
    "no login": ("ALTER ROLE app NOLOGIN",),
    "no rights": ("REVOKE USAGE ON SCHEMA omniq FROM app",),
    "no database": ("ALTER DATABASE apps RENAME TO elsewhere",),
}
ENDS = {
    "read-only": (
        "SET default_transaction_read_only = off",
        "ALTER SYSTEM RESET default_transaction_read_only",
        "SELECT pg_reload_conf()",
    ),
    "password": ("ALTER ROLE app PASSWORD 'pw'",),
    "no login": ("ALTER ROLE app LOGIN",),
    "no rights": ("GRANT USAGE ON SCHEMA omniq TO app",),
    "no database": ("ALTER DATABASE elsewhere RENAME TO apps",),
}


@pytest.mark.fault("F43")
@pytest.mark.deep_on("no login", "no rights", "no database")
@pytest.mark.parametrize("spell", SPELLS)
async def test_a_refusal_that_passes_ends_no_pool_and_costs_no_task(spell: str) -> None:
    counts.clear()
    with PostgresServer() as server:
        await execute(server.url, "CREATE ROLE app LOGIN PASSWORD 'pw'", "CREATE DATABASE apps")
        await execute(server.database_url("apps"), "CREATE SCHEMA omniq AUTHORIZATION app")
        url = f"postgresql://app:pw@127.0.0.1:{server.port}/apps"
        # A database with connections cannot be renamed, and rights are of one database.
        admin = server.database_url("apps" if spell == "no rights" else "postgres")
        async with AsyncTaskQueue(url) as queue:
            handles = await queue.enqueue_many([(count_after, ("spell", 0.1), {})] * TASKS)
            async with queue.worker(concurrency=4, poll_interval=0.1, lease=4) as pool:
                await until(lambda: pool.stats().completed_tasks >= TASKS // 6)
                if spell == "no database":
                    await execute(admin, "ALTER DATABASE apps ALLOW_CONNECTIONS false", DISCONNECT)
                await execute(admin, *SPELLS[spell], DISCONNECT)
                with pytest.raises(StorageError) as during:
                    await queue.enqueue(count, "during")
                await asyncio.sleep(3)
                assert pool.running
                await execute(admin, *ENDS[spell])
                if spell == "no database":
                    await execute(admin, "ALTER DATABASE apps ALLOW_CONNECTIONS true")
                results = [await handle.result(timeout=60) for handle in handles]
                assert pool.stats().failed_tasks == 0
            stats = await queue.stats()

    assert len(results) == TASKS
    assert not isinstance(during.value, StorageRefused)
    assert "pw@" not in str(during.value)
    assert stats.by_status[TaskStatus.RUNNING] == 0
    assert stats.dead == 0


async def test_a_refusal_before_the_first_success_is_final() -> None:
    with PostgresServer() as server:
        storage = open_storage(server.url.replace(server.password, "wrong"))
        with pytest.raises(StorageRefused, match="check the user and the password"):
            await storage.open()
