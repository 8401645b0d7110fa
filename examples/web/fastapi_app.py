"""FastAPI: handlers enqueue tasks, which run in the process of the application.

uvicorn fastapi_app:app
curl -X POST 'localhost:8000/thumbnails?picture=cat.png'
"""

from __future__ import annotations

import web_tasks
from fastapi import FastAPI, HTTPException

from omniq.integrations.fastapi import Queue, lifespan

app = FastAPI(lifespan=lifespan(worker=[web_tasks], concurrency=20))


@app.post("/thumbnails", status_code=202)
async def create(picture: str, queue: Queue) -> dict[str, str]:
    handle = await queue.enqueue(web_tasks.thumbnail, picture, size=200)
    return {"id": handle.id}


@app.get("/thumbnails/{task_id}")
async def show(task_id: str, queue: Queue) -> dict[str, str | None]:
    result = await queue.get_result(task_id, timeout=10)
    if result is None:
        raise HTTPException(404, "no such thumbnail, or not yet")
    return {"status": result.status.value, "name": result.result}
