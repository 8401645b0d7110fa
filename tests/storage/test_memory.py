"""The memory backend fulfils the whole contract."""

from __future__ import annotations

import msgspec
import pytest

from omniq.storage.memory import MemoryStorage
from omniq.testing.contract import StorageContract, opener
from tests.storage.orphaned_checkpoints import OrphanedCheckpointTests
from tests.storage.rate_wakeups import RateWakeupTests


class TestMemory(RateWakeupTests, OrphanedCheckpointTests, StorageContract):
    @pytest.fixture
    def copy_checkpoint(self, storage):
        async def copy(source, target):
            checkpoints = storage._memory.tables.documents["checkpoint"]
            checkpoints.put(msgspec.structs.replace(checkpoints.by_key[source], key=target))

        return copy

    @pytest.fixture
    async def open_another(self, clock):
        store = MemoryStorage(clock=clock)
        async with opener(store.another) as open_another:
            yield open_another
