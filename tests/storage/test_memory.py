"""The memory backend fulfils the whole contract."""

from __future__ import annotations

import msgspec
import pytest

from omniq.errors import StorageError
from omniq.storage.backend import Moved
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


async def test_a_step_whose_write_never_succeeds_raises_instead_of_running_forever(monkeypatch):
    async with MemoryStorage() as storage:
        backend, tries = storage._engine.backend, 0
        transact = backend.transact

        async def transact_with_a_stale_read(work, **options):
            async def work_on_stale_data(section):
                nonlocal tries
                tries += 1
                await work(section)
                raise Moved

            return await transact(work_on_stale_data, **options)

        monkeypatch.setattr(backend, "transact", transact_with_a_stale_read)

        with pytest.raises(StorageError, match="was changed 1,000 times"):
            await storage.cancel("a")
        assert tries == 1_000
