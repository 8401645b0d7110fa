"""Runs an event loop that user code shares, and that user code must not be able to end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

_T = TypeVar("_T")


def run_to_the_end(runner: asyncio.Runner, coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run it until it is done, whatever else on the loop tries to end that.

    `sys.exit()` in an asyncio task of the user's own leaves the loop at once, and so does
    `loop.stop()`; then the loop goes on where it was. For threads that no Ctrl-C reaches.
    """
    loop = runner.get_loop()
    task = loop.create_task(coroutine)
    while not task.done() and not loop.is_closed():
        # What the coroutine itself raises is kept in the task.
        with suppress(SystemExit, KeyboardInterrupt, Exception):
            loop.run_until_complete(task)
    return task.result()
