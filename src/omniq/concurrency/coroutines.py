"""Drives coroutines: one that never suspends, or one inside another asyncio task."""

from __future__ import annotations

import types
from collections.abc import Coroutine, Generator
from contextvars import Context
from typing import Any, TypeVar

from omniq.errors import OmniqError

_T = TypeVar("_T")


def run_without_loop(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine that never suspends, and return its result."""
    try:
        work.send(None)
    except StopIteration as returned:
        return returned.value  # type: ignore[no-any-return]
    work.close()
    raise OmniqError("this coroutine waits for something, and was run outside of an event loop")


@types.coroutine
def go_on(work: Coroutine[Any, Any, Any], context: Context, awaited: Any) -> Generator[Any, Any]:
    """Run a coroutine to its end that already waits for `awaited`. Its code runs in that context."""
    while True:
        error, value = None, None
        try:
            value = yield awaited
        except BaseException as thrown:
            error = thrown
        try:
            if error is None:
                awaited = context.run(work.send, value)
            else:
                awaited = context.run(work.throw, error)
        except StopIteration:
            return
