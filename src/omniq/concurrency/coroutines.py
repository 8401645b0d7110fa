"""Drives a coroutine inside another asyncio task, in a context that it shares with nothing else."""

from __future__ import annotations

import types
from collections.abc import Coroutine, Generator
from contextvars import Context
from typing import Any


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
