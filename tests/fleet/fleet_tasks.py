"""Tasks that write a trace of their runs into a folder, in whichever process they run."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from functools import cache
from pathlib import Path

from omniq import TaskContext, task

counts: Counter[str] = Counter()
"""How often each name was counted in this process."""


@cache
def _trace(folder: str) -> int:
    path = Path(folder, f"{os.getpid()}.trace")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def leave_trace(folder: str, what: str, name: str) -> None:
    """Append a line to the file of this process: the event, the task and the monotonic time."""
    os.write(_trace(folder), f"{what} {name} {time.monotonic_ns()}\n".encode())


@task
async def note(folder: str, name: str) -> str:
    leave_trace(folder, "ran", name)
    return name


@task(max_retries=20)
async def note_slowly(folder: str, name: str) -> str:
    """Run long enough to be interrupted by a fault of the server."""
    await asyncio.sleep(0.02)
    leave_trace(folder, "ran", name)
    return name


@task
async def note_after(folder: str, name: str, seconds: float) -> str:
    leave_trace(folder, "started", name)
    await asyncio.sleep(seconds)
    leave_trace(folder, "ran", name)
    return name


@task(max_retries=20)
async def hold_at_first(ctx: TaskContext, folder: str, name: str) -> int:
    """Wait in the first run until it is stopped; end later runs immediately with their token."""
    leave_trace(folder, f"started-{ctx.fencing_token}", name)
    if ctx.fencing_token > 1:
        return ctx.fencing_token
    try:
        await asyncio.sleep(60)
    finally:
        leave_trace(folder, "stopped-1", name)
    return ctx.fencing_token


@task(max_retries=20)
async def note_token(ctx: TaskContext, folder: str) -> int:
    """Note the token of this run when it starts."""
    leave_trace(folder, str(ctx.fencing_token), ctx.task_id)
    await asyncio.sleep(0.05)
    return ctx.fencing_token


@task
async def count(name: str) -> None:
    counts[name] += 1
    await asyncio.sleep(0.01)


@task
async def count_after(name: str, seconds: float) -> None:
    await asyncio.sleep(seconds)
    counts[name] += 1
