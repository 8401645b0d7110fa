"""The SQLite backend keeps the whole contract, and its core with every write synced to disk."""

from __future__ import annotations

from dataclasses import replace

import pytest

from omniq.settings import Settings
from omniq.storage.sqlite import SQLiteStorage
from omniq.testing.contract import (
    ClaimContract,
    LeaseContract,
    LifecycleContract,
    RecordContract,
    StorageContract,
    opener,
)


class TestSQLite(StorageContract):
    @pytest.fixture
    async def open_another(self, clock, tmp_path):
        def make(settings=None, **options):
            chosen = replace(settings or Settings(), durability="os")
            return SQLiteStorage(tmp_path / "tasks.db", clock=clock, settings=chosen, **options)

        async with opener(make) as open_another:
            yield open_another


class TestSQLiteSynced(LifecycleContract, ClaimContract, RecordContract, LeaseContract):
    @pytest.fixture
    async def open_another(self, clock, tmp_path):
        def make(settings=None, **options):
            chosen = replace(settings or Settings(), durability="power")
            return SQLiteStorage(tmp_path / "tasks.db", clock=clock, settings=chosen, **options)

        async with opener(make) as open_another:
            yield open_another
