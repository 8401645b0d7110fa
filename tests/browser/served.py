"""Runs the dashboard for tests, on a local port or without a network, and signs in."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette

from omniq import AsyncTaskQueue
from omniq.dashboard import Access, create_app

PAGES = (
    "/",
    "/?range=24h",
    "/tasks",
    "/tasks?q=queue:mail",
    "/tasks/new",
    "/tasks/matching?q=queue:mail",
    "/dead",
    "/workers",
    "/schedules",
    "/schedules/new",
    "/queues",
    "/flows",
    "/events",
    "/functions",
    "/limits",
    "/audit",
    "/jobs",
    "/storage",
    "/api",
)
"""Every page that needs no record."""

SECRET = "a secret of the tests"
VIEWER = "a secret of a viewer"


@asynccontextmanager
async def served(queue: AsyncTaskQueue, access: Access | None = None) -> AsyncIterator[Any]:
    """Serve a dashboard of the queue on a free port; yields its address and the application."""
    app = create_app(queue, access=access or Access(operator=SECRET, viewer=VIEWER))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    # From now on connections wait for the server instead of being refused.
    listener.listen(128)
    config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve([listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", app
    finally:
        await app.state.dashboard.close()
        server.should_exit = True
        await serving
        listener.close()


class Client(httpx.AsyncClient):
    """A client with access to the application that it calls."""

    app: Starlette


@asynccontextmanager
async def dashboard_client(
    queue: AsyncTaskQueue, access: Access | None = None, **options: Any
) -> AsyncIterator[Client]:
    """An unauthenticated client that calls a dashboard of the queue without a network."""
    app = create_app(queue, access=access or Access(operator=SECRET, viewer=VIEWER), **options)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with Client(transport=transport, base_url="http://localhost:8484") as client:
        client.app = app
        try:
            yield client
        finally:
            await app.state.dashboard.close()


def bearer(secret: str = SECRET) -> dict[str, str]:
    """The header that a program sends with every request."""
    return {"authorization": f"Bearer {secret}"}


async def sign_in(client: httpx.AsyncClient, secret: str = SECRET) -> str:
    """Sign in as a browser does; returns the token that every change must carry."""
    response = await client.post("/login", data={"secret": secret})
    assert response.status_code == 303
    page = (await client.get("/queues")).text
    return page.split('name="token" value="')[1].split('"')[0]
