"""The file backend passes the whole contract, and its core with every write synced to disk."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from omniq.settings import Settings
from omniq.storage.file import FileStorage
from omniq.testing.contract import (
    ClaimContract,
    LeaseContract,
    LifecycleContract,
    RecordContract,
    StorageContract,
    opener,
)
from tests.storage.orphaned_checkpoints import OrphanedCheckpointTests


class TestFile(OrphanedCheckpointTests, StorageContract):
    @pytest.fixture
    def copy_checkpoint(self, tmp_path):
        async def copy(source, target):
            notes = tmp_path / "tasks" / "notes"
            shutil.copytree(notes / source, notes / target)

        return copy

    @pytest.fixture
    async def open_another(self, clock, tmp_path):
        def make(settings=None, **options):
            chosen = replace(settings or Settings(), durability="os")
            return FileStorage(tmp_path / "tasks", clock=clock, settings=chosen, **options)

        async with opener(make) as open_another:
            yield open_another


class TestFileSynced(LifecycleContract, ClaimContract, RecordContract, LeaseContract):
    @pytest.fixture
    async def open_another(self, clock, tmp_path):
        def make(settings=None, **options):
            chosen = replace(settings or Settings(), durability="power")
            return FileStorage(tmp_path / "tasks", clock=clock, settings=chosen, **options)

        async with opener(make) as open_another:
            yield open_another
