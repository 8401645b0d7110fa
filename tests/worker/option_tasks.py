"""Tasks for the tests of options: most of them report what they were given."""

from __future__ import annotations

import asyncio
from typing import Any

from omniq import PermanentError, Task, TaskContext, TaskError, task
from tests.worker.recorder import RECORDER

died: list[str] = []
"""The ids of the tasks whose `on_dead` was called."""


def note_death(task: Task, error: TaskError) -> None:
    died.append(task.id)


@task
async def limits_of(ctx: TaskContext, seconds: float = 0.0) -> tuple[float | None, bool]:
    await asyncio.sleep(seconds)
    return ctx.timeout, ctx.deadline is None


@task(timeout=None)
async def without_limit(ctx: TaskContext) -> float | None:
    return ctx.timeout


@task(timeout=None, executor="process")
def without_limit_in_a_process(ctx: TaskContext) -> float | None:
    return ctx.timeout


@task(retry=[100, 300])
async def fail_twice(ctx: TaskContext) -> None:
    raise ValueError(f"attempt {ctx.attempt}")


@task
async def fail(kind: str = "ValueError") -> None:
    raise {"ValueError": ValueError, "PermanentError": PermanentError}[kind]("boom")


@task(reschedule_on_failure=True, on_dead=note_death, max_retries=0)
async def poll(name: str, good_runs: tuple[int, ...] = ()) -> int:
    number = RECORDER.note(name)
    if number not in good_runs:
        raise PermanentError(f"run {number}")
    return number


@task(task_type="report")
async def typed(ctx: TaskContext) -> str:
    return ctx.task_type


@task
async def type_of(ctx: TaskContext, *_: Any) -> str:
    return ctx.task_type
