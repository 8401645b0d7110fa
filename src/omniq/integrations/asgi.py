"""A queue for the life of a web application: Starlette, FastAPI, or whatever else has a lifespan.

    app = Starlette(routes=…, lifespan=lifespan("sqlite:///tasks.db", worker=["tasks"]))

The queue is open before the first request and closed after the last. Handlers find it in
`request.state.queue`; `app.state.queue` is the same.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from types import ModuleType
from typing import Any, TypeVar, Unpack

from omniq.errors import ShutdownTimeout
from omniq.queue.async_queue import AsyncTaskQueue
from omniq.worker.pool import AsyncWorkerPool, PoolOptions

A = TypeVar("A")

Lifespan = Callable[[A], AbstractAsyncContextManager[Mapping[str, Any] | None]]


def lifespan(
    queue: AsyncTaskQueue | str | None = None,
    *,
    worker: Sequence[str | ModuleType] = (),
    inner: Lifespan[Any] | None = None,
    **options: Unpack[PoolOptions],
) -> Callable[[A], AbstractAsyncContextManager[dict[str, Any]]]:
    """What a web application takes as its `lifespan`: it opens the queue and, in the end, closes it.

    `queue` is one, or the URL of one. With `worker`, the modules whose functions it runs, tasks run
    in the application's own process, and the schedules that `@task` declares there are kept;
    `options` are the pool's. When the application stops, running tasks get `shutdown_timeout`
    seconds, and what does not finish is given back uncharged. `inner` is a lifespan of your own,
    entered when the queue is open.
    """

    @asynccontextmanager
    async def span(app: A) -> AsyncIterator[dict[str, Any]]:
        async with AsyncExitStack() as stack:
            opened = queue if isinstance(queue, AsyncTaskQueue) else AsyncTaskQueue(queue)
            await stack.enter_async_context(opened)
            state = getattr(app, "state", None)
            if state is not None:
                state.queue = opened
            given = await stack.enter_async_context(inner(app)) if inner is not None else None
            if worker:
                await stack.enter_async_context(_working(opened, worker, options))
            yield {**(given or {}), "queue": opened}

    return span


@asynccontextmanager
async def _working(
    queue: AsyncTaskQueue, sources: Sequence[str | ModuleType], options: PoolOptions
) -> AsyncIterator[AsyncWorkerPool]:
    modules = [importlib.import_module(it) if isinstance(it, str) else it for it in sources]
    await queue.schedules.declare(*modules)
    said: PoolOptions = {"allow": [module.__name__ for module in modules], **options}
    pool = queue.worker(**said)
    await pool.start()
    try:
        yield pool
    finally:
        # What is cut off is PENDING again, and told of in the log: nothing to stop a server for.
        with suppress(ShutdownTimeout):
            await pool.stop(queue.storage.settings.shutdown_timeout)
