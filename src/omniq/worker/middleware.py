"""Middleware: functions of the application around each run, in the worker's process.

    async def timing(ctx: TaskContext, call_next: CallNext) -> None:
        started = time.perf_counter()
        try:
            await call_next()                  # runs the function; returns its result, or raises
        finally:
            observe(ctx.func_path, time.perf_counter() - started)

The first of several is the outermost. A middleware observes a run and may fail it: an exception that
it raises is the run's. It can neither replace the result nor hide an exception of the function.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from types import ModuleType
from typing import Any

from omniq.errors import InvalidValue, MiddlewareError, SettingsError, UnguardedModule
from omniq.log.user_frames import where
from omniq.tasks.context import TaskContext
from omniq.tasks.function_lookup import main_name
from omniq.tasks.import_guard import importing

CallNext = Callable[[], Awaitable[Any]]
"""Runs the rest: the next middleware, and at last the function. To be awaited once."""

Middleware = Callable[[TaskContext, CallNext], Awaitable[object]]

TIMED_OUT = ("timeout",)
"""The arguments of the `CancelledError` in a run that is stopped because its time is up."""


class MiddlewareStack:
    """Calls middleware around a function, the first outermost."""

    def __init__(self, middleware: Sequence[Middleware]) -> None:
        self._middleware = tuple(middleware)

    async def call(self, task_context: TaskContext, function: CallNext) -> Any:
        """Call the function within all middleware; returns its result, or raises."""
        return await self._call(0, task_context, function)

    async def _call(self, number: int, task_context: TaskContext, function: CallNext) -> Any:
        if number == len(self._middleware):
            return await function()
        run = _Run(lambda: self._call(number + 1, task_context, function))
        middleware = self._middleware[number]
        await middleware(task_context, run.call_next)
        if not run.has_ended:
            raise MiddlewareError(
                f"the middleware {name_of(middleware)} did not await call_next(), so the function "
                + ("was not waited for" if run.has_begun else "did not run")
            )
        if run.error is not None:
            raise run.error
        return run.value


class _Run:
    """What is inside of one middleware: begun and ended by `call_next`."""

    __slots__ = ("_inner", "error", "has_begun", "has_ended", "value")

    def __init__(self, inner: CallNext) -> None:
        self._inner = inner
        self.has_begun = self.has_ended = False
        self.value: Any = None
        self.error: BaseException | None = None

    async def call_next(self) -> Any:
        if self.has_begun:
            raise MiddlewareError("call_next() was called twice: a run calls its function once")
        self.has_begun = True
        try:
            self.value = await self._inner()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.has_ended = True
        return self.value


def name_of(middleware: object) -> str:
    """The path of a middleware, or of a lifespan, for people."""
    if isinstance(middleware, functools.partial):
        middleware = middleware.func
    kind = middleware if hasattr(middleware, "__qualname__") else type(middleware)
    return f"{kind.__module__}.{kind.__qualname__}"


def middleware_of(given: Sequence[Middleware | str]) -> tuple[Middleware, ...]:
    """Return the middleware; one that is given by its path is imported, and a class is called.

    Raises `SettingsError` for a path that leads to none, and `InvalidValue` for any other value.
    """
    if isinstance(given, str) or callable(given):
        raise InvalidValue(f"middleware={given!r}: expected a list, as in middleware=[{given!r}]")
    return tuple(_middleware_of(each) for each in given)


def _middleware_of(given: Middleware | str) -> Middleware:
    found: Any = object_at("middleware", given) if isinstance(given, str) else given
    if isinstance(found, type):
        found = _made(found, given)
    calls = (found, getattr(found, "__call__", None))  # noqa: B004
    if not callable(found) or not any(map(inspect.iscoroutinefunction, calls)):
        raise InvalidValue(
            f"middleware {given!r}: expected async def around(ctx, call_next), or an object with such "
            "a method __call__"
        )
    middleware: Middleware = found
    return middleware


def _made(kind: type, given: Middleware | str) -> Any:
    try:
        return kind()
    except TypeError as error:
        raise InvalidValue(
            f"middleware {given!r}: calling the class without arguments fails: {error}; create an "
            "instance at the top of a module, and give the instance or its path"
        ) from error


def object_at(setting: str, path: str) -> Any:
    """Import the object at a dotted path that a setting names. Raises `SettingsError`."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(_import(module), name)
    except UnguardedModule:
        raise
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise SettingsError(f"{setting}={path!r}: it cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:
        # The top of a module is the user's code, which may raise anything.
        place = where("".join(traceback.format_exception(error)))
        raise SettingsError(
            f"{setting}={path!r}: it cannot be imported: {error!r}"
            + (f" ({place})" if place else "")
        ) from error


def _import(module: str) -> ModuleType:
    # The running script is __main__; an import by its name would run it again.
    if module == main_name():
        return sys.modules["__main__"]
    with importing(module):
        return importlib.import_module(module)
