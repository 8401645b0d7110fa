"""Stores that processes can share: the tests of the fleet run on each that there is."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SHARED = [
    name
    for name in ("sqlite", "file", "postgres", "redis")
    if importlib.util.find_spec(f"omniq.storage.{name}") is not None
]


def url_of(backend: str, folder: Path, request: pytest.FixtureRequest) -> str:
    """An empty store of that kind, which does not wait for the disk where it may choose."""
    match backend:
        case "sqlite":
            return f"sqlite:///{folder}/store.db?durability=os"
        case "file":
            return f"file://{folder}/store?durability=os"
        case _:
            return str(request.getfixturevalue(f"{backend}_url"))
