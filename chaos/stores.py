"""The stores that a real run is made on, and the servers behind them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from omniq.testing.servers import PostgresServer, RedisServer, Server

BACKENDS = ("file", "sqlite", "postgres", "redis")
TRANSACTIONAL = ("sqlite", "postgres")
"""Where a task can write in the transaction that ends it."""


@dataclass(frozen=True)
class Store:
    """Where the tasks are. `server` is what may be killed and started again, if there is one."""

    backend: str
    url: str
    server: Server | None = None

    @property
    def has_transactions(self) -> bool:
        return self.backend in TRANSACTIONAL


@contextmanager
def a_store(backend: str, folder: Path) -> Iterator[Store]:
    """An empty store of that kind, as long as the block lasts."""
    # Once here, and not in every process that is forked.
    importlib.import_module(f"omniq.storage.{backend}")
    match backend:
        case "file":
            yield Store(backend, f"file://{folder}/store?durability=os")
        case "sqlite":
            yield Store(backend, f"sqlite:///{folder}/store.db?durability=os")
        case _:
            # Durable: what a server that is killed has acknowledged must be there again.
            kind = PostgresServer if backend == "postgres" else RedisServer
            with kind(durable=True) as server:
                yield Store(backend, server.url, server)
