"""Runs the tests of pools on every backend, without waiting for a disk."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from omniq import AsyncTaskQueue, Settings
from omniq.storage import BaseStorage, open_storage
from omniq.storage.memory import MemoryStorage
from tests.worker.recorder import RECORDER, RunRecorder

BACKENDS = [
    name
    for name in ("memory", "sqlite", "file", "postgres", "redis")
    if importlib.util.find_spec(f"omniq.storage.{name}") is not None
]


class Store:
    """One store, which a test can open several times; `url` is None for memory."""

    def __init__(self, backend: str, url: str | None) -> None:
        self.backend = backend
        self._url = url
        self._memory = MemoryStorage()

    def another(self, **settings: object) -> BaseStorage:
        """A new storage object on the store, not opened, with a separate owner id."""
        chosen = Settings(durability="os", **settings)  # type: ignore[arg-type]
        if self._url is None:
            return self._memory.another(settings=chosen)
        return open_storage(self._url, settings=chosen)


@pytest.fixture(params=BACKENDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    match request.param:
        case "memory":
            url = None
        case "sqlite":
            url = f"sqlite:///{tmp_path}/store.db"
        case "file":
            url = f"file://{tmp_path}/store"
        case server:
            url = request.getfixturevalue(f"{server}_url")
    return Store(request.param, url)


@pytest.fixture
def memory_store() -> Store:
    """For tests of a failing storage that do not depend on the backend."""
    return Store("memory", None)


@pytest.fixture
async def storage(store: Store) -> AsyncIterator[BaseStorage]:
    async with store.another() as storage:
        yield storage


@pytest.fixture
def queue(storage: BaseStorage) -> AsyncTaskQueue:
    return AsyncTaskQueue(storage)


@pytest.fixture
async def memory_queue() -> AsyncIterator[AsyncTaskQueue]:
    """For tests that do not depend on the backend."""
    async with AsyncTaskQueue(MemoryStorage()) as queue:
        yield queue


@pytest.fixture(autouse=True)
def recorder() -> Iterator[RunRecorder]:
    """An empty recorder. At the end of the test it opens all gates."""
    RECORDER.clear()
    yield RECORDER
    RECORDER.open_all()
