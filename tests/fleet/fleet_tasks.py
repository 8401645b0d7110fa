"""What the fleet runs: tasks that leave a trace in a folder, whichever process runs them."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from functools import cache
from pathlib import Path

from omniq import TaskContext, task

counts: Counter[str] = Counter()
"""How often each name was counted, in this process."""


@cache
def _trace(folder: str) -> int:
    path = Path(folder, f"{os.getpid()}.trace")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def leave_trace(folder: str, what: str, name: str) -> None:
    """One line in this process's own file: what happened to whom, and when on this machine."""
    os.write(_trace(folder), f"{what} {name} {time.monotonic_ns()}\n".encode())


async def note(folder: str, name: str) -> str:
    leave_trace(folder, "ran", name)
    return name


@task(max_retries=20)
async def note_slowly(folder: str, name: str) -> str:
    """Long enough to be interrupted by what happens to the server."""
    await asyncio.sleep(0.02)
    leave_trace(folder, "ran", name)
    return name


@task(max_retries=20)
async def hold_at_first(ctx: TaskContext, folder: str, name: str) -> int:
    """The first claim waits to be stopped; later ones end at once, and say which they are."""
    leave_trace(folder, f"started-{ctx.fencing_token}", name)
    if ctx.fencing_token > 1:
        return ctx.fencing_token
    try:
        await asyncio.sleep(60)
    finally:
        leave_trace(folder, "stopped-1", name)
    return ctx.fencing_token


async def count(name: str) -> None:
    counts[name] += 1
    await asyncio.sleep(0.01)
