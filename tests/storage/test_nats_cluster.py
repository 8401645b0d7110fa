"""A cluster of three NATS servers: leaders change, a server is killed, and no acknowledged task is lost."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import ExitStack

import nats
import pytest

from omniq.errors import StorageError
from omniq.storage import open_storage
from omniq.testing.builders import a_task
from omniq.testing.servers import NatsServer, _free_port


def start_cluster(stack: ExitStack) -> list[NatsServer]:
    """Start three servers of one cluster, with one user."""
    ports = [_free_port() for _ in range(3)]
    routes = ", ".join(f"nats://127.0.0.1:{port}" for port in ports)
    servers = []
    for number, port in enumerate(ports):
        server = NatsServer(
            options={
                "server_name": f"n{number}",
                "cluster": f"{{ name: c, listen: 127.0.0.1:{port}, routes: [{routes}] }}",
            }
        )
        server.password = "secret"
        servers.append(stack.enter_context(server))
    return servers


async def opened(url):
    """A storage, as soon as the cluster has elected its leaders."""
    deadline = time.monotonic() + 60
    while True:
        storage = open_storage(url)
        try:
            await storage.open()
            return storage
        except StorageError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.5)


async def enqueue_until_stored(storage, ids):
    for task_id in ids:
        while True:
            try:
                await storage.enqueue_many([a_task(task_id)], nonce=task_id)
                break
            except StorageError:
                await asyncio.sleep(0.1)


@pytest.mark.deep
@pytest.mark.timeout(240)
async def test_a_cluster_loses_no_task_when_leaders_change_and_a_server_is_killed():
    with ExitStack() as stack:
        servers = start_cluster(stack)
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        storage = await opened(f"nats://omniq:secret@{hosts}/s?replicas=3")
        await enqueue_until_stored(storage, [f"a{number}" for number in range(20)])
        client = await nats.connect(servers[2].url)
        for _ in range(3):
            moved = await client.request("$JS.API.STREAM.LEADER.STEPDOWN.OQ_s", timeout=5)
            assert json.loads(moved.data)["success"]
            await enqueue_until_stored(storage, [f"b{time.monotonic()}" for _ in range(10)])
        await client.close()
        servers[0].kill()
        await enqueue_until_stored(storage, [f"c{number}" for number in range(20)])

        assert await storage.count_waiting() == 70
        await storage.close()
        other = await opened(f"nats://omniq:secret@{hosts}/s?replicas=3")
        assert await other.count_waiting() == 70
        await other.close()
