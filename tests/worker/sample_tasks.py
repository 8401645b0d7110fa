"""Functions that the tests of the pool run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any

from omniq import Discard, PermanentError, Retry, Snooze, TaskContext, TaskError, current_task, task
from tests.worker.recorder import PATIENCE, RECORDER, until


@task
async def add(a: int, b: int = 0) -> int:
    return a + b


@task
def add_in_thread(a: int, b: int = 0) -> list[Any]:
    return [a + b, threading.current_thread().name]


@task
async def name_of_thread() -> str:
    return threading.current_thread().name


@task
def add_later(a: int, b: int) -> Coroutine[Any, Any, int]:
    """Not async itself, and returns a coroutine."""
    return add(a, b)


@task
async def note(name: str) -> int:
    return RECORDER.note(name)


@task
async def hold(name: str) -> str:
    """Runs until the gate of that name is open."""
    generation = RECORDER.enter(name)
    try:
        await until(RECORDER.gate(name).is_set)
    except asyncio.CancelledError:
        RECORDER.note(f"{name} cancelled")
        raise
    finally:
        RECORDER.leave(generation)
    return name


@task
def hold_in_thread(name: str) -> str:
    generation = RECORDER.enter(name)
    RECORDER.gate(name).wait(PATIENCE)
    RECORDER.leave(generation)
    return name


@task
def until_cancelled(ctx: TaskContext, name: str) -> None:
    """Runs in a thread, checks whether it should stop, and returns when it should."""
    RECORDER.note(name)
    end = time.monotonic() + PATIENCE
    while not ctx.cancelled and time.monotonic() < end:
        RECORDER.gate(name).wait(0.002)
    RECORDER.note(f"{name} cancelled" if ctx.cancelled else f"{name} forgotten")


@task
async def ignore_cancellation(name: str) -> None:
    """Ignores its cancellation."""
    RECORDER.enter(name)
    while not RECORDER.gate(name).is_set():
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            RECORDER.note(f"{name} cancelled again")


@task
async def return_anyway(name: str) -> str:
    """Returns normally when it is cancelled."""
    generation = RECORDER.enter(name)
    try:
        await until(RECORDER.gate(name).is_set)
    except asyncio.CancelledError:
        RECORDER.leave(generation)
    return name


@task
async def fail(message: str = "boom") -> None:
    raise ValueError(message)


@task
async def fail_without_a_word_of(secret: str) -> None:
    raise ValueError("boom")


@task
def fail_in_thread(message: str = "boom") -> None:
    raise ValueError(message)


@task
async def fail_for_good() -> None:
    raise PermanentError("never again")


@task
async def fail_with_retry_after(seconds: float) -> None:
    raise TaskError("slow down", retry_after=seconds)


@task
async def fail_at_first(name: str, failures: int) -> int:
    """Fails that many times; then returns which run this is."""
    run = RECORDER.note(name)
    if run <= failures:
        raise RuntimeError(f"run {run}")
    return current_task().attempt


@task
async def ask_for_retry(delay: float) -> None:
    raise Retry(delay=delay)


@task
async def snooze_once(name: str, delay: float) -> int:
    if RECORDER.note(name) == 1:
        raise Snooze(delay)
    return current_task().attempt


@task
async def discard() -> None:
    raise Discard("not needed")


@task
async def unserialisable() -> object:
    return object()


@task(max_running=1)
async def one_at_a_time(name: str) -> None:
    generation = RECORDER.enter(name)
    await asyncio.sleep(0)
    RECORDER.leave(generation)


@task
async def enqueue_another(name: str, more: int) -> None:
    """Enqueues itself on the queue that the test has put into `RECORDER.facts`."""
    RECORDER.note(name)
    if more:
        await RECORDER.facts["queue"].enqueue(enqueue_another, name, more - 1)


@task
async def report(fraction: float) -> None:
    current_task().progress(fraction, "on the way")
    RECORDER.note("reported")
    await until(RECORDER.gate("report").is_set)


@task
def secret_argument(password: str) -> str:
    return password


def broken_hook(*_: object) -> None:
    raise RuntimeError("the hook is broken")


@task(on_success=broken_hook)
def succeed_with_broken_hook(number: int) -> int:
    if number < 0:
        raise ValueError("negative")
    return number
