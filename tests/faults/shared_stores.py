"""Stores that processes can share; the tests with worker processes run on each of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from omniq.concurrency.portal import Portal
from omniq.storage import open_storage

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
        case "nats":
            # A host of its own, so that the processes of a test have equal ways to the store.
            url = str(request.getfixturevalue("nats_url"))
            portal, host = Portal(), open_storage(f"{url}?host=only")
            portal.run(host.open())
            request.addfinalizer(portal.close)
            request.addfinalizer(lambda: portal.run(host.close()))
            return f"{url}?host=never"
        case _:
            return str(request.getfixturevalue(f"{backend}_url"))
