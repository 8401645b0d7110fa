import os
from collections.abc import AsyncIterator
from typing import Annotated, Any

import asyncpg
from asyncpg.pool import PoolConnectionProxy
from fastapi import FastAPI

from omniq import INJECTED, Resource, task
from omniq.integrations.fastapi import Queue, lifespan


async def make_pool() -> AsyncIterator[asyncpg.Pool]:
    async with asyncpg.create_pool(os.environ["DATABASE_URL"]) as pool:
        yield pool


Pool = Annotated[asyncpg.Pool, Resource(make_pool)]


async def make_session(pool: Pool) -> AsyncIterator[PoolConnectionProxy]:
    async with pool.acquire() as connection, connection.transaction():
        yield connection


Session = Annotated[PoolConnectionProxy, Resource(make_session, scope="run")]
app = FastAPI(lifespan=lifespan())


@task
async def add_user(name: str, session: Session = INJECTED) -> int:
    row: int = await session.fetchval("INSERT INTO users (name) VALUES ($1) RETURNING id", name)
    return row


@app.post("/users/{name}")
async def create(name: str, queue: Queue) -> dict[str, Any]:
    handle = await queue.enqueue(add_user, name)
    return {"id": await handle.result(timeout=20)}
