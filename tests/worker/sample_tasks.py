"""Functions that the tests of the pool run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any

from omniq import Discard, PermanentError, Retry, Snooze, TaskContext, TaskError, current_task, task
from tests.worker.stage import PATIENCE, STAGE, until


async def add(a: int, b: int = 0) -> int:
    return a + b


def add_in_thread(a: int, b: int = 0) -> list[Any]:
    return [a + b, threading.current_thread().name]


async def name_of_thread() -> str:
    return threading.current_thread().name


def add_later(a: int, b: int) -> Coroutine[Any, Any, int]:
    """Not async itself, and returns a coroutine."""
    return add(a, b)


async def note(name: str) -> int:
    return STAGE.note(name)


async def hold(name: str) -> str:
    """Runs until the gate of that name is open."""
    scene = STAGE.enter(name)
    try:
        await until(STAGE.gate(name).is_set)
    except asyncio.CancelledError:
        STAGE.note(f"{name} cancelled")
        raise
    finally:
        STAGE.leave(scene)
    return name


def hold_in_thread(name: str) -> str:
    scene = STAGE.enter(name)
    STAGE.gate(name).wait(PATIENCE)
    STAGE.leave(scene)
    return name


def until_cancelled(ctx: TaskContext, name: str) -> None:
    """A thread that looks whether it should stop, and does."""
    STAGE.note(name)
    end = time.monotonic() + PATIENCE
    while not ctx.cancelled and time.monotonic() < end:
        STAGE.gate(name).wait(0.002)
    STAGE.note(f"{name} cancelled" if ctx.cancelled else f"{name} forgotten")


async def deaf(name: str) -> None:
    """Does not listen to being cancelled."""
    STAGE.enter(name)
    while not STAGE.gate(name).is_set():
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            STAGE.note(f"{name} told")


async def return_anyway(name: str) -> str:
    """Takes its cancellation for an invitation to come back early."""
    scene = STAGE.enter(name)
    try:
        await until(STAGE.gate(name).is_set)
    except asyncio.CancelledError:
        STAGE.leave(scene)
    return name


async def fail(message: str = "boom") -> None:
    raise ValueError(message)


def fail_in_thread(message: str = "boom") -> None:
    raise ValueError(message)


async def fail_for_good() -> None:
    raise PermanentError("never again")


async def fail_with_retry_after(seconds: float) -> None:
    raise TaskError("slow down", retry_after=seconds)


async def fail_at_first(name: str, failures: int) -> int:
    """Fails that many times; then returns which run this is."""
    run = STAGE.note(name)
    if run <= failures:
        raise RuntimeError(f"run {run}")
    return current_task().attempt


async def ask_for_retry(delay: float) -> None:
    raise Retry(delay=delay)


async def snooze_once(name: str, delay: float) -> int:
    if STAGE.note(name) == 1:
        raise Snooze(delay)
    return current_task().attempt


async def discard() -> None:
    raise Discard("not needed")


async def unserialisable() -> object:
    return object()


@task(max_running=1)
async def one_at_a_time(name: str) -> None:
    scene = STAGE.enter(name)
    await asyncio.sleep(0)
    STAGE.leave(scene)


async def enqueue_another(name: str, more: int) -> None:
    """Enqueues itself on the queue that the test has put on the stage."""
    STAGE.note(name)
    if more:
        await STAGE.facts["queue"].enqueue(enqueue_another, name, more - 1)


async def report(fraction: float) -> None:
    current_task().progress(fraction, "on the way")
    STAGE.note("reported")
    await until(STAGE.gate("report").is_set)


def secret_argument(password: str) -> str:
    return password
