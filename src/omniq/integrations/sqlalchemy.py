"""SQLAlchemy: a session for each run, in a transaction that ends with it.

    async def make_engine():
        engine = create_async_engine(URL)
        yield engine
        await engine.dispose()

    Session = Annotated[AsyncSession, session_per_run(make_engine)]

    @task
    async def pay(order_id: int, *, session: Session = INJECTED) -> None:
        session.add(Payment(order_id=order_id))

Each worker process makes the engine once. The session commits when the function returns, and rolls
back when it raises; a commit that fails fails the run. The task's outcome is recorded after that, so a
crash between the two runs the function again: `ctx.transaction()` has no such gap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from sqlalchemy import Engine
from sqlalchemy.orm import sessionmaker

from omniq.tasks.resources import Resource


def session_per_run(make_engine: Callable[..., Any], **options: Any) -> Resource:
    """Return the resource of a session; `make_engine` makes an `Engine` or an `AsyncEngine`.

    The session of an `AsyncEngine` is an `AsyncSession`, for async tasks. `options` are those of
    SQLAlchemy's `sessionmaker`; objects stay usable after the commit unless they say otherwise.
    """
    chosen = {"expire_on_commit": False, **options}

    def session(engine: Any) -> Any:
        if isinstance(engine, Engine):
            return sessionmaker(engine, **chosen).begin()
        # Imported late: it needs greenlet, which SQLAlchemy installs only as `sqlalchemy[asyncio]`.
        from sqlalchemy.ext.asyncio import async_sessionmaker

        return async_sessionmaker(engine, **chosen).begin()

    session.__annotations__["engine"] = Annotated[Any, Resource(make_engine)]
    return Resource(session, scope="run")
