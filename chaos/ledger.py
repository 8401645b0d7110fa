"""A table of the tasks' own beside omniq's: what they write in the transaction that ends them."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from chaos.stores import Store


async def create(store: Store) -> None:
    """An empty table. Nothing in it keeps a task from writing twice."""
    await _rows(store, "CREATE TABLE IF NOT EXISTS chaos_ledger (id TEXT NOT NULL)")


async def write(connection: Any, task_id: str) -> None:
    """A row for the task, through the connection that its transaction gave."""
    insert = "INSERT INTO chaos_ledger VALUES "
    if isinstance(connection, sqlite3.Connection):
        connection.execute(f"{insert} (?)", (task_id,))
    else:
        await connection.execute(f"{insert} ($1)", task_id)


async def read(store: Store) -> Counter[str]:
    """How many rows each task has."""
    return Counter(task_id for (task_id,) in await _rows(store, "SELECT id FROM chaos_ledger"))


async def _rows(store: Store, sql: str) -> list[Any]:
    place = urlsplit(store.url)._replace(query="")
    if store.backend == "sqlite":
        with closing(sqlite3.connect(place.path[1:], timeout=30)) as database:
            return database.execute(sql).fetchall()
    # Here, because whoever simulates has no need of it.
    import asyncpg

    connection = await asyncpg.connect(place.geturl())
    try:
        return list(await connection.fetch(sql))
    finally:
        await connection.close()
