"""The memory backend keeps the whole contract."""

from __future__ import annotations

import pytest

from omniq.storage.memory import MemoryStorage
from omniq.testing.contract import StorageContract, opener


class TestMemory(StorageContract):
    @pytest.fixture
    async def open_another(self, clock):
        store = MemoryStorage(clock=clock)
        async with opener(store.another) as open_another:
            yield open_another
