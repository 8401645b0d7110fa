"""Stores to attack, one of each kind, without the settings of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from omniq.settings import Settings
from omniq.storage import open_storage
from omniq.storage.base import BaseStorage
from omniq.storage.memory import MemoryStorage
from tests.security.raw_stores import RAW_STORES, RawStore
from tests.storage.conftest import pytest_pycollect_makeitem

__all__ = ["pytest_pycollect_makeitem"]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith("OMNIQ_") and not name.startswith("OMNIQ_TEST_"):
            monkeypatch.delenv(name)


OpenStore = Callable[[Settings], BaseStorage]
"""Makes a new storage object of one store, with these settings."""


@pytest.fixture(params=RAW_STORES)
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store of each persistent kind."""
    return _url_of(request, tmp_path)


@pytest.fixture(params=["memory", *RAW_STORES])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
    """An empty store of each kind."""
    if request.param == "memory":
        memory = MemoryStorage()
        return lambda settings: memory.another(settings=settings)
    url = _url_of(request, tmp_path)
    return lambda settings: open_storage(url, settings=settings)


def _url_of(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "sqlite":
            return f"sqlite:///{tmp_path}/store.db?durability=os"
        case "file":
            return f"file://{tmp_path}/store?durability=os"
        case server:
            url: str = request.getfixturevalue(f"{server}_url")
            return url


def raw_store_of(url: str) -> RawStore:
    kind = {"file": "file", "sqlite": "sqlite", "postgresql": "postgres", "redis": "redis"}
    return RAW_STORES[kind[url.partition(":")[0]]](url)
