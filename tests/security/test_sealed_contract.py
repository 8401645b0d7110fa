"""A store whose records are encrypted fulfils the whole contract."""

from __future__ import annotations

from dataclasses import replace

import pytest

from omniq.settings import Settings
from omniq.storage.memory import MemoryStorage
from omniq.storage.sqlite import SQLiteStorage
from omniq.testing.contract import (
    ClaimContract,
    DeadLetterContract,
    EnqueueContract,
    StorageContract,
    opener,
)

KEY = "the key of this store"


class TestEncrypted(StorageContract):
    @pytest.fixture
    async def open_another(self, clock):
        first = MemoryStorage(clock=clock)

        def make(settings: Settings | None = None, **options):
            chosen = replace(settings or Settings(), encryption_key=KEY)
            return first.another(settings=chosen, **options)

        async with opener(make) as open_another:
            yield open_another


@pytest.mark.deep
class TestKeyReplaced(EnqueueContract, ClaimContract, DeadLetterContract):
    """While a key is replaced, every unique key has several names."""

    @pytest.fixture
    async def open_another(self, clock, tmp_path):
        def make(settings: Settings | None = None, **options):
            old_keys = "the-key-of-last-year the-key-of-next-year"
            chosen = replace(settings or Settings(), encryption_key=KEY, old_keys=old_keys)
            return SQLiteStorage(tmp_path / "store.db", clock=clock, settings=chosen, **options)

        async with opener(make) as open_another:
            yield open_another
