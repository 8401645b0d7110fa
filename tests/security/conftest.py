"""Stores to break into: one of each kind, and nothing of the machine's own settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.security.vaults import VAULTS, Vault


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith("OMNIQ_") and not name.startswith("OMNIQ_TEST_"):
            monkeypatch.delenv(name)


@pytest.fixture(params=VAULTS)
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store of each kind that lasts."""
    match request.param:
        case "sqlite":
            return f"sqlite:///{tmp_path}/store.db?durability=os"
        case "file":
            return f"file://{tmp_path}/store?durability=os"
        case server:
            url: str = request.getfixturevalue(f"{server}_url")
            return url


def vault_of(url: str) -> Vault:
    kind = {"file": "file", "sqlite": "sqlite", "postgresql": "postgres", "redis": "redis"}
    return VAULTS[kind[url.partition(":")[0]]](url)
