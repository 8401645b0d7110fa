"""Tasks that run twice, with a delay in between that their worker computes."""

from __future__ import annotations

import time
from typing import Any

from omniq import ExponentialBackoff, Snooze, TaskContext, TaskQueue, task
from tests.fleet.fleet_tasks import leave_trace

DELAY = 2.0
"""Seconds between the two runs."""


@task(max_retries=1, retry=ExponentialBackoff(base=DELAY, jitter=0))
async def fail_once(ctx: TaskContext, folder: str) -> None:
    leave_trace(folder, "ran", "fail_once")
    if ctx.fencing_token == 1:
        raise ConnectionError("once")


@task
async def snooze_once(ctx: TaskContext, folder: str) -> None:
    leave_trace(folder, "ran", "snooze_once")
    if ctx.fencing_token == 1:
        raise Snooze(DELAY)


@task
async def sleep_once(ctx: TaskContext, folder: str) -> None:
    leave_trace(folder, "ran", "sleep_once")
    await ctx.sleep(DELAY)


@task(executor="process")
def sleep_in_a_process(ctx: TaskContext, folder: str) -> None:
    leave_trace(folder, "ran", "sleep_in_a_process")
    ctx.sleep(DELAY)


@task
def enqueue_later(folder: str, url: str) -> float:
    """Be a producer on the worker's machine. Returns what its wall clock says."""
    leave_trace(folder, "ran", "enqueue_later")
    options: dict[str, Any] = {"delay": DELAY, "expires": 60}
    with TaskQueue(url) as queue:
        queue.options(**options).enqueue(note_later, folder)
    return time.time()


@task
async def note_later(folder: str) -> None:
    leave_trace(folder, "ran", "enqueue_later")


@task
async def tick(folder: str) -> None:
    leave_trace(folder, "ran", "tick")
