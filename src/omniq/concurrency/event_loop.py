"""Event loops: whether one runs here, and one that user code shares and must not be able to end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

_T = TypeVar("_T")


def has_event_loop() -> bool:
    """Whether an event loop runs in this thread."""
    return asyncio._get_running_loop() is not None


def run_until_done(runner: asyncio.Runner, coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run the coroutine until it is done, even if other code on the loop tries to stop the loop.

    `sys.exit()` in an asyncio task of the user leaves the loop immediately, and so does `loop.stop()`;
    this function then continues the loop. Only for threads that Ctrl-C does not interrupt.
    """
    loop = runner.get_loop()
    task = loop.create_task(coroutine)
    while not task.done() and not loop.is_closed():
        # An exception of the coroutine itself is stored in the task.
        with suppress(SystemExit, KeyboardInterrupt, Exception):
            loop.run_until_complete(task)
    return task.result()
