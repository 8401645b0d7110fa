"""The queue as a parameter of FastAPI's handlers.

app = FastAPI(lifespan=lifespan("postgresql://…"))

@app.post("/mails")
async def send_mail(to: str, queue: Queue) -> str:
    return (await queue.enqueue(send, to)).id
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends
from fastapi.requests import HTTPConnection

from omniq.integrations.asgi import lifespan
from omniq.queue.async_queue import AsyncTaskQueue

__all__ = ["Queue", "lifespan", "queue_of"]


def queue_of(connection: HTTPConnection) -> AsyncTaskQueue:
    """The queue that `lifespan` opened for the application of this request or web socket."""
    queue = getattr(connection.app.state, "queue", None)
    if not isinstance(queue, AsyncTaskQueue):
        raise RuntimeError(
            "this application has no queue: create it with FastAPI(lifespan=lifespan(…)), and run it "
            "with a server that supports lifespans"
        )
    return queue


Queue = Annotated[AsyncTaskQueue, Depends(queue_of)]
"""The type of a handler's parameter that receives the application's queue."""
