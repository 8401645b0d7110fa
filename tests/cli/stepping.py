"""A task with a durable step, which then fails."""

from __future__ import annotations

from omniq import PermanentError, TaskContext, task


@task
async def stumble(ctx: TaskContext) -> None:
    await ctx.step("upload", _upload)
    raise PermanentError("no further")


async def _upload() -> str:
    return "https://a.example/1"
