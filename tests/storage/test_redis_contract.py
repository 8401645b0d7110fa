"""The Redis backend fulfils the whole contract."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis

from omniq.storage import open_storage
from omniq.storage.base import BaseStorage
from omniq.testing.contract import StorageContract, opener
from tests.storage.orphaned_checkpoints import OrphanedCheckpointTests
from tests.storage.rate_wakeups import RateWakeupTests


class TestRedis(RateWakeupTests, OrphanedCheckpointTests, StorageContract):
    async def begin_to_listen(self, storage: BaseStorage) -> None:
        # The first wait subscribes, and returns.
        await storage.wait_for_work(0.01)

    @pytest.fixture
    def copy_checkpoint(self, redis_url):
        async def copy(source, target):
            server, _, prefix = redis_url.partition("?prefix=")
            async with Redis.from_url(server) as client:
                store = f"{{{prefix}}}:2"
                value: Any = await client.hget(f"{store}:documents", f"checkpoint/{source}")
                due = value.partition(b"/")[0].decode()
                await client.hset(f"{store}:documents", f"checkpoint/{target}", value)
                await client.zadd(f"{store}:document_keys", {f"checkpoint/{target}": 0})
                await client.zadd(f"{store}:document_dues", {f"checkpoint/{due}/{target}": 0})

        return copy

    @pytest.fixture
    async def open_another(self, clock, redis_url):
        def make(max_pending=None, **options):
            bound = "" if max_pending is None else f"&max_pending={max_pending}"
            return open_storage(redis_url + bound, clock=clock, **options)

        async with opener(make) as open_another:
            yield open_another
