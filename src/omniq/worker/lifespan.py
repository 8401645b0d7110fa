"""The lifespan of a worker process: opened before it claims a task, closed after its last outcome.

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[State]:
        async with asyncpg.create_pool(DSN) as pool:
            yield State(pool)                  # ctx.state, in each task

Each process that runs tasks enters it once: each of `--processes`, and each child process of
`executor="process"` before its first task.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from omniq.errors import InvalidValue, LifespanFailed, OmniqError
from omniq.log.user_frames import where
from omniq.models import TaskError
from omniq.tasks.function_lookup import attribute_of, is_main, main_name
from omniq.text.masking import mask_text
from omniq.worker.middleware import name_of, object_at

Lifespan = Callable[[], AbstractAsyncContextManager[Any] | AsyncIterator[Any]]
"""A function that returns an async context manager; an async generator function counts as one."""

_LONGEST_TEXT = 500
_BLOCKED = 0.5
"""Seconds after its time when a lifespan that did not end blocks the event loop."""

_MISSING = (
    "this worker has no lifespan, so there is no ctx.state: name it with omniq worker --lifespan, "
    "queue.worker(lifespan=…), or [tool.omniq] lifespan"
)


class LifespanState:
    """What the lifespan has yielded, for the tasks of a process."""

    __slots__ = ("_state", "_why_not")

    def __init__(self, why_not: str = _MISSING) -> None:
        self._state: Any = None
        self._why_not: str | None = why_not

    def set(self, state: Any) -> None:
        self._state, self._why_not = state, None

    def get(self) -> Any:
        """Return what was yielded. Raises `OmniqError` if there is no lifespan."""
        if self._why_not is not None:
            raise OmniqError(self._why_not)
        return self._state


class OpenLifespan:
    """A lifespan that is entered and left by the same asyncio task."""

    def __init__(self, lifespan: Lifespan) -> None:
        self._lifespan = lifespan
        self._name = name_of(lifespan)
        self._manager: AbstractAsyncContextManager[Any] | None = None

    async def enter(
        self, timeout: float, on_block: Callable[[LifespanFailed], None] | None = None
    ) -> Any:
        """Enter it, and return what it yields. Raises `LifespanFailed`.

        A lifespan that blocks the event loop cannot be ended: then `on_block` is called, in a thread.
        """
        late = LifespanFailed(
            f"the lifespan {self._name} did not start within {timeout:g} s (setting start_timeout)"
        )
        timer = threading.Timer(timeout + _BLOCKED, on_block or _ignore, (late,))
        timer.daemon = True
        if on_block is not None:
            timer.start()
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with asyncio.timeout(timeout) as limit:
                manager = self._make()
                state = await manager.__aenter__()
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            if isinstance(error, LifespanFailed):
                raise
            if isinstance(error, TimeoutError) and limit.expired():
                raise late from error
            # The code of the application, which may raise anything. Its text may have a password.
            record = TaskError.from_exception(error)
            text = f": {mask_text(record.message)[:_LONGEST_TEXT]}" if record.message else ""
            place = where(record.traceback or "")
            raise LifespanFailed(
                f"the lifespan {self._name} failed: {record.error_type}{text}"
                + (f" ({place})" if place else "")
            ) from error
        finally:
            timer.cancel()
        self._manager = manager
        if clock() - began > timeout:
            # It has blocked the event loop, and `on_block` has reported that it failed.
            with contextlib.suppress(Exception):
                await self.leave()
            raise late
        return state

    async def leave(self) -> None:
        """Leave it, if it was entered. What ends the worker's event loop is raised as an `Exception`."""
        manager, self._manager = self._manager, None
        if manager is None:
            return
        try:
            await manager.__aexit__(None, None, None)
        except (Exception, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            # The other parts of the worker are still to be closed, the storage among them.
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise TimeoutError(
                    f"{self._name} was cut off at the end of the shutdown timeout"
                ) from error
            raise RuntimeError(f"{self._name} raised {error!r}") from error

    def _make(self) -> AbstractAsyncContextManager[Any]:
        made: Any = self._lifespan()
        if inspect.isasyncgen(made):
            made = contextlib.asynccontextmanager(lambda: made)()
        if not hasattr(type(made), "__aenter__"):
            if inspect.iscoroutine(made):
                made.close()
            raise LifespanFailed(
                f"the lifespan {self._name}: expected a function with @asynccontextmanager, which yields once"
            )
        manager: AbstractAsyncContextManager[Any] = made
        return manager


def _ignore(_: LifespanFailed) -> None:
    pass


def lifespan_of(given: Lifespan | str) -> Lifespan:
    """Return the lifespan; one that is given by its path is imported. Raises `SettingsError`."""
    found = object_at("lifespan", given) if isinstance(given, str) else given
    # What @asynccontextmanager returns when it is called is callable, too: it is also a decorator.
    is_called = not isinstance(found, type) and hasattr(type(found), "__aenter__")
    if not callable(found) or is_called:
        raise InvalidValue(
            f"lifespan={given!r}: expected a function with @asynccontextmanager; pass the function, "
            "do not call it"
        )
    lifespan: Lifespan = found
    return lifespan


def importable_path(found: Callable[..., Any]) -> str | None:
    """Return the path by which another process imports a lifespan or a middleware; None without one."""
    name, module = getattr(found, "__qualname__", ""), getattr(found, "__module__", None)
    loaded = sys.modules.get(module or "")
    try:
        # One in a class has no path of a module and a name.
        if loaded is None or "." in name or attribute_of(loaded, [name]) is not found:
            return None
    except AttributeError:
        return None
    place = main_name() if is_main(module or "") else module
    return None if place is None else f"{place}.{name}"
