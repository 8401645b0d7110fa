"""The rows that tasks write in the transaction of their outcome, in a table beside omniq's."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from chaos.stores import Store


async def create(store: Store) -> None:
    """Create an empty table. It has no constraint against writing twice."""
    await _rows(store, "CREATE TABLE IF NOT EXISTS chaos_task_writes (id TEXT NOT NULL)")


async def write(connection: Any, task_id: str) -> None:
    """Insert a row for the task, on the connection of its transaction."""
    insert = "INSERT INTO chaos_task_writes VALUES "
    if isinstance(connection, sqlite3.Connection):
        connection.execute(f"{insert} (?)", (task_id,))
    else:
        await connection.execute(f"{insert} ($1)", task_id)


async def read(store: Store) -> Counter[str]:
    """Return how many rows each task has."""
    return Counter(task_id for (task_id,) in await _rows(store, "SELECT id FROM chaos_task_writes"))


async def _rows(store: Store, sql: str) -> list[Any]:
    address = urlsplit(store.url)._replace(query="")
    if store.backend == "sqlite":
        with closing(sqlite3.connect(address.path[1:], timeout=30)) as database:
            return database.execute(sql).fetchall()
    # Imported here, because simulated runs do not need it.
    import asyncpg

    connection = await asyncpg.connect(address.geturl())
    try:
        return list(await connection.fetch(sql))
    finally:
        await connection.close()
