"""A lifespan that opens a queue: for Starlette, FastAPI and other ASGI frameworks.

    app = Starlette(routes=…, lifespan=lifespan("sqlite:///tasks.db", worker=["tasks"]))

The queue is open before the first request and closed after the last. Handlers use
`request.state.queue`; `app.state.queue` is the same object.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from types import ModuleType
from typing import Any, TypeVar, Unpack

from omniq.errors import ShutdownTimeout
from omniq.models import check_names
from omniq.queue.async_queue import AsyncTaskQueue
from omniq.worker.pool import AsyncWorkerPool, PoolOptions
from omniq.worker.process.module_import import import_with_tasks, loaded_below

A = TypeVar("A")

Lifespan = Callable[[A], AbstractAsyncContextManager[Mapping[str, Any] | None]]


def lifespan(
    queue: AsyncTaskQueue | str | None = None,
    *,
    worker: Sequence[str | ModuleType] = (),
    inner: Lifespan[Any] | None = None,
    **options: Unpack[PoolOptions],
) -> Callable[[A], AbstractAsyncContextManager[dict[str, Any]]]:
    """The `lifespan` argument of a web application: opens the queue at start, closes it at stop.

    `queue` is a queue or its URL. `worker` lists modules whose functions to run: their tasks then
    run in the process of the application, and the schedules that their `@task` declares are stored;
    `options` configure the pool. When the application stops, running tasks get `shutdown_timeout`
    seconds; unfinished ones are released without using an attempt. `inner` is another lifespan,
    which is entered when the queue is open.
    """
    check_names("worker", worker)

    @asynccontextmanager
    async def open_queue(app: A) -> AsyncIterator[dict[str, Any]]:
        async with AsyncExitStack() as stack:
            opened = queue if isinstance(queue, AsyncTaskQueue) else AsyncTaskQueue(queue)
            await stack.enter_async_context(opened)
            state = getattr(app, "state", None)
            if state is not None:
                state.queue = opened
            inner_state = await stack.enter_async_context(inner(app)) if inner is not None else None
            if worker:
                await stack.enter_async_context(_run_worker(opened, worker, options))
            yield {**(inner_state or {}), "queue": opened}

    return open_queue


@asynccontextmanager
async def _run_worker(
    queue: AsyncTaskQueue, sources: Sequence[str | ModuleType], options: PoolOptions
) -> AsyncIterator[AsyncWorkerPool]:
    names = [source if isinstance(source, str) else source.__name__ for source in sources]
    for name in names:
        import_with_tasks(name)
    await queue.schedules.declare(*loaded_below(names))
    pool_options: PoolOptions = {"allow": names, **options}
    pool = queue.worker(**pool_options)
    await pool.start()
    try:
        yield pool
    finally:
        # Interrupted tasks are PENDING again and logged: no reason to fail the server's shutdown.
        with suppress(ShutdownTimeout):
            await pool.stop(queue.storage.settings.shutdown_timeout)
