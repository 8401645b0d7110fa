"""A Redis store in a cluster: its server is found, and followed when the slot moves or the server ends."""

from __future__ import annotations

import asyncio

import pytest

from omniq.errors import StorageRefused
from omniq.outcomes import Succeeded
from omniq.storage import open_storage
from omniq.storage.redis import RedisStorage
from omniq.storage.redis.connection import ServerConnection, pack
from omniq.storage.redis.primaries import slot_of
from omniq.testing.builders import a_result, a_task, some_tasks
from omniq.testing.clock import ManualClock
from omniq.testing.redis_groups import RedisCluster, ask
from omniq.testing.server_programs import ServerMissing
from omniq.testing.servers import RedisServer
from tests.storage.test_redis import use_every_verb

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SLOT = slot_of("omniq")


@pytest.fixture(scope="module")
def cluster():
    try:
        with RedisCluster(replicas=1) as cluster:
            yield cluster
    except ServerMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture
def url(cluster):
    """The URL of an empty store. All servers run, and the replicas are up to date."""
    for server in cluster.servers:
        if not server.is_running:
            server.start()
    cluster.await_replicas()
    for server in cluster.servers:
        if ask(server, "ROLE")[0] == b"master":
            ask(server, "FLUSHALL")
    return cluster.url


def another(cluster: RedisCluster, owner: RedisServer) -> RedisServer:
    """A primary that does not have the slot."""
    return next(
        each for each in cluster.servers if each is not owner and ask(each, "ROLE")[0] == b"master"
    )


async def test_every_verb_works_in_a_cluster(cluster, url):
    clock = ManualClock()
    async with RedisStorage(url, clock=clock) as storage:
        await use_every_verb(storage, clock)
        assert ("cluster", "yes", "ok") in await storage.server_report()
    keys = [ask(each, "DBSIZE") for each in cluster.servers]

    # The server of the slot and its replica.
    assert sum(count > 0 for count in keys) == 2


async def test_one_server_of_the_cluster_in_the_url_is_enough(cluster, url):
    for server in cluster.servers:
        one = server.url.replace("redis:", "redis+cluster:")
        async with open_storage(one) as storage:
            await storage.enqueue(a_task(f"t{server.port}"))
    async with open_storage(url) as storage:
        assert len(await storage.reserve(10)) == len(cluster.servers)


async def test_stores_with_different_prefixes_are_on_different_servers(cluster, url):
    for prefix in ("a", "b", "c"):
        async with open_storage(f"{url}?prefix={prefix}") as storage:
            await storage.enqueue(a_task("t"))
            owner = cluster.owner_of(slot_of(prefix))
            assert ask(owner, "HEXISTS", f"{{{prefix}}}:2:tasks", "t") == 1


async def test_a_server_of_the_cluster_that_does_not_have_the_store_says_how_to_name_it(
    cluster, url
):
    other = another(cluster, cluster.owner_of(SLOT))
    with pytest.raises(StorageRefused, match=r"write redis\+cluster://"):
        await open_storage(other.url).open()


@pytest.mark.fault("F42")
async def test_calls_go_on_while_the_slot_moves_to_another_server_and_back(cluster, url):
    async with open_storage(url) as storage:
        before = cluster.owner_of(SLOT)
        other = another(cluster, before)
        ids: list[str] = []
        moving = asyncio.create_task(
            asyncio.to_thread(lambda: [cluster.move(SLOT, each) for each in (other, before, other)])
        )
        while not moving.done() or len(ids) < 20:
            ids += await storage.enqueue_many(some_tasks([f"t{len(ids)}", f"t{len(ids) + 1}"]))
        await moving
        claimed = await storage.reserve(len(ids) + 10)
        done = await storage.record([Succeeded(t.id, t.token, a_result(t)) for t in claimed])

    assert cluster.owner_of(SLOT) is other
    assert sorted(task.id for task in claimed) == sorted(ids)
    assert all(done)


@pytest.mark.fault("F42")
async def test_while_a_slot_is_between_two_servers_calls_wait_and_single_keys_are_asked_for(
    cluster, url
):
    async with open_storage(url) as storage:
        await storage.enqueue(a_task("a"))
        other = another(cluster, cluster.owner_of(SLOT))
        source = cluster.begin_move(SLOT, other)
        while cluster.move_keys(SLOT, source, other, 10):
            pass
        connection = ServerConnection(url, name="test", hash_tag="omniq")
        asked = await connection.send(pack("HEXISTS", "{omniq}:2:tasks", "a"))
        await connection.close()
        waiting = asyncio.create_task(storage.enqueue(a_task("b")))
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        cluster.end_move(SLOT, other)
        await asyncio.wait_for(waiting, 15)

        assert not done
        assert asked == 1
        assert [task.id for task in await storage.reserve(5)] == ["a", "b"]


@pytest.mark.fault("F42")
async def test_the_replica_of_a_server_that_is_killed_takes_over(cluster, url):
    async with open_storage(url) as storage:
        await storage.enqueue_many(some_tasks("abc"))
        (a,) = await storage.reserve(1)
        owner = cluster.owner_of(SLOT)
        assert ask(owner, "WAIT", 1, 5_000) == 1
        owner.kill()
        assert await storage.record([Succeeded("a", a.token, a_result(a))]) == [True]
        await storage.enqueue(a_task("d"))
        claimed = await storage.reserve(9)

    assert [task.id for task in claimed] == ["b", "c", "d"]
