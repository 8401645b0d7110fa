"""Tasks of the tests of flows that Celery's tests of its canvas describe."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from omniq import Task, TaskContext, TaskError, task

CALLS: list[str] = []
ERRORS: Counter[str] = Counter()


async def note_error(task: Task, error: TaskError) -> None:
    ERRORS[task.func_path.rpartition(".")[2]] += 1


@task
async def add(first: Any, second: Any) -> Any:
    return first + second


@task
async def identity(value: Any) -> Any:
    return value


@task
async def total(values: list[Any], more: int = 0) -> Any:
    return sum(values) + more


@task
async def add_to_each(values: list[Any], number: Any) -> list[Any]:
    return [value + number for value in values]


@task
async def echo(word: str) -> str:
    CALLS.append(word)
    return word


@task(max_retries=0, on_dead=note_error)
async def fail() -> Any:
    raise ValueError("expected")


@task(max_retries=0, on_dead=note_error)
async def fail_with(value: Any) -> Any:
    raise ValueError(f"expected, for {value}")


@task
async def add_by_a_child(ctx: TaskContext, first: Any, second: Any) -> Any:
    return await ctx.call("rest", add, first, second)


@task
async def identity_by_children(ctx: TaskContext, value: Any) -> Any:
    """Does its work in a chain of two children."""
    return await ctx.call("second", identity, await ctx.call("first", identity, value))


@task
async def identity_and_echo(ctx: TaskContext, value: Any, word: str) -> Any:
    result = await ctx.call("rest", identity, value)
    await ctx.call("callback", echo, word)
    return result


@task(max_retries=0, on_dead=note_error)
async def fail_by_a_child(ctx: TaskContext) -> Any:
    return await ctx.call("rest", fail)


@task
async def add_to_each_by_children(ctx: TaskContext, values: list[int], number: int) -> list[int]:
    return await ctx.map("part", add, values, number)


@task
async def outer(ctx: TaskContext) -> str:
    await ctx.step("in", write, "into outer")
    await ctx.call("middle", middle)
    await ctx.step("out", write, "out of outer")
    return "done"


@task
async def middle(ctx: TaskContext) -> str:
    await ctx.step("in", write, "into middle")
    await ctx.call("inner", echo, "inner")
    await ctx.step("out", write, "out of middle")
    return "done"


async def write(word: str) -> None:
    CALLS.append(word)


@task
async def own_id(ctx: TaskContext) -> str:
    return ctx.task_id


@task
async def own_id_after(ctx: TaskContext, before: Any) -> list[Any]:
    return [before, ctx.task_id]


@task
async def sum_within(values: list[int], seconds: float) -> int:
    """The sum, or 0 when there was no time to compute it."""
    try:
        async with asyncio.timeout(seconds):
            await asyncio.sleep(3_600)
    except TimeoutError:
        return 0
    return sum(values)


@task(retry=[0.001])
async def maps_and_fails_once(ctx: TaskContext) -> list[str]:
    words = await ctx.map("part", echo, ["a", "b"])
    await ctx.step("once", write, "mapped")
    if ctx.attempt == 1:
        raise ValueError("after its children")
    return words
