"""The stores of a real run, and their servers."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from omniq.testing.s3_servers import SeaweedServer
from omniq.testing.servers import NatsServer, PostgresServer, RedisServer, Server

DEFAULT_BACKENDS = ("file", "sqlite", "postgres", "redis", "nats")
BACKENDS = (*DEFAULT_BACKENDS, "s3")
"""Of S3, with the lease of one second that all runs have, recoveries may take two leases: see `lease_watch`."""

TRANSACTIONAL = ("sqlite", "postgres")
"""Backends with transactions in which a task can write together with its outcome."""


@dataclass(frozen=True)
class Store:
    """The store of a run. `server` can be killed and restarted, if there is one."""

    backend: str
    url: str
    server: Server | None = None
    lease_margin: float = 0.0
    """Seconds by which a lease lasts longer in the store than its owner believes."""

    @property
    def has_transactions(self) -> bool:
        return self.backend in TRANSACTIONAL


@contextmanager
def open_store(backend: str, folder: Path) -> Iterator[Store]:
    """Open an empty store of that kind for the duration of the block."""
    # Import it once here, and not in every forked process.
    importlib.import_module(f"omniq.storage.{backend}")
    match backend:
        case "file":
            yield Store(backend, f"file://{folder}/store?durability=os")
        case "sqlite":
            yield Store(backend, f"sqlite:///{folder}/store.db?durability=os")
        case "s3":
            # It stores its objects on the disk, and acknowledges what survives its kill.
            with SeaweedServer() as server:
                os.environ.update(server.environment)
                yield Store(backend, server.url, server, lease_margin=2.0)
        case _:
            # Durable: acknowledged writes must survive a kill of the server.
            kinds = {"postgres": PostgresServer, "redis": RedisServer, "nats": NatsServer}
            with kinds[backend](durable=True) as server:
                yield Store(backend, server.url, server)
