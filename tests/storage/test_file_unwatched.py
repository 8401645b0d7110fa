"""The file backend passes the core of the contract on a system without inotify."""

from __future__ import annotations

from dataclasses import replace

import pytest

from omniq.settings import Settings
from omniq.storage.file import FileStorage
from omniq.storage.file.wakeups import FolderWatch
from omniq.testing.contract import (
    CancelContract,
    ClaimContract,
    DeadLetterContract,
    EnqueueContract,
    GateContract,
    LeaseContract,
    RecordContract,
    opener,
)


@pytest.mark.deep
class TestFileUnwatched(
    EnqueueContract,
    ClaimContract,
    RecordContract,
    LeaseContract,
    CancelContract,
    DeadLetterContract,
    GateContract,
):
    @pytest.fixture
    async def open_another(self, clock, tmp_path, monkeypatch):
        monkeypatch.setattr(FolderWatch, "open", classmethod(lambda cls, folder: None))

        def make(settings=None, **options):
            chosen = replace(settings or Settings(), durability="os")
            return FileStorage(tmp_path / "tasks", clock=clock, settings=chosen, **options)

        async with opener(make) as open_another:
            yield open_another
