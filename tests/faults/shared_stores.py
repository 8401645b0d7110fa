"""Stores that processes can share; the tests with worker processes run on each of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SHARED = [
    name
    for name in ("sqlite", "file", "postgres", "redis", "nats")
    if importlib.util.find_spec(f"omniq.storage.{name}") is not None
]


def url_of(backend: str, folder: Path, request: pytest.FixtureRequest) -> str:
    """Return the URL of an empty store of that kind, without syncs where that is optional."""
    match backend:
        case "sqlite":
            return f"sqlite:///{folder}/store.db?durability=os"
        case "file":
            return f"file://{folder}/store?durability=os"
        case _:
            return str(request.getfixturevalue(f"{backend}_url"))
