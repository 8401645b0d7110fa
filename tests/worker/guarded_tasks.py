"""Functions with breakers, limits and hooks, for the tests of these."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from omniq import BreakerRule, PermanentError, Task, TaskError, task
from tests.worker.recorder import RECORDER

RESET = 0.4
SERVICE = BreakerRule(name="service", max_failures=3, reset_timeout=RESET)


@task(breaker=SERVICE, max_retries=50)
async def ask(number: int) -> int:
    """Needs a service that is up when its gate is open."""
    RECORDER.note("called")
    if not RECORDER.gate("service").is_set():
        RECORDER.note("refused")
        raise ConnectionError("the service is down")
    return number


@task(breaker=BreakerRule(name="service", max_failures=3, reset_timeout=30), max_retries=50)
async def ask_with_long_pauses(number: int) -> int:
    """As `ask`, with a breaker whose opening every poll can see before its first probe."""
    return await ask(number)


@task(max_running=3, limit_key="three")
async def one_of_three(number: int) -> int:
    generation = RECORDER.enter("one of three")
    await asyncio.sleep(0.002)
    RECORDER.leave(generation)
    return number


@task(rate=(25, 0.25), limit_key="rated")
async def rated(number: int) -> int:
    return number


def note_failure(task: Task, error: TaskError) -> None:
    RECORDER.note(f"failed {task.args[0]} {error.error_type} {task.attempts}")


async def note_death(task: Task, error: TaskError) -> None:
    RECORDER.facts["dead"] = (task.id, task.args, error.message)
    RECORDER.note(f"dead {task.args[0]}")


@task(max_retries=1, on_failure=note_failure, on_dead=note_death)
async def fail_with_hooks(name: str) -> None:
    raise ValueError(f"{name} failed")


@task(on_failure=note_failure, on_dead=note_death)
async def succeed_with_hooks(name: str) -> str:
    return name


def break_down(task: Task, error: TaskError) -> None:
    raise RuntimeError("the hook is broken")


async def exit_in_hook(task: Task, error: TaskError) -> None:
    raise SystemExit(3)


@task(max_retries=0, on_failure=break_down, on_dead=exit_in_hook)
def fail_with_broken_hooks(name: str) -> None:
    raise PermanentError(f"{name} failed")


async def wait_in_hook(task: Task, error: TaskError) -> None:
    RECORDER.note("hook began")
    await asyncio.sleep(0.05)
    RECORDER.note("hook ended")


@task(max_retries=0, on_dead=wait_in_hook)
async def fail_with_a_slow_hook() -> None:
    raise ValueError("slow")


async def hang_in_hook(task: Task, error: TaskError) -> None:
    RECORDER.note("hook began")
    if not RECORDER.gate("hook").is_set():
        await asyncio.sleep(3600)
    RECORDER.note("hook ended")


@task(max_retries=0, on_dead=hang_in_hook)
async def fail_with_an_endless_hook() -> None:
    raise ValueError("slow")


@task
async def fail(message: str) -> None:
    raise ValueError(message)


@task
async def refuse() -> None:
    raise PermanentError("never")


@task
async def unwritable() -> Any:
    return object()


@task
async def add(a: int, b: int = 0) -> int:
    return a + b


@dataclass
class Order:
    number: int


@task
def takes_an_order(order: Order) -> int:
    return order.number


@task(executor="process")
def takes_an_order_in_process(order: Order) -> int:
    return order.number
