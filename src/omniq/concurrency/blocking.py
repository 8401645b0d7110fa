"""Blocking classes made from async ones: each method runs its coroutine through a portal.

In the body of a `BlockingFace`: `get_task = blocking(AsyncTaskQueue.get_task)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from functools import update_wrapper
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from omniq.concurrency.portal import Portal

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Async = TypeVar("_Async")


class BlockingFace(Generic[_Async]):
    """The blocking form of an async object. Its coroutines run on the event loop of a portal."""

    def __init__(self, portal: Portal, async_face: _Async) -> None:
        self._portal = portal
        self._async_face = async_face

    def _run(self, work: Coroutine[Any, Any, _R], wait: float | None = 0.0) -> _R:
        """Run the coroutine to its end. Every method that `blocking` makes calls this.

        `wait`: the seconds that it waits on purpose, which no deadline counts; None: without limit.
        """
        return self._portal.run(work, wait)


def no_wait(*_: Any, **__: Any) -> float | None:
    """For a call that only asks the storage, and does not wait on purpose."""
    return 0.0


def any_wait(*_: Any, **__: Any) -> float | None:
    """For a call that waits on purpose, without limit."""
    return None


def blocking(
    method: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _R]],
    wait: Callable[_P, float | None] = no_wait,
) -> Callable[Concatenate[Any, _P], _R]:
    """The method of a `BlockingFace` that calls this async method and waits for what it returns.

    It has the parameters, the name and the docstring of the async method. `wait` is called with the
    arguments, and returns how many seconds the call waits on purpose: see `Portal.run`.
    """

    def call(self: BlockingFace[Any], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        seconds = wait(*args, **kwargs)
        return self._run(method(self._async_face, *args, **kwargs), seconds)

    update_wrapper(call, method)
    # A signature instead of the link to the coroutine function: a caller that unwraps this
    # function must not take it for one that has to be awaited.
    vars(call)["__signature__"] = inspect.signature(method)
    del vars(call)["__wrapped__"]
    return call
