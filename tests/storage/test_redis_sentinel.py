"""A Redis store behind Sentinels: found, and found again when a replica has been promoted."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from omniq.errors import StorageError, StorageRefused
from omniq.outcomes import Succeeded
from omniq.storage import open_storage
from omniq.storage.redis import RedisStorage
from omniq.storage.redis.address import Node
from omniq.testing.builders import a_result, a_task, some_tasks
from omniq.testing.clock import ManualClock
from omniq.testing.redis_groups import SERVICE, SentinelGroup, ask, info, wait_until
from omniq.testing.server_programs import ServerMissing
from omniq.testing.servers import _free_port
from tests.storage.test_redis import use_every_verb

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def group():
    """A primary with two replicas; the tests exchange their roles."""
    try:
        with SentinelGroup(replicas=2) as group:
            yield group
    except ServerMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture
def url(group):
    """The URL of an empty store. All servers run, and the replicas are up to date."""
    for server in group.servers:
        if not server.is_running:
            server.start()
    group.await_replicas()
    ask(group.primary(), "FLUSHALL")
    return group.url


def promote(group: SentinelGroup) -> None:
    """Have the Sentinels promote a replica while the primary is alive, and wait for it."""
    before = group.primary()
    wait_until(
        lambda: ask(group.sentinels[0], "SENTINEL", "FAILOVER", SERVICE) == b"OK", "it begins"
    )
    group.await_primary(other_than=before)


async def test_every_verb_works_through_sentinels(url):
    clock = ManualClock()
    async with RedisStorage(url, clock=clock) as storage:
        await use_every_verb(storage, clock)
        report = {name: value for name, value, _ in await storage.server_report()}

    assert report["role"] == "master"


async def test_sentinels_that_are_down_or_silent_are_passed_over(group, url):
    sentinel = group.sentinels[1]
    os.kill(sentinel.pid, signal.SIGSTOP)
    hosts = url.partition("@")[2].partition("/")[0]
    silent, good = f"127.0.0.1:{sentinel.port}", f"127.0.0.1:{group.sentinels[2].port}"
    try:
        others = f"127.0.0.1:{_free_port()},{silent},{good}"
        async with open_storage(url.replace(hosts, others)) as storage:
            await storage.enqueue(a_task("a"))
    finally:
        os.kill(sentinel.pid, signal.SIGCONT)

    async with open_storage(url) as storage:
        assert [task.id for task in await storage.reserve(2)] == ["a"]


async def test_when_no_sentinel_answers_the_error_names_the_reason(group, url):
    hosts = url.partition("@")[2].partition("/")[0]
    with pytest.raises(StorageError, match="nothing listens there") as raised:
        await open_storage(url.replace(hosts, f"127.0.0.1:{_free_port()}")).open()
    assert group.servers[0].password not in str(raised.value)


@pytest.mark.fault("F42")
async def test_calls_in_flight_when_the_primary_is_killed_are_done_once_on_the_new_one(group, url):
    async with open_storage(url) as storage:
        await storage.enqueue_many(some_tasks("abc"))
        claimed = await storage.reserve(1)
        primary = group.primary()
        assert ask(primary, "WAIT", 1, 5_000) >= 1
        # The requests arrive at a server that will never answer.
        os.kill(primary.pid, signal.SIGSTOP)
        outcome = Succeeded("a", claimed[0].token, a_result(claimed[0]))
        calls = asyncio.gather(
            storage.record([outcome]),
            *(storage.enqueue(a_task(f"new-{number}")) for number in range(20)),
        )
        await asyncio.sleep(0)
        primary.kill()
        recorded, *_ = await calls

        waiting = await storage.reserve(100)
        other = group.primary()

    assert other is not primary
    assert recorded == [True]
    ids = sorted(task.id for task in waiting)
    assert ids == sorted(["b", "c", *(f"new-{number}" for number in range(20))])


@pytest.mark.fault("F42")
async def test_a_planned_promotion_is_followed_and_no_call_fails(group, url):
    async with open_storage(url) as storage:
        for number in range(10):
            await storage.enqueue(a_task(f"before-{number}"))
        before = group.primary()
        assert ask(before, "WAIT", 2, 5_000) == 2
        await asyncio.to_thread(promote, group)
        # The old primary is a replica by the time that the Sentinels agree, or becomes one.
        for number in range(10):
            await storage.enqueue(a_task(f"after-{number}"))
        await asyncio.to_thread(group.await_replicas)
        await storage.enqueue(a_task("last"))
        ids = {task.id for task in await storage.reserve(100)}
        connected = info(group.primary(), "clients")["connected_clients"]

    assert group.primary() is not before
    assert int(connected) > 0
    assert "last" in ids
    assert {f"before-{number}" for number in range(10)} <= ids


async def test_a_replica_is_left_for_the_primary_when_it_refuses_a_write(group, url):
    """Without a Sentinel that closes the connections of the former primary: behind one address."""
    primary = group.primary()
    async with RedisStorage(url) as storage:
        await storage.enqueue(a_task("a"))
        replica = next(each for each in group.servers if each is not primary)
        connection = storage._backend._connection
        connection.discard()
        # As if the name in the URL had belonged to this server until now.
        connection._connection = await connection._connect_to(Node("127.0.0.1", replica.port))
        await storage.enqueue(a_task("b"))

        assert [task.id for task in await storage.reserve(5)] == ["a", "b"]


async def test_wake_ups_come_from_the_new_primary(group, url):
    async with RedisStorage(url) as worker, open_storage(url) as producer:
        await worker.reserve(1)
        await worker.wait_for_work(0.1)
        assert worker._backend.wakeups.is_open
        await asyncio.to_thread(promote, group)
        await asyncio.to_thread(group.await_replicas)
        # The claim tells the new primary that somebody waits, and on which channel.
        async with asyncio.timeout(60):
            while await worker.reserve(1) or not worker._backend.wakeups.is_open:
                await worker.wait_for_work(0.05)
        await worker.reserve(1)
        waiting = asyncio.create_task(worker.wait_for_work(30))
        await producer.enqueue(a_task("a"))
        async with asyncio.timeout(10):
            await waiting


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("/omniq", "/other", "knows no service 'other'"),
        ("sentinel_password=", "sentinel_password=x", "its own options are .sentinel_username="),
        ("redis+sentinel://:", "redis+sentinel://:x", "give the right user and password"),
    ],
)
async def test_what_sentinels_or_the_primary_refuse_is_said(url, old, new, message):
    with pytest.raises(StorageRefused, match=message):
        await open_storage(url.replace(old, new)).open()


async def test_a_sentinel_is_not_taken_for_a_server(group, url):
    with pytest.raises(StorageRefused, match=r"write redis\+sentinel://"):
        await RedisStorage(group.sentinels[0].url).open()
