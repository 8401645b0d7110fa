"""The file backend passes the whole contract, and its core with every write synced to disk."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from omniq.settings import Settings
from omniq.storage.file import FileStorage
from omniq.storage.file.encoding import DOCUMENT
from omniq.storage.file.file_names import DocumentName, document_key
from omniq.storage.file.shared_file import unpack_one
from omniq.testing.contract import (
    ClaimContract,
    LeaseContract,
    LifecycleContract,
    RecordContract,
    StorageContract,
    opener,
)
from tests.storage.orphaned_checkpoints import OrphanedCheckpointTests
from tests.storage.rate_wakeups import RateWakeupTests


class TestFile(RateWakeupTests, OrphanedCheckpointTests, StorageContract):
    @pytest.fixture
    def copy_checkpoint(self, tmp_path):
        async def copy(source, target):
            (path,) = (tmp_path / "tasks" / "tasks").glob(f"checkpoint~{source}.*")
            document = DOCUMENT.decode(unpack_one(path.read_bytes(), f"checkpoint~{source}"))
            name = DocumentName(document_key("checkpoint", target), "copied-1", document.due)
            copied = msgspec.structs.replace(document, key=target)
            (path.parent / str(name)).write_bytes(DOCUMENT.encode(copied))

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
