"""Starlette: handlers enqueue tasks, which separate workers run; the dashboard is mounted.

omniq worker web_tasks
OMNIQ_DASHBOARD_OPERATOR=a-long-secret uvicorn starlette_app:app
"""

from __future__ import annotations

import web_tasks
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from omniq import AsyncTaskQueue
from omniq.dashboard import create_app
from omniq.integrations.asgi import lifespan

queue = AsyncTaskQueue()  # opened by the lifespan, not here


async def greet(request: Request) -> JSONResponse:
    handle = await queue.enqueue(web_tasks.welcome, request.path_params["name"])
    return JSONResponse({"id": handle.id, "said": await handle.result(timeout=20)})


app = Starlette(
    routes=[Route("/greet/{name}", greet, methods=["POST"]), Mount("/omniq", create_app(queue))],
    lifespan=lifespan(queue),
)
