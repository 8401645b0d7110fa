"""Random calls by several owners, in any order: every backend returns what the model returns."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from omniq.settings import Settings
from omniq.storage.base import BaseStorage
from omniq.storage.file import FileStorage
from omniq.storage.sqlite import SQLiteStorage
from omniq.testing.clock import ManualClock
from omniq.testing.state_machine_stores import MemoryStore, OpenStore
from tests.properties.state_machine_run import LONG_RUN_EXAMPLES, run_state_machine
from tests.storage.memory_log import MemoryLogStore

# Every example has its own store. A folder in memory is fast, and durability is not tested here.
_MEMORY_FOLDER = Path("/dev/shm")


class FolderStore:
    """A store in a temporary folder, which is deleted with it."""

    def __init__(self, make: Callable[[Path], BaseStorage]) -> None:
        self._make = make
        self._folder = Path(
            tempfile.mkdtemp(dir=_MEMORY_FOLDER if _MEMORY_FOLDER.is_dir() else None)
        )

    def another(self) -> BaseStorage:
        return self._make(self._folder)

    async def reopen(self) -> None:
        """Do nothing: the folder holds everything."""

    async def discard(self) -> None:
        shutil.rmtree(self._folder)


def sqlite_store(clock: ManualClock, settings: Settings, max_pending: int | None) -> FolderStore:
    return FolderStore(
        lambda folder: SQLiteStorage(
            folder / "tasks.db", clock=clock, settings=settings, max_pending=max_pending
        )
    )


def file_store(clock: ManualClock, settings: Settings, max_pending: int | None) -> FolderStore:
    return FolderStore(
        lambda folder: FileStorage(folder, clock=clock, settings=settings, max_pending=max_pending)
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("open_store", "examples"),
    [(MemoryStore, 30), (sqlite_store, 8), (file_store, 7), (MemoryLogStore, 10)],
    ids=["memory", "sqlite", "file", "log"],
)
def test_a_backend_answers_as_the_model_does(open_store: OpenStore, examples: int) -> None:
    run_state_machine(open_store, examples=examples, steps=50)


@pytest.mark.deep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "open_store",
    [MemoryStore, sqlite_store, file_store, MemoryLogStore],
    ids=["memory", "sqlite", "file", "log"],
)
def test_a_backend_answers_as_the_model_does_in_long_runs(open_store: OpenStore) -> None:
    run_state_machine(open_store, examples=LONG_RUN_EXAMPLES, steps=100)
